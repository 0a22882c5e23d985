"""Brings published, generated and judged data into rows that oxRL trains on (`oxrl prepare`)."""
