"""The Megatron engine: Hugging Face models on ``megatron-core``, over data, tensor, pipeline, context and expert
parallel ranks. ``names`` converts weights, ``modules`` and ``model`` build the decoder, ``engine`` implements the
contract."""
