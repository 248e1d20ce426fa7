"""The rollout engine: episodes run against an inference service, for a trainer or for a collection.

For both, on an installation without extras:

executor           episodes as tasks on one event loop, each with its attempts
staleness          the number of episodes that may start, and their outcomes: pure
sessions           recorded sessions: started for a group, rewarded and sealed, exported
failures           why an episode gave no trajectory

For a trainer:

controller         the blocking interface
episodes           one episode: its deadline, the check of its rows
engine             the ``InferenceEngine`` that a workflow samples from
dump               consumed rollouts as files
workflows          agents, real users, groups of samples; resolved from a trainer's names
rows               the prompt of a row as token ids, and its reward
openai_client      an OpenAI client whose calls an episode rewards and exports itself
tensors            training rows

For ``areal inf collect`` and ``areal eval``:

collection         examples in, trajectories out; resumes after a kill
collection_output  the output folder and the summary
"""
