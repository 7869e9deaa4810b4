"""From command line to running server.

flags.py (what was asked) -> plan.py (what will be started, checked) -> serve.py (start it)
"""
