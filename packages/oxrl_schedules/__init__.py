"""Schedules of sampling and training, simulated: which share of its time a run waits."""
