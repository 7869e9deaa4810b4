"""The allow-list of what reaches the engine; see README.md."""
