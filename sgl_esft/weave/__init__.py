"""Experts of many adapters over one base: slots, memory, maps, and the layer that uses them."""
