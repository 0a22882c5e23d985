"""Checkpoints: their format, writers, readers and hashes."""
