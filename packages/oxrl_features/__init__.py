"""Features beside those of the core: controls, monitors, and what other data adds to a step."""
