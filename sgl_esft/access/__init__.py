"""Who may call the server, and with what; decided before a request costs work.

request -> [headers, origin] -> [classes: route] -> [keys] -> [limits] -> [bodies] -> SGLang

gate.py puts the others in this order. They are values and arithmetic; only keys.py reads a file.
"""
