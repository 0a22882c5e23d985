"""What a model's folder says, read without torch."""
