"""What one GPU machine builds, checks and measures."""
