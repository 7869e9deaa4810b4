"""How much of the stall is hidden, by the link's speed and the batch: FineMoE, regression, `auto`.

    for each r: four servers, all up --[batches in turns]--> Window of each, round by round
    stall a token, over that of `lfu` in the same round --> share hidden
    tokens a second of `auto`, over the best of the others --> finemoe_regimes.json
    with --decoding, prompts are asked before each window --> finemoe_regimes_decoding.json
    which of them `auto` is, and that one's over the best of the others: two servers that do the
    same differ as well, so what was chosen is compared apart from what differs between servers

offload_notes, section 5, says what to expect: prefetching can hide at most one layer of computing
for each layer. r <= 0.3 about half of the stall, r = 1 a third, r >= 3 nothing; and from some eight
requests on nothing is predicted. `auto` should be as good as the better one everywhere.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.common.load import end_on_sigterm, servers
from bench.common.record import RESULTS, spread, write_result
from bench.elasticmoe.load import Ask
from bench.finemoe.served import calibrated
from bench.finemoe.tier_servers import (
    NONE,
    Window,
    ZooModel,
    in_turns,
    link_of,
    tier_command,
    window,
)
from sgl_esft import zoo
from sgl_esft.offload.policies import AUTO
from sgl_esft.tools.decode_windows import served_rows
from sgl_esft.tools.server_client import ServerAddress

FIXED = (NONE, "finemoe", "regression")
WAYS = (*FIXED, AUTO)
_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class RegimePlan:
    """How much is asked."""

    model: str = "deep"
    link_speeds: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0, 8.0)
    batches: tuple[int, ...] = (1, 4, 16)
    share_of_rows: float = 0.5
    rounds: int = 12
    asks_each: int = 1  # of each of a batch's places, in a window: short ones, in turns
    num_filling: int = 32  # requests before the first window, for the map stores
    is_decoding: bool = False  # prompts are in the prefix cache when a window begins

    def fewer(self, count: int, r: float) -> int:
        """Where steps wait for a link, they are as long as it is slow, and vary less."""
        return max(min(2, count), round(count / max(1.0, r)))


QUICK = RegimePlan(link_speeds=(0.3, 3.0), batches=(1, 4), rounds=1, num_filling=4)

Round = Mapping[int, Mapping[str, Window]]  # batch -> way -> window


@dataclass(frozen=True)
class Regime:
    """All rounds of one r; `auto_is`: the one of FIXED that `auto` was."""

    auto_is: str
    rounds: Sequence[Round]


def regime_at(model: ZooModel, plan: RegimePlan, r: float, layer_s: float) -> Regime:
    """The servers of one r, asked in turns."""
    link = link_of(model, r, layer_s)
    num_rows = max(4, round(plan.share_of_rows * model.spec.num_experts))
    commands = {way: tier_command(model, way, link, num_rows) for way in WAYS}
    num_rounds = plan.fewer(plan.rounds, r)
    with servers(commands) as urls:
        fill(urls.values(), model.asks(plan.fewer(plan.num_filling, r), seed=1))
        chosen = served_rows(ServerAddress(urls[AUTO], _TIMEOUT_S)).policy
        rounds = [one_round(urls, model, plan, number) for number in range(num_rounds)]
    return Regime(chosen.removeprefix(f"{AUTO}: "), rounds)


def fill(urls: Iterable[str], asks: Sequence[Ask]) -> None:
    """All servers' caches and map stores, at once: nothing is timed."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda url: window(url, asks, 4), urls))


def one_round(urls: Mapping[str, str], model: ZooModel, plan: RegimePlan, number: int) -> Round:
    """A window of each batch on each server; the same prompts to all."""
    found: dict[int, dict[str, Window]] = {}
    for batch in plan.batches:
        asks = model.asks(batch * plan.asks_each, seed=1000 * (number + 1) + batch)
        found[batch] = {
            way: asked(urls[way], asks, batch, plan.is_decoding) for way in in_turns(WAYS, number)
        }
    return found


def asked(url: str, asks: Sequence[Ask], batch: int, is_decoding: bool) -> Window:
    """is_decoding: prompts' own passes, of which nothing is predicted, come before the window."""
    if is_decoding:
        window(url, [replace(each, num_tokens=1) for each in asks], batch)
    return window(url, asks, batch)


def rows_of(regimes: Mapping[float, Regime], plan: RegimePlan) -> list[dict[str, Any]]:
    """A row for each r and batch."""
    return [
        {"r": r, "batch": batch, **_row([each[batch] for each in of_r.rounds], of_r.auto_is)}
        for r, of_r in regimes.items()
        for batch in plan.batches
    ]


def _row(windows: Sequence[Mapping[str, Window]], auto_is: str) -> dict[str, Any]:
    """`hidden_by`: of the stall of `lfu`; below 0 where there is more of it."""
    return {
        "stall_s_per_token": {
            way: spread([each[way].stall_per_token_s for each in windows]) for way in WAYS
        },
        "hidden_by": {way: spread([hidden(each, way) for each in windows]) for way in WAYS[1:]},
        "tokens_per_s_over_lfu": {
            way: spread([w[way].tokens_per_s / w[NONE].tokens_per_s for w in windows])
            for way in WAYS[1:]
        },
        "bytes_over_lfu": {
            way: spread([_bytes(w[way]) / max(1.0, _bytes(w[NONE])) for w in windows])
            for way in WAYS[1:]
        },
        "auto_over_best_fixed": over_the_best(windows, AUTO, FIXED),
        "auto_is": auto_is,
        "chosen_over_others": over_the_best(
            windows, auto_is, [way for way in FIXED if way != auto_is]
        ),
        "hit_rate": {
            way: spread([w[way].counted.hit_rate or 0.0 for w in windows]) for way in WAYS
        },
    }


def over_the_best(
    windows: Sequence[Mapping[str, Window]], way: str, others: Sequence[str]
) -> dict[str, float]:
    """Tokens a second of `way`, over those of the one of `others` that leads it most.

    Paired by round. Which is the best is said by the medians: of two that are equally fast, the
    faster one of each round would be whichever noise favoured.
    """
    over = [
        spread([each[way].tokens_per_s / each[other].tokens_per_s for each in windows])
        for other in others
    ]
    return min(over, key=lambda each: each["median"])


def hidden(windows: Mapping[str, Window], way: str) -> float:
    """Share of the stall a token that `way` takes away."""
    return 1 - windows[way].stall_per_token_s / max(1e-9, windows[NONE].stall_per_token_s)


def _bytes(each: Window) -> float:
    return each.counted.read_bytes / each.tokens


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write bench/results/finemoe_regimes.json, or that of --decoding, after each r."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=list(zoo.MODELS), default="deep")
    parser.add_argument("--share", type=float, default=0.5, help="of experts that have rows")
    parser.add_argument(
        "--rounds", type=int, default=12, help="at a fast link; fewer at a slow one"
    )
    parser.add_argument(
        "--decoding", action="store_true", help="prompts' own passes are not in the windows"
    )
    parser.add_argument("--r", type=float, nargs="+", help="only these link speeds")
    parser.add_argument("--quick", action="store_true", help="two link speeds, one round")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    end_on_sigterm()
    plan = plan_of(options)
    found: dict[float, Regime] = {}
    with tempfile.TemporaryDirectory(prefix="finemoe-regimes-") as work:
        model = ZooModel.of(plan.model, Path(work))
        layer_s = calibrated(model)
        for r in plan.link_speeds:
            print(f"r {r:g}", flush=True)
            found[r] = regime_at(model, plan, r, layer_s)
            for row in rows_of({r: found[r]}, plan):
                print(said(row), flush=True)
            write(found, plan, layer_s, options.out)


def plan_of(options: argparse.Namespace) -> RegimePlan:
    """From the command line."""
    plan = QUICK if options.quick else RegimePlan(rounds=options.rounds)
    return replace(
        plan,
        model=options.model,
        share_of_rows=options.share,
        link_speeds=tuple(options.r or plan.link_speeds),
        is_decoding=options.decoding,
    )


def said(row: Mapping[str, Any]) -> str:
    """A row's medians, to be read."""
    shares = ", ".join(f"{way} hides {x['median']:.2f}" for way, x in row["hidden_by"].items())
    auto, chosen = row["auto_over_best_fixed"]["median"], row["chosen_over_others"]["median"]
    return (
        f"  batch {row['batch']}: {shares}; auto over the best fixed {auto:.3f}; "
        f"{row['auto_is']}, which it is, over the others {chosen:.3f}"
    )


def write(regimes: Mapping[float, Regime], plan: RegimePlan, layer_s: float, out: Path) -> None:
    """The result, with what is there so far."""
    figures = {
        "what": "Share of the stall for experts that is hidden, and `auto` over the best fixed",
        "plan": vars(plan),
        "layer_s": layer_s,
        "is_complete": list(regimes) == list(plan.link_speeds),
        "rows": rows_of(regimes, plan),
    }
    name = "finemoe_regimes_decoding" if plan.is_decoding else "finemoe_regimes"
    write_result(name, figures, folder=out)


if __name__ == "__main__":
    main()
