"""AReaL's import paths."""
