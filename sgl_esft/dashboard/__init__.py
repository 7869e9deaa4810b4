"""The built-in page at /dashboard: what the server's own routes say, as a browser shows it.

    browser --GET /dashboard...--> [pages.py] static files --fetch, with the key typed in--> /v1/...

The files hold no data of the server, so anyone may have them. What they show comes from routes that
ask for a key.
"""
