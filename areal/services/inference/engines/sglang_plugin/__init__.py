"""This folder, and no other part of areal, is added to the PYTHONPATH of an SGLang server that needs a key."""
