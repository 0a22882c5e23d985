"""Users' own code: found, checked, pinned and run in processes of its own."""
