"""The drivers of jobs on CPUs, for ``megatron`` (``megatron_on_cpu``)."""

import tests.training.engines.megatron_on_cpu  # noqa: F401
from areal.training.drivers import grpo, sft

__all__ = ["grpo", "sft"]
