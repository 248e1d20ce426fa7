"""areal: kubectl for LLM reinforcement learning, with no cluster and no daemon underneath."""

__version__ = "0.1.0"
