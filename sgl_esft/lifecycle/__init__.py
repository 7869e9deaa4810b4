"""Adapters as a managed resource: what lies on disk, what is loaded, what is on the device.

/v1/adapters, a request's adapter -> library.py -> AdapterEngine (engine.py) -> SGLang, ranks
"""
