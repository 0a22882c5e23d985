"""The work of the commands beside `train`."""
