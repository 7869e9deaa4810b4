"""The paper's figure 7 and the all-base claim: what rerouting costs a step, fused and unfused.

    merged  <- plain, plain again, woven fused, woven unfused: one adapter's requests
    off     <- the same four servers, plain ones with the base's weights: requests without adapter

The servers, the turns and the layout of the rows: bench/expertweave/steps.py and
bench/common/sweep.py. The paper
(5.3) has TTFT by prompt length at batch 1 and TPOT by batch size; here the decoded prompts are
short and 64 steps follow, so that many turns fit.

Rows of fused and unfused have an `estimate` beside the measured ratios, which noise does not
reach: processor time of the operator and of tagging, taken alone, as shares of a step of `over`:
`rerouting` = MoE layers x one call, `tagging` = once a step.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from bench.common.sweep import (
    Model,
    Place,
    Plan,
    Sweep,
    Traffic,
    open_model,
    options_of,
    plan_of,
    report,
)
from sgl_esft.weave.batch_tags import BatchTags, tag_tokens
from sgl_esft.weave.reroute import load_reroute

KINDS = ("fused", "unfused")
GOALS = {
    "fused over merged": 1.01,
    "fused over merged, aim": 1.005,
    "fused over off, all-base TPOT": 1.01,
}
NUM_CALLS, NUM_REPEATS = 50, 21


def traffics(model: Model) -> list[Traffic]:
    """The adapter's requests against merged, and all-base ones against plain SGLang."""
    plain = ("plain", "plain again")
    return [
        Traffic(name, over, lanes, dict.fromkeys(plain, weights))
        for name, over, adapter, weights in (
            ("adapter", "merged", model.adapter, model.merged),
            ("base", "off", None, model.base),
        )
        for lanes in [
            {
                over: ("plain", None),
                f"{over} again": ("plain again", None),
                **{kind: (kind, adapter) for kind in KINDS},
            }
        ]
    ]


@dataclass(frozen=True)
class Pass:
    """A forward pass: new tokens of each request."""

    num_tokens_per_request: tuple[int, ...]

    @classmethod
    def at(cls, place: Place) -> Pass:
        return cls((place.value,) if place.metric == "ttft" else (1,) * place.value)

    @property
    def num_tokens(self) -> int:
        return sum(self.num_tokens_per_request)


def seconds_of_call(call: Callable[[], object]) -> float:
    """Processor time of one call: the median of some repeats of many calls."""
    found = []
    for _ in range(NUM_REPEATS):
        start = time.process_time()
        for _ in range(NUM_CALLS):
            call()
        found.append((time.process_time() - start) / NUM_CALLS)
    return statistics.median(found)


def tagging(work: Pass, tags: BatchTags) -> Callable[[], None]:
    """What a pass does once: every token's adapter slot into the buffer."""
    slots = [0] * len(work.num_tokens_per_request)
    return lambda: tags.set(tag_tokens(slots, work.num_tokens_per_request))


def rerouting(model: Model, kind: str, work: Pass, tags: BatchTags) -> Callable[[], object]:
    """What a pass does in each MoE layer."""
    spec, num_tokens = model.spec, work.num_tokens
    top_k = json.loads((model.base / "config.json").read_text())["num_experts_per_tok"]
    topk_ids = torch.rand(num_tokens, spec.num_experts).topk(top_k).indices.int()
    expert_map = torch.arange(2 * spec.num_experts, dtype=torch.int32).view(2, -1)
    reroute = load_reroute(kind, torch.device("cpu"))
    return lambda: reroute(topk_ids, tags.token_adapter_slots(num_tokens), expert_map)


def seconds_added(model: Model, kind: str, work: Pass) -> dict[str, float]:
    """What rerouting adds to a pass, by part, on one thread."""
    torch.set_num_threads(1)
    tags = BatchTags(work.num_tokens, "cpu")
    tag = tagging(work, tags)
    tag()
    layer = seconds_of_call(rerouting(model, kind, work, tags))
    return {
        "rerouting": len(model.spec.moe_layer_ids) * layer,
        "tagging": seconds_of_call(tag),
    }


class Estimates:
    """The `estimate` of a row; each pass is timed once."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._seconds: dict[tuple[str, Pass], dict[str, float]] = {}

    def __call__(self, place: Place, system: str, step_seconds: float) -> Mapping[str, object]:
        if system not in KINDS:
            return {}
        key = (system, Pass.at(place))
        if key not in self._seconds:
            self._seconds[key] = seconds_added(self._model, *key)
        shares = {part: s / step_seconds for part, s in self._seconds[key].items()}
        return {"estimate": shares}


def main() -> None:
    """Measure and write expertweave_figure7.json, or expertweave_figure7_scaled.json."""
    options = options_of(__doc__.partition("\n")[0])
    with open_model(options.model) as model:
        sweep = Sweep(
            "expertweave_figure7" if options.model == "demo" else "expertweave_figure7_scaled",
            plan_of(options, Plan()),
            traffics(model),
            {
                "what": "TTFT and TPOT: woven over merged; without adapters, over plain",
                "model": model.name,
                "goals": GOALS,
            },
            options.out,
            Estimates(model),
        )
        plain = [model.plain("plain"), model.plain("plain again")]
        woven = [model.woven(kind, "--reroute", kind) for kind in KINDS]
        report(sweep, sweep.run([*plain, *woven]))


if __name__ == "__main__":
    main()
