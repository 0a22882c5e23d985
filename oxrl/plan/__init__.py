"""Estimates of what a run will take, made before it starts: memory, rows, steps."""
