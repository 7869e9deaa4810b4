"""Who has how much memory, and what will be needed."""
