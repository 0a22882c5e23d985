"""Engines in Ray actors: the same two interfaces, several processes."""
