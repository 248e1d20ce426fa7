"""What runs inside vLLM's worker processes: this folder goes on their PYTHONPATH, and nothing else of areal does."""
