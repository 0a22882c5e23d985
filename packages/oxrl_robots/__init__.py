"""Simulated robots, and demonstrations of real ones."""
