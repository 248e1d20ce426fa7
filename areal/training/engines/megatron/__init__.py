"""The Megatron engine: Hugging Face models as ``megatron-core`` computes them, over data, tensor, pipeline, context and
expert parallel ranks. ``names`` maps weights, ``modules`` and ``model`` build, ``engine`` is the contract."""
