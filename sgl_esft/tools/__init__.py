"""The command line, and what works on checkpoints and adapters without a server."""
