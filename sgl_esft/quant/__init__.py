"""Routed experts in fewer bits: the rounding, and whole checkpoints written with it."""
