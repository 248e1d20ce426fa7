"""Trainers: the loop in a base class, and the batches and losses of each algorithm."""
