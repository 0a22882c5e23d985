"""Training loops, one per page. Only they and the CLI read the config."""
