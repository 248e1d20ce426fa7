"""This folder goes on the PYTHONPATH of vLLM's worker processes; nothing else of areal does."""
