"""oxRL: readable, provable post-training of language models."""

__version__ = "0.1.0"
