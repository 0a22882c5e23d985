"""What the commands beside `train` do."""
