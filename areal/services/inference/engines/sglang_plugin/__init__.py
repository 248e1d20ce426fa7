"""This folder goes on the PYTHONPATH of SGLang's server where that needs a key; nothing else of areal does."""
