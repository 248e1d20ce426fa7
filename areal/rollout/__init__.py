"""The rollout engine: episodes run against an inference service, for a trainer or for a collection.

For a trainer, as many episodes as its staleness allows:

staleness          how many episodes may start and what becomes of each: pure
executor           one episode with its attempts; episodes as tasks on one event loop
engine             what a workflow samples from
controller         the blocking interface for a trainer
dump               consumed rollouts as files

Workflows:

workflows          agents, environments, real users, groups of samples; from what a trainer names to what runs
rlvr               one answer or several turns, with a verifiable reward
openai_client      OpenAI's client as a workflow's own
tensors            training rows

``areal inf collect``, with the standard library alone:

collection         examples in, episodes on threads, trajectories out; goes on after a kill
collection_output  its folder and its summary

For both:

sessions           how a reward seals a recorded session; the session routes of a gateway
failures           why an episode gave no trajectory
"""
