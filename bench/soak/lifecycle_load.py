"""The load test of the adapters' life: eight adapters on three slots, changed while they are asked.

    versions, prompts -> reference texts (plain SGLang on each merged model)
    for each pattern: SGLang's bench client (recorded_client.py)  --+
        operator: loads, replaces, unloads, pins in busy windows  --+--> one server
        process_watch: memory, descriptors, threads               --+
    -> [row_of], by lifecycle_checks.py -> lifecycle_load.json; ends with 1 where a check failed

Patterns are the client's own: `zipf` is `--lora-request-distribution skewed`, `round_robin` is
`distinct`, in which no adapter is asked for twice before all others were. Windows with operations
and without take turns, so that both are paced by the same machine. First come turns without
operations, on twice as many adapters as slots and on as many: nothing may fall off a cliff.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from bench.common.load import end_on_sigterm
from bench.common.process_watch import QUANTITIES, Sample, Watch
from bench.common.record import RESULTS, spread, write_result
from bench.common.recorded_client import Request, read_requests
from bench.elasticmoe.rounds import DEVICE_MEMORY
from bench.soak import lifecycle_checks as checks
from bench.soak.lifecycle_operator import Done, History, Operation, Planner, carry_out
from bench.soak.lifecycle_versions import (
    NUM_NAMES,
    Texts,
    Versions,
    names,
    plain_arguments,
    reference_texts,
    sampling,
    write_versions,
)
from sgl_esft import zoo
from sgl_esft.zoo import serving

NUM_SLOTS = 3
ELASTIC_SIZES = (2, 1)  # devices, by turns; it starts on one
PATTERNS = {
    "zipf": ("--lora-request-distribution", "skewed", "--lora-zipf-alpha", "1.5"),
    "round_robin": ("--lora-request-distribution", "distinct"),
}
MAX_REQUESTS_A_SECOND = 100  # more than the demo serves: the client is given so many prompts
MOST_PACE = 2.0  # p99 of the time per output token, during loads over without
MOST_OVERTAKES = 64  # twice what --max-overtakes allows where every adapter has a slot
# In runs of some minutes.
MOST_GROWTH = {"rss_bytes": 0.05, "num_fds": 0.1, "num_threads": 0.1, "num_processes": 0.0}
LONG_S = 120.0  # a pattern that takes less says nothing about growth
START_TIMEOUT_S = 120.0  # of the client
TURN_MARGIN_S = 1.5  # at the start of a turn the last one's requests end


@dataclass(frozen=True)
class Plan:
    """How long and how hard. Each pattern has as many busy windows as quiet ones."""

    pattern_s: float = 300.0
    window_s: float = 10.0
    pause_s: float = 1.0  # between two operations
    concurrency: int = 12
    num_prompts: int = 48
    num_tokens: int = 24
    patterns: tuple[str, ...] = ("zipf", "round_robin")
    turns: int = 4  # on twice as many adapters as slots, and as many on half of them
    turn_s: float = 8.0
    sizes: tuple[int, ...] = ()  # of an elastic server; empty: a plain one

    @property
    def name(self) -> str:
        """Of the result."""
        return "lifecycle_load_elastic" if self.sizes else "lifecycle_load"


QUICK = Plan(
    pattern_s=20.0,
    window_s=3.0,
    pause_s=0.2,
    num_prompts=16,
    patterns=("round_robin",),
    turns=0,
)


@dataclass(frozen=True)
class Ground:
    """What a run stands on."""

    work: Path
    live: Mapping[str, Versions]
    extras: Sequence[str]
    texts: Texts

    @property
    def root(self) -> Path:
        return self.work / "adapters"


def prepare(work: Path, plan: Plan, plain_url: str) -> Ground:
    """Write the adapters and ask the merged models on a plain server."""
    root = work / "adapters"
    found = write_versions(root)
    live = dict(list(found.items())[:NUM_NAMES])
    each = plan.num_prompts // len(zoo.tasks()) + 1
    prompts = sorted({e.prompt for task in zoo.tasks() for e in zoo.held_out(task, each)})
    folders = [folder for v in live.values() for folder in (v.old, v.new)]
    some = prompts[:: max(1, len(prompts) // plan.num_prompts)]
    texts = reference_texts(plain_url, root, folders, some, plan.num_tokens)
    return Ground(work, live, list(found)[NUM_NAMES:], texts)


def kept_ground(work: Path, plan: Plan) -> Ground:
    """As `prepare`, with the texts of an earlier run that kept them in `work`."""
    found = work / "texts.json"
    if found.exists():
        texts = {(folder, prompt): text for folder, prompt, text in json.loads(found.read_text())}
        live = {name: Versions(name, name, f"{name}.v2") for name in names()}
        return Ground(work, dict(list(live.items())[:NUM_NAMES]), names()[NUM_NAMES:], texts)
    work.mkdir(parents=True, exist_ok=True)
    with serving.server(plain_arguments()) as plain_url:
        ground = prepare(work, plan, plain_url)
    found.write_text(json.dumps([[*key, text] for key, text in ground.texts.items()]))
    return ground


def server_arguments(ground: Ground, plan: Plan) -> list[str]:
    """A woven server of the demo with fewer slots than adapters."""
    adapters = {name: ground.root / each.old for name, each in ground.live.items()}
    if plan.sizes:  # each that is loaded keeps its slot: the others come when they are asked for
        adapters = dict(list(adapters.items())[:NUM_SLOTS])
    return [
        *serving.woven_arguments(zoo.base_path(), adapters),
        *("--adapter-root", str(ground.root), "--max-adapters", str(NUM_SLOTS)),
        *("--max-experts-per-adapter", "7", "--skip-server-warmup"),
        *(("--elastic", "--max-devices", str(max(plan.sizes))) if plan.sizes else ()),
        *(("--device-memory", DEVICE_MEMORY) if plan.sizes else ()),
    ]


def client_command(
    ground: Ground, plan: Plan, url: str, seconds: float, record: Path, traffic: Sequence[str]
) -> list[str]:
    """SGLang's bench client with records. traffic: its options on adapters."""
    prompts = sorted({prompt for _, prompt in ground.texts})
    count = int(seconds * MAX_REQUESTS_A_SECOND)
    data = ground.work / "prompts.jsonl"
    lines = [json.dumps({"conversations": [{"value": p}, {"value": p}]}) for p in prompts]
    data.write_text("\n".join((lines * (count // len(lines) + 1))[:count]) + "\n")
    body = {"sampling_params": sampling(plan.num_tokens)}
    options = {
        "--record": record,
        "--seconds": seconds,
        "--backend": "sglang",
        "--base-url": url,
        "--model": zoo.base_path(),
        "--tokenizer": zoo.base_path(),
        "--dataset-name": "custom",
        "--dataset-path": data,
        "--num-prompts": count,
        "--sharegpt-output-len": plan.num_tokens,
        "--max-concurrency": plan.concurrency,
        "--temperature": 0,
        "--extra-request-body": json.dumps(body),
        "--warmup-requests": 0,
        "--output-file": ground.work / "client.jsonl",
    }
    given = [str(word) for pair in options.items() for word in pair]
    return [
        sys.executable,
        "-m",
        "bench.common.recorded_client",
        *given,
        "--disable-tqdm",
        *traffic,
    ]


async def ask(command: Sequence[str], record: Path, meanwhile: Any = None) -> list[Request]:
    """Run the client and `meanwhile`, which begins with its first answer. Raises RuntimeError."""
    record.unlink(missing_ok=True)
    log = record.with_suffix(".log")
    with log.open("wb") as out:
        client = await asyncio.create_subprocess_exec(*command, stdout=out, stderr=out)
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not (record.exists() and record.stat().st_size):
                if client.returncode is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"no answer to the client:\n{log.read_text()[-4000:]}")
                await asyncio.sleep(0.05)
            if meanwhile is not None:
                await meanwhile()
            await client.wait()
        finally:
            if client.returncode is None:
                client.kill()
    if client.returncode:
        raise RuntimeError(f"the client ended badly:\n{log.read_text()[-4000:]}")
    return read_requests(record)


@dataclass
class Operations:
    """What the operator did in the busy windows of one pattern."""

    planner: Planner
    plan: Plan
    url: str
    done: list[Done]
    busy: list[checks.Span]

    async def run(self) -> None:
        """Busy and quiet windows by turns, until the pattern's time is nearly over."""
        end_s = time.monotonic() + self.plan.pattern_s - self.plan.window_s / 2
        async with aiohttp.ClientSession() as session:
            while time.monotonic() + 2 * self.plan.window_s < end_s:
                begin_s = time.monotonic()
                window = checks.Span(begin_s, begin_s + self.plan.window_s)
                while time.monotonic() < window.end_s - self.plan.pause_s:
                    await self._one(session)
                self.busy.append(window)
                await asyncio.sleep(window.end_s + self.plan.window_s - time.monotonic())

    async def _one(self, session: aiohttp.ClientSession) -> None:
        """An operation and a pause; what was asked for and unloaded is loaded again at once."""
        operation = await self._do(session)
        if operation.kind == "unload_live":
            await self._do(session)
        await asyncio.sleep(self.plan.pause_s)

    async def _do(self, session: aiohttp.ClientSession) -> Operation:
        operation = self.planner.next()
        done = await carry_out(session, self.url, operation)
        self.done.append(done)
        if done.answer:
            print(f"  {operation}: {done.status} {done.answer}", flush=True)
        else:
            self.planner.took(operation)
        return operation


def run_pattern(
    name: str, ground: Ground, plan: Plan, url: str, planner: Planner, before: Sequence[Done]
) -> tuple[dict[str, Any], list[Done]]:
    """Its row, and the operations so far, `before` included."""
    record = ground.work / f"{name}.jsonl"
    traffic = ["--lora-name", *ground.live, *PATTERNS[name]]
    command = client_command(ground, plan, url, plan.pattern_s, record, traffic)
    operations = Operations(planner, plan, url, [], [])
    with Watch(url) as watch:
        requests = asyncio.run(ask(command, record, operations.run))
    done = [*before, *operations.done]
    history = History.of(ground.live, done)
    row = row_of(name, requests, operations, history, ground.texts)
    row["memory"] = memory_of(watch.samples)
    return row, done


def memory_of(samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """Quantity -> early and late, over one pattern."""
    counts = [len(sample.processes) for sample in samples]
    grown = {
        quantity: checks.growth([sample.total(quantity) for sample in samples], counts)
        for quantity in QUANTITIES
    }
    every = {**grown, "num_processes": checks.process_growth(counts)}
    return {quantity: vars(growth) for quantity, growth in every.items()}


def row_of(
    name: str,
    requests: Sequence[Request],
    operations: Operations,
    history: History,
    texts: Texts,
) -> dict[str, Any]:
    """What was seen in one pattern."""
    failed = checks.failures(requests, history)
    wrong = checks.wrong_answers(requests, history, texts)
    for each in failed[:5]:
        print(f"  failed: {each.adapter} {each.error}", flush=True)
    for mistake in wrong[:5]:
        print(f"  wrong: {mistake}", flush=True)
    loads = [d.seconds for d in operations.done if d.operation.kind in checks.LOADS]
    pace = checks.pace(requests, operations.done, operations.busy)
    waits = checks.waits(requests)
    every = [wait for each in waits.values() for wait in each]
    overtaken = checks.overtakes(requests)
    return {
        "pattern": name,
        "seconds": operations.plan.pattern_s,
        "requests": len(requests),
        "failed": len(failed),
        "refused": sum(bool(r.error) for r in requests) - len(failed),  # limits, unloaded names
        "wrong": len(wrong),
        "operations": _counts([d.operation.kind for d in operations.done]),
        "failed_operations": sum(bool(d.answer) for d in operations.done),
        "load_s": spread(loads),
        "p99_during_loads_s": pace.during_loads_s,
        "p99_without_s": pace.without_s,
        "loads_over_none": pace.loads_over_none,
        "busy_over_quiet": spread(pace.busy_over_quiet),
        "wait_median_s": spread(every)["median"],
        "wait_p99_s": checks.p99(every),
        "longest_wait_s": {adapter: max(each) for adapter, each in sorted(waits.items())},
        "overtakes_p99": checks.p99([float(count) for count in overtaken]),
        "most_overtakes": max(overtaken),
    }


def _counts(words: Sequence[str]) -> dict[str, int]:
    return {word: words.count(word) for word in sorted(set(words))}


def crowding(ground: Ground, plan: Plan, url: str) -> dict[str, Any]:
    """Tokens a second with twice as many adapters as slots, over as many, turn by turn."""
    record = ground.work / "crowding.jsonl"
    many = list(ground.live)[: 2 * NUM_SLOTS]
    few = many[:NUM_SLOTS]
    traffic = ["--lora-name", *many, *PATTERNS["round_robin"]]
    traffic += ["--fold", *few, "--fold-s", str(plan.turn_s)]
    seconds = 2 * plan.turns * plan.turn_s + 1.0
    command = client_command(ground, plan, url, seconds, record, traffic)
    requests = asyncio.run(ask(command, record))
    ratios = checks.turn_ratios(requests, plan.turn_s, TURN_MARGIN_S)
    print(f"  twice as many adapters as slots, over as many: {ratios}", flush=True)
    return {"adapters": len(many), "all_over_slots": spread(ratios)}


def verdict(row: Mapping[str, Any]) -> list[str]:
    """What is not as it must be in one pattern."""
    counts = {name: row[name] for name in ("failed", "wrong", "failed_operations")}
    found = [f"{count} {name}" for name, count in counts.items() if count]
    if row["loads_over_none"] > MOST_PACE:
        found.append(f"loads slow streams {row['loads_over_none']:.2f} times")
    if row["most_overtakes"] > MOST_OVERTAKES:
        found.append(f"a request was overtaken {row['most_overtakes']} times")
    if row["seconds"] >= LONG_S:
        for name, most in MOST_GROWTH.items():
            early, late = row["memory"][name]["early"], row["memory"][name]["late"]
            if late > (1 + most) * early:
                found.append(f"{name} grew from {early:.0f} to {late:.0f}")
    return [f"{row['pattern']}: {problem}" for problem in found]


def main() -> None:
    """Run, check, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--elastic", action="store_true", help="on an elastic server, scaled between one and two"
    )
    parser.add_argument("--quick", action="store_true", help="one pattern of seconds, no turns")
    parser.add_argument("--seconds", type=float, help="of each pattern")
    parser.add_argument("--turns", type=int)
    parser.add_argument("--work", type=Path, help="keep adapters and merged models' answers here")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    end_on_sigterm()
    changed = {"pattern_s": options.seconds, "turns": options.turns}
    changed |= {"sizes": ELASTIC_SIZES if options.elastic else None}
    base = QUICK if options.quick else Plan()
    plan = Plan(**{**vars(base), **{k: v for k, v in changed.items() if v is not None}})
    found: dict[str, Any] = {}

    def write(so_far: dict[str, Any]) -> None:
        found.update(so_far)
        write_result(plan.name, so_far, folder=options.out)

    with tempfile.TemporaryDirectory() as temporary:
        work = (options.work or Path(temporary)).resolve()
        measure(kept_ground(work, plan), plan, write)
    problems = [problem for row in found["rows"] for problem in verdict(row)]
    print("\n".join(problems) or "all as it must be", flush=True)
    sys.exit(bool(problems))


def measure(ground: Ground, plan: Plan, write: Callable[[dict[str, Any]], object]) -> None:
    """All of it, on one server; written after each pattern."""
    done: list[Done] = []
    planner = Planner(ground.live, ground.extras, sizes=plan.sizes)
    with serving.server(server_arguments(ground, plan)) as url:
        found: dict[str, Any] = {
            "what": "Adapters loaded, replaced, unloaded, pinned while all of them are asked for",
            "plan": vars(plan),
            "slots": NUM_SLOTS,
            "adapters": len(ground.live),
            "crowding": crowding(ground, plan, url) if plan.turns else None,
            "rows": [],
        }
        for pattern in plan.patterns:
            row, done = run_pattern(pattern, ground, plan, url, planner, done)
            found["rows"].append(row)
            print(json.dumps(row, indent=1), flush=True)
            write({**found, "is_complete": len(found["rows"]) == len(plan.patterns)})


if __name__ == "__main__":
    main()
