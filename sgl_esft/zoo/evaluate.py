"""The zoo's table 3: exact match of base, merged and woven, through real servers.

One woven server answers every task's held-out prompts, all adapters and the base mixed
in the same batches; then one plain server per merged checkpoint answers its own task.
Weaving is right where the woven column equals the merged one, answer by answer.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from sgl_esft.zoo import serving
from sgl_esft.zoo.taskset import TASKS, Example, held_out

Report = Callable[[str], None]


@dataclass(frozen=True)
class Row:
    """One task's exact matches, as shares; `merged` and `same` are None if not asked for.

    `same` is the share of prompts that woven and merged answered alike.
    """

    task: str
    base: float
    woven: float
    merged: float | None = None
    same: float | None = None


@dataclass(frozen=True)
class Woven:
    """One task's answers from the woven server: its adapter's and the base's."""

    adapter: list[str]
    base: list[str]


def score(answers: Sequence[str], examples: Sequence[Example]) -> float:
    """The share of `examples` answered exactly; an answer ends at its newline."""
    pairs = zip(answers, examples, strict=True)
    return sum(answer.split("\n")[0] == e.answer for answer, e in pairs) / len(examples)


def agreement(left: Sequence[str], right: Sequence[str]) -> float:
    """The share of places where two lists of answers are equal."""
    return sum(a == b for a, b in zip(left, right, strict=True)) / len(left)


def format_table(rows: Sequence[Row], examples: int) -> str:
    """A Markdown table of `rows`, exact match in percent."""
    lines = [
        f"| task ({examples} held-out prompts each) | base | merged | woven | same answers |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        cells = map(_percent, (row.base, row.merged, row.woven, row.same))
        lines.append(f"| {row.task} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def ask_woven(url: str, examples: Mapping[str, Sequence[Example]]) -> dict[str, Woven]:
    """Every task's answers from a woven server; adapters and base share the batches."""
    asked: list[tuple[str, str | None, str]] = []
    for place in range(max(map(len, examples.values()))):
        for task, items in examples.items():
            if place < len(items):
                asked += [(task, task, items[place].prompt), (task, None, items[place].prompt)]
    answers = serving.generate(url, [a[2] for a in asked], [a[1] for a in asked])
    result = {task: Woven([], []) for task in examples}
    for (task, adapter, _), answer in zip(asked, answers, strict=True):
        (result[task].base if adapter is None else result[task].adapter).append(answer)
    return result


def ask_merged(base: Path, adapter: Path, examples: Sequence[Example]) -> list[str]:
    """Answers of a plain server on `base` with `adapter` written into it."""
    from sgl_esft.tools.merge import merge_adapter

    with tempfile.TemporaryDirectory(prefix="zoo-merged-") as scratch:
        merged = Path(scratch) / "merged"
        merge_adapter(base, adapter, merged)
        with serving.server(serving.merged_arguments(merged)) as url:
            prompts = [example.prompt for example in examples]
            return serving.generate(url, prompts, [None] * len(prompts))


def evaluate(
    base: Path,
    adapters: Mapping[str, Path],
    count: int,
    url: str | None,
    merged: bool,
    report: Report,
) -> list[Row]:
    """One row per adapter, on `count` held-out prompts of its task.

    Asks the woven server at `url`, or starts one. `report` is given lines of progress.
    Raises ServerError where a server fails, KeyError for an adapter without a task.
    """
    examples = {name: held_out(TASKS[name], count) for name in adapters}
    report(f"woven server: {url or 'starting'}")
    arguments = serving.woven_arguments(base, adapters)
    with nullcontext(url) if url else serving.server(arguments) as address:
        woven = ask_woven(address, examples)
    rows = []
    for name, items in examples.items():
        plain = None
        if merged:
            report(f"merged server: {name}")
            plain = ask_merged(base, adapters[name], items)
        rows.append(_row(name, items, woven[name], plain))
    return rows


def _row(task: str, items: Sequence[Example], woven: Woven, plain: list[str] | None) -> Row:
    return Row(
        task,
        base=score(woven.base, items),
        woven=score(woven.adapter, items),
        merged=None if plain is None else score(plain, items),
        same=None if plain is None else agreement(woven.adapter, plain),
    )
