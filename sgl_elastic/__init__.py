"""The elastic runtime: it changes the DP/EP degree of a live server without downtime.

    POST /v1/scale, autoscaler --> coordinator/ --plan/--> memory/, instance/ --> SGLang + engine/

`plan/` says what a scale does (pure). `memory/` is the HMM: weights and KV that outlive an engine.
`instance/` is the IMM: engines that start, park, attach, serve and leave. `coordinator/` is the
front door: REST, requests on their way, one scale at a time. `engine/` is what runs inside SGLang's
scheduler processes. `runtime.py` puts them together; docs/elastic.md tells the whole story.
"""
