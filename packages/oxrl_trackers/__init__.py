"""Modules that show a run in MLflow, TensorBoard, W&B or trackio, one file each."""
