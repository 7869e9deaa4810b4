"""What a server does, to be seen: metrics by adapter, logs with request ids."""
