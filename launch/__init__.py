"""From command line to running server; the only place that knows both packages (server.py)."""
