"""Runs programs that a model wrote, and keeps them from everything else."""
