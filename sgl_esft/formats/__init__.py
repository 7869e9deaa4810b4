"""What is read from disk, and checked before anything else sees it."""
