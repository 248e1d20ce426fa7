"""Recorded trajectories outside the recording service: files, decoding, views. Imports only the standard library;
NumPy, pyarrow and tokenizers are imported when they are used."""
