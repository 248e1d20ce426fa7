"""This folder, and no other part of areal, is added to the PYTHONPATH of vLLM's worker processes."""
