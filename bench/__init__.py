"""Measurements as commands; each writes one file into bench/results."""
