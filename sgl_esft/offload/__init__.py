"""Experts in tiers: device rows, host memory, the checkpoint; prefetched by expert maps (FineMoE)."""
