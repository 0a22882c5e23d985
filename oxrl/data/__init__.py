"""From dataset files to prompts, conversations and batches. No model code."""
