"""What a server does, to be seen: metrics by adapter, the heat of experts, logs with request ids.

every request -> middleware.py -> record.py (id, key, adapters, tokens) -> log, metrics
SGLang's outputs -> engine_hooks.py -> request_metrics.py -> /metrics
every Nth step's routing, on the ranks -> heat.py -> GET /v1/heat
"""
