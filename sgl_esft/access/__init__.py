"""Who may call the server, and with what; decided before a request costs work (gate.py)."""
