"""The rollout engine: episodes run against an inference service, for a trainer or for a collection.

For a trainer, as many episodes as its staleness allows:

staleness          the number of episodes that may start, and their outcomes: pure
executor           one episode with its attempts; episodes as tasks on one event loop
engine             the ``InferenceEngine`` that a workflow samples from
controller         the blocking interface for a trainer
dump               consumed rollouts as files

Workflows:

workflows          agents, environments, real users, groups of samples; resolved from a trainer's names
rlvr               one answer or several turns, with a verifiable reward
openai_client      an OpenAI client whose calls an episode rewards and exports itself
tensors            training rows

``areal inf collect``, with the standard library alone:

collection         examples in, episodes on threads, trajectories out; resumes after a kill
collection_output  the output folder and the summary

For both:

sessions           the order of calls that seals a recorded session; the session routes of a gateway
failures           why an episode gave no trajectory
"""
