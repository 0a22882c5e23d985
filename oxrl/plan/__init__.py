"""What a run will take, estimated before it starts: memory, rows, steps."""
