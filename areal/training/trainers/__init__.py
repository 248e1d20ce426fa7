"""Trainers: a base that owns the loop, and for each algorithm what a batch is, and what its loss."""
