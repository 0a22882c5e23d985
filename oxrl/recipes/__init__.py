"""Training loops, one per page."""
