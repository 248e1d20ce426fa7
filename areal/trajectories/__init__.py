"""Recorded trajectories outside the service that recorded them: files, decoding, views. Standard library only."""
