"""Processes that speak another engine's routes, and compute with ours."""
