"""Batches of training data: plain dicts of tensors, how they are cut into micro-batches and spread over ranks."""
