"""Recorded trajectories outside the recording service: files, decoding, views. Libraries are imported on use."""
