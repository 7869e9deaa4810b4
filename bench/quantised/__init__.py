"""Quantised experts: what they cost in accuracy, and what they save in memory and time."""
