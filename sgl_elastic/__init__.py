"""The elastic runtime: it will change the DP/EP degree of a live server without downtime.

It will own `plan/` (pure), `memory/` (the HMM: weights and KV that outlive an engine), `instance/`
(the IMM: engines that start, attach, serve and drain) and `coordinator/` (the front door).
Nothing is there yet: the first version of this project is the weaving half, `sgl_esft`.
"""
