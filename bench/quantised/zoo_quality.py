"""The demo's table 3 by scheme: accuracy of base, merged and woven, quantised experts beside bf16.

    demo -> QuantisedZoo: base, adapters, merged checkpoints, in a scheme
    held-out prompts -> a woven server of all adapters, a plain server of each merged checkpoint
    -> Answers -> [rows_of] -> bench/results/quantised_zoo.json, with the schemes so far

*Merged* is the merged checkpoint, quantised, on plain SGLang with the CPU platform; *woven* the
quantised base with adapters that the server quantises when it loads them. Experts of one token are
equal to the bit, but linear layers in bfloat16 round otherwise in another batch, and where the best
two tokens are closer than that, either may come first. So every answer that differs is looked at:
it is a *tie* where both servers had two tokens within TIE_LOGPROB at the first token that differs.
The bench fails, after it has written what it saw, where one is not.

Rows: `scheme`, `task`, exact match as shares (`base`, `merged`, `woven`); `same`, the share of
prompts that woven and merged answered alike; `differ`, how many they did not, and `clear`, how many
of those are no ties; `as_bf16`, the share of woven answers that are those of the woven bf16 model.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common.load import end_on_sigterm
from bench.common.record import RESULTS, write_result
from bench.quantised.wide_zoo import WIDTH, QuantisedZoo
from sgl_esft import zoo
from sgl_esft.formats.expert_scheme import SCHEME_NAMES
from sgl_esft.zoo import serving
from sgl_esft.zoo.evaluate import agreement, score
from sgl_esft.zoo.taskset import Example

BF16 = "bf16"
SCHEMES = (BF16, *SCHEME_NAMES)
# Logarithms of probabilities. A bfloat16 has 8 bits, so that of a logit of 16 is worth 1/16, and
# several layers round.
TIE_LOGPROB = 0.25
START_SECONDS = 1800.0  # of a server, on a machine that is busy otherwise
BATCH = 256  # prompts of one request
_COMMON = ("--dtype", "bfloat16", "--max-total-tokens", "32768", "--log-level", "warning")

Examples = Mapping[str, Sequence[Example]]


@dataclass(frozen=True)
class Answer:
    """Greedy. `gaps`: at each token, by how much the best one's log-probability is larger."""

    text: str
    token_ids: tuple[int, ...]
    gaps: tuple[float, ...]


Answers = Mapping[str, Sequence[Answer]]  # by task


@dataclass(frozen=True)
class Asked:
    """Of one scheme. `base` and `woven` are of one server, `merged` of one a task."""

    base: Answers
    woven: Answers
    merged: Answers


# ---- servers ----


def asked(made: QuantisedZoo, scheme: str, examples: Examples, copies: Path) -> Asked:
    """All servers of a scheme, one after another. `copies`: where adapters are kept quantised."""
    print(f"{scheme}: woven", flush=True)
    adapters = [f"{name}={made.adapter(name)}" for name in examples]
    flags = ["--esft-adapters", *adapters, "--quantised-adapters", str(copies)]
    with started(checkpoint(made, None, scheme), flags) as url:
        base, woven = ask_woven(url, examples)
    merged = {}
    for task, items in examples.items():
        print(f"{scheme}: merged, {task}", flush=True)
        plain = ["--no-esft", *(["--quantization", "moe_wna16"] if scheme == "int4" else [])]
        with started(checkpoint(made, task, scheme), plain) as url:
            merged[task] = ask(url, [(item.prompt, None) for item in items])
    return Asked(base, woven, merged)


def checkpoint(made: QuantisedZoo, adapter: str | None, scheme: str) -> Path:
    """The base, or an adapter's merged checkpoint."""
    if scheme == BF16:
        return made.base() if adapter is None else made.merged(adapter)
    return made.quantised(adapter, scheme)


def started(model: Path, flags: Sequence[str]) -> AbstractContextManager[str]:
    """Its URL, while the context is open."""
    return serving.server(["--model-path", str(model), *_COMMON, *flags], START_SECONDS)


def ask_woven(url: str, examples: Examples) -> tuple[Answers, Answers]:
    """The base's answers, and each task's adapter's; all of them share batches."""
    pairs = [
        (task, adapter, items[place].prompt)
        for place in range(max(map(len, examples.values())))
        for task, items in examples.items()
        if place < len(items)
        for adapter in (task, None)
    ]
    base: dict[str, list[Answer]] = {task: [] for task in examples}
    woven: dict[str, list[Answer]] = {task: [] for task in examples}
    answers = ask(url, [(prompt, adapter) for _, adapter, prompt in pairs])
    for (task, adapter, _), answer in zip(pairs, answers, strict=True):
        (base if adapter is None else woven)[task].append(answer)
    return base, woven


def ask(url: str, prompts: Sequence[tuple[str, str | None]]) -> list[Answer]:
    """Each by its adapter, or by the server's own model where that is None."""
    answers: list[Answer] = []
    # A server without adapters refuses even a list of Nones.
    is_woven = any(adapter is not None for _, adapter in prompts)
    for start in range(0, len(prompts), BATCH):
        some = prompts[start : start + BATCH]
        body = {
            "text": [prompt for prompt, _ in some],
            "lora_path": [adapter for _, adapter in some] if is_woven else None,
            "return_logprob": True,
            "top_logprobs_num": 2,
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": serving.MAX_NEW_TOKENS,
                "stop": ["\n"],
            },
        }
        answers += [_answer(item) for item in serving.post(f"{url}/generate", body)]
    return answers


def _answer(item: Mapping[str, Any]) -> Answer:
    said = item["meta_info"]
    return Answer(
        str(item["text"]),
        tuple(int(token[1]) for token in said["output_token_logprobs"]),
        tuple(float(first[0] - second[0]) for first, second in said["output_top_logprobs"]),
    )


# ---- rows ----


def rows_of(scheme: str, examples: Examples, found: Asked, bf16: Asked | None) -> list[Any]:
    """A row a task. `bf16`: the unquantised models' answers, None where they were not asked."""
    return [
        {
            "scheme": scheme,
            "task": task,
            "base": score(_texts(found.base[task]), items),
            "merged": score(_texts(found.merged[task]), items),
            "woven": score(_texts(found.woven[task]), items),
            **compared(found.woven[task], found.merged[task]),
            "as_bf16": _as_bf16(found, bf16, task),
        }
        for task, items in examples.items()
    ]


def compared(woven: Sequence[Answer], merged: Sequence[Answer]) -> dict[str, Any]:
    """Answer by answer; `largest_gap` is of those that differ, 0 where none does."""
    gaps = [
        gap_of_difference(ours, theirs)
        for ours, theirs in zip(woven, merged, strict=True)
        if ours.token_ids != theirs.token_ids
    ]
    return {
        "same": 1 - len(gaps) / len(woven),
        "differ": len(gaps),
        "clear": sum(gap > TIE_LOGPROB for gap in gaps),
        "largest_gap": max(gaps, default=0.0),
    }


def gap_of_difference(one: Answer, other: Answer) -> float:
    """How clear the first token that differs was, to whom it was clearer.

    Infinite where one answer is the other's beginning: the same tokens end at the same place.
    """
    pairs = enumerate(zip(one.token_ids, other.token_ids, strict=False))
    first = next((place for place, (ours, theirs) in pairs if ours != theirs), None)
    if first is None:
        return float("inf")
    return max(one.gaps[first], other.gaps[first])


def clear_differences(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where woven is not merged, and no tie is the reason."""
    return [
        f"{row['scheme']}, {row['task']}: {row['clear']} of {row['differ']} answers that differ "
        f"are no ties; woven {row['woven']:.3f}, merged {row['merged']:.3f}"
        for row in rows
        if row["clear"]
    ]


def _as_bf16(found: Asked, bf16: Asked | None, task: str) -> float | None:
    return None if bf16 is None else agreement(_texts(found.woven[task]), _texts(bf16.woven[task]))


def _texts(answers: Sequence[Answer]) -> list[str]:
    return [answer.text for answer in answers]


# ---- the command ----


def write(rows: Sequence[Any], schemes: Sequence[str], count: int, out: Path) -> None:
    """The result, with the schemes so far."""
    done = {row["scheme"] for row in rows}
    figures = {
        "what": "exact match on held-out prompts by scheme of the experts; `same`: woven and "
        "merged answered alike; `differ`: how many did not; `clear`: those that are no ties",
        "examples_per_task": count,
        "tie_logprob": TIE_LOGPROB,
        "expert_width": WIDTH,
        "is_complete": done == set(schemes),
        "rows": list(rows),
    }
    write_result("quantised_zoo", figures, folder=out)


def measure(schemes: Sequence[str], tasks: Sequence[str], count: int, out: Path) -> list[Any]:
    """All schemes, written after each. `bf16` comes first, so that the others have it beside."""
    examples = {task: zoo.held_out(task, count) for task in tasks}
    rows: list[Any] = []
    bf16: Asked | None = None
    with tempfile.TemporaryDirectory(prefix="quantised-zoo-") as work:
        made = QuantisedZoo(Path(work))
        for scheme in sorted(schemes, key=SCHEMES.index):
            found = asked(made, scheme, examples, Path(work) / "copies")
            bf16 = found if scheme == BF16 else bf16
            rows += rows_of(scheme, examples, found, bf16)
            write(rows, schemes, count, out)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate and write; fail where an answer differs and is no tie."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    parser.add_argument("--examples", type=int, default=200, help="held-out prompts per task")
    parser.add_argument("--quick", action="store_true", help="two tasks, few prompts")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    end_on_sigterm()
    tasks, count = zoo.tasks(), options.examples
    if options.quick:
        tasks, count = ("date", "sum"), min(count, 12)
    problems = clear_differences(measure(options.schemes, tasks, count, options.out))
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
