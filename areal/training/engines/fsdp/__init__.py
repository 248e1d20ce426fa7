"""The FSDP2 engine: Hugging Face models, sharded by ``torch.distributed.fsdp.fully_shard``, from 1 to N ranks."""

from areal.training.engines.fsdp.engine import FSDPEngine

__all__ = ["FSDPEngine"]
