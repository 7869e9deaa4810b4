"""The built-in page at /dashboard: what the server's own routes say, as a browser shows it."""
