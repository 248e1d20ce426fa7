"""What user code imports.

cli_args        configuration classes, load_expr_config
workflow_api    RolloutWorkflow, agents, what a trajectory is
env_api         Agent, Environment
reward_api      the signature of a reward, AsyncRewardWrapper
engine_api      InferenceEngine, TrainEngine
io_struct       ModelRequest, ModelResponse, FinetuneSpec, StepInfo, WeightUpdateMeta, ...
alloc_mode      AllocationMode
registry        names and ``module:attr``
"""
