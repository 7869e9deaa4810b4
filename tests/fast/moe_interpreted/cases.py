"""The ranks, dtypes and routers that run; names are those in the results.

Batches: FEW tokens are at most any rank's experts, MANY more than its slots. Between the number of
experts and that of slots (BETWEEN), SGLang's default blocks depend on which of them it is told.
"""

from __future__ import annotations

import torch

from tests.fast.moe_interpreted.blocks import Case, Routing
from tests.support.random_layers import Rank

FEW, BETWEEN, MANY = 4, 10, 40
EP2 = (Rank(ep_rank=0, ep_size=2), Rank(ep_rank=1, ep_size=2))
EXPERTS = {
    "one rank, float32": Case(),
    "one rank, bfloat16": Case(dtype=torch.bfloat16),
    "EP2 rank 0, float32": Case(EP2[0]),
    "EP2 rank 1, float32": Case(EP2[1]),
    "EP2 rank 1, bfloat16": Case(EP2[1], torch.bfloat16),
}
MORE_EXPERTS = {
    "EP2 rank 0, bfloat16": Case(EP2[0], torch.bfloat16),
    "TP2 rank 1, float32": Case(Rank(tp_rank=1, tp_size=2)),
    "EP2 rank 1 x TP2 rank 0, bfloat16": Case(Rank(1, 2, 0, 2), torch.bfloat16),
}

_GROUPS = {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2}
_ONE_GROUP = {"use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1}
_BIASED = {"has_bias": True, "scale": 2.5}
ROUTINGS = {
    "qwen3: softmax, renormalised": Routing(3, options={"renormalize": True}),
    "qwen2, v2-lite: softmax": Routing(3, options={"renormalize": False}),
    "mixtral: softmax, two": Routing(2),
    "deepseek-v2: softmax in groups": Routing(
        3, scale=16.0, options={**_GROUPS, "renormalize": False}
    ),
    "deepseek-v2, shared expert fused": Routing(
        4, 1, scale=16.0, options={**_GROUPS, "renormalize": False}
    ),
    "deepseek-v3: biased groups": Routing(
        3, options={**_GROUPS, "scoring_func": "sigmoid"}, **_BIASED
    ),
    "deepseek-v3, shared expert fused": Routing(
        4, 1, options={**_GROUPS, "scoring_func": "sigmoid"}, **_BIASED
    ),
    "kimi: biased, one group": Routing(
        3, options={**_ONE_GROUP, "scoring_func": "sigmoid"}, **_BIASED
    ),
}
STYLES = {
    **{name: Case(routing=routing) for name, routing in ROUTINGS.items()},
    "deepseek-v3, shared expert fused, EP2 rank 1": Case(
        EP2[1], torch.bfloat16, ROUTINGS["deepseek-v3, shared expert fused"]
    ),
}
