"""Kernels and memory calls by themselves."""
