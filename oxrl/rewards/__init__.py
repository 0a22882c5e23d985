"""Functions that score completions, and the killable workers they run in."""
