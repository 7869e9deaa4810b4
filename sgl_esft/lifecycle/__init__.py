"""Adapters as a managed resource: what lies on disk, what is loaded, what is on the device."""
