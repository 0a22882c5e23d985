"""The run directory: records, checkpoints, trackers, the console."""
