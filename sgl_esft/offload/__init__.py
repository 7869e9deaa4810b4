"""Experts in tiers: rows of the device, host memory, the checkpoint; what is fetched ahead."""
