"""Tables of experts in tiers: FineMoE's evaluation repeated, and what the paper has not.

    bench/results/finemoe_*.json --> [FineTable: columns, or a value by one key] -> readme_tables.py

Below each table stands what the paper says of the same figure, and why ours differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.report.markdown import percent, ratio, result_table

Row = Mapping[str, Any]
_SEMANTIC = "the traces have no embeddings, so semantic search is left out"
_TOP = "only routed experts' weights were published, so maps hold 0.4 of the mass"
_COUNTED = "counted on traces of DeepSeek-V2-Lite (64 experts, 6 a token), which is not the paper's"
_SERVED = "a small model on two cores, its link throttled to r: times mean something as ratios only"


@dataclass(frozen=True)
class FineTable:
    """A row for each of a result's rows, or, with `by`, one for all rows of the same `columns`.

    `columns`: path of keys, dots between -> header. `by`: a key, each of whose values gets a column
    of `value`. `why`: ours differs from the paper's.
    """

    title: str
    columns: Mapping[str, str]
    why: str
    by: str | None = None
    value: str = ""
    shares: Sequence[str] = ()  # paths of shares, which are shown as percent
    megabytes: Sequence[str] = ()  # paths of bytes
    without: str = ""  # a path: rows that have nothing there are left out
    note: Callable[[Any], str] = field(default=lambda _: "")

    def made(self, result: Any) -> str:
        """Markdown."""
        rows = [row for row in result["rows"] if not self.without or at(row, self.without)]
        header, cells = self._by_value(rows) if self.by else self._plain(rows)
        note = f"{self.note(result)}{_said(str(result.get('paper', 'none')))} {self.why}.\n\n"
        return result_table(result, header, cells, note)

    def _plain(self, rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
        cells = [[self._cell(row, path) for path in self.columns] for row in rows]
        return list(self.columns.values()), cells

    def _by_value(self, rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
        assert self.by is not None
        names = list(dict.fromkeys(str(row[self.by]) for row in rows))
        found: dict[tuple[str, ...], dict[str, str]] = {}
        for row in rows:
            key = tuple(self._cell(row, path) for path in self.columns)
            found.setdefault(key, {})[str(row[self.by])] = self._cell(row, self.value)
        cells = [[*key, *(of.get(name, "-") for name in names)] for key, of in found.items()]
        return [*self.columns.values(), *names], cells

    def _cell(self, row: Row, path: str) -> str:
        value = at(row, path)
        if path in self.megabytes and value is not None:
            return f"{value / 1e6:,.0f}"
        return percent(value) if path in self.shares else shown(value)


def at(row: Row, path: str) -> Any:
    """What lies at the end of a path; None where there is nothing."""
    if path in row:  # a key with a dot of its own
        return row[path]
    value: Any = row
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _said(paper: str) -> str:
    """What a bench keeps of the paper, `none` or `none: why` where there is nothing."""
    if paper.startswith("none"):
        return f"The paper has no such figure{paper.removeprefix('none').rstrip('.')}."
    return f"The paper: {paper.rstrip('.')}."


def shown(value: Any) -> str:
    """A spread with its quartiles; a number with as many digits as say something."""
    if value is None:
        return "-"
    if isinstance(value, Mapping):
        return ratio(value)
    if isinstance(value, list):
        return " to ".join(map(shown, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3g}" if isinstance(value, float) else f"{value}"


def _speed_note(result: Any) -> str:
    """What the goal is of, and whether it is met."""
    wanted = result["wanted"]
    parts = [
        f"{name.replace('_', ' ')} {percent(result[name])}% (goal {percent(goal)}%)"
        for name, goal in wanted.items()
    ]
    inside, drift = percent(result["share_inside"]), result["with_drift"]
    return (
        f"Of {result['points']} points {' and '.join(parts)}; {inside}% within the interval. "
        f"With what the machine's speed changed meanwhile: {percent(drift['median_error'])}% and "
        f"{percent(drift['worst_error'])}%. "
    )


def _large_note(result: Any) -> str:
    gigabytes = [result[name] / 1e9 for name in ("routed_bytes", "cache_bytes", "memory_bytes")]
    adapters = ", ".join(result["adapters"]) or "none"
    held = all(row.get("peak_limited_bytes") for row in result["rows"])
    storage = [row["read_bytes_per_s"]["median"] / 1e9 for row in result["rows"]]
    return (
        f"{gigabytes[0]:.1f} GB of experts, {gigabytes[1]:.1f} GB of rows, within "
        f"{gigabytes[2]:.1f} GB{', to which a control group held each server' if held else ''}; "
        f"adapters: {adapters}; beside each server's decoding the storage gave "
        f"{min(storage):.2f} to {max(storage):.2f} GB/s. "
    )


_TASK = {"task": "task"}
FINE_TABLES: Mapping[str, FineTable] = {
    "finemoe_figure3": FineTable(
        "FineMoE's figure 3: entropy of experts' use in bits, of one token and of a request's sum:",
        _TASK
        | {"iteration_bits": "a token", "request_bits": "a request", "most_bits": "at most"}
        | {f"bits_by_iterations.{count}": f"of {count}" for count in (1, 2, 5, 10, 20, 40)},
        f"Ours are {_COUNTED}; {_TOP}, and entropies are too low",
    ),
    "finemoe_figure4": FineTable(
        "FineMoE's figure 4: recall of a token's experts by prefetch distance, in percent:",
        _TASK
        | {
            "distance": "distance",
            "fine.recall": "maps",
            "fine.recall_of_new": "maps, new tokens",
            "coarse.recall": "counts of requests",
            "popularity": "popularity",
            "previous_token": "previous token",
        },
        f"Ours are {_COUNTED}, and recall where it shows hits of a cache; {_SEMANTIC}",
        shares=(
            "fine.recall",
            "fine.recall_of_new",
            "coarse.recall",
            "popularity",
            "previous_token",
        ),
    ),
    "finemoe_figure8": FineTable(
        "FineMoE's figure 8: shared experts of two tokens, in percent, by their maps' similarity:",
        _TASK | {"similarity": "similarity", "pairs": "pairs", "trajectory_recall": "recall"},
        f"Ours are {_COUNTED}; {_SEMANTIC}",
        shares=("trajectory_recall",),
    ),
    "finemoe_figure9": FineTable(
        "FineMoE's figure 9: Pearson's coefficient of similarity and shared experts:",
        _TASK
        | {
            "trajectory_pearson": "all pairs",
            "trajectory_pearson_of_nearest": "each token's nearest",
        },
        f"Ours are {_COUNTED}; {_SEMANTIC}",
    ),
    "finemoe_figure10": FineTable(
        "FineMoE's figure 10: times at batch 1 over `lfu`'s, which fetches nothing ahead:",
        {
            "r": "r",
            "phase": "store",
            "system": "policy",
            "ttft_over_lfu": "first token",
            "tpot_over_lfu": "a further token",
            "tpot_over_resident": "over all in memory",
            "hit_rate": "hits",
            "prefetched_per_token": "ahead a token",
            "wasted_per_token": "of which in vain",
        },
        f"Ours are of {_SERVED}. Its iterations take seconds, so nearly every load can be hidden; "
        "here the cores that compute also read, so what is read in vain costs computing too. "
        "Its baselines are systems, ours are policies of one server",
    ),
    "finemoe_figure11": FineTable(
        "FineMoE's figure 11: latency of requests that arrive when they arrive, over `lfu`'s "
        "median:",
        {
            "r": "r",
            "system": "policy",
            "requests": "requests",
            "median_over_lfu": "median, by round",
        }
        | {f"latency_over_median_of_lfu.p{q}": f"p{q}" for q in (25, 50, 75, 90, 99)},
        f"Ours are of {_SERVED}; arrivals are Poisson's, not Azure's",
    ),
    "finemoe_figure12": FineTable(
        "FineMoE's figure 12: hits of distinct experts in percent, by rows of a layer (of 64):",
        _TASK | {"num_rows": "rows"},
        f"Ours are hits {_COUNTED}, where it has times; what they cost: the table of stalls",
        by="way",
        value="hit_rate",
        shares=("hit_rate",),
    ),
    "finemoe_figure14a": FineTable(
        "FineMoE's figure 14a: recall by way to predict, in percent:",
        _TASK
        | {
            "popularity": "popularity",
            "previous_token": "previous token",
            "hit_count.recall": "counts of requests",
            "learned.recall": "probes",
            "map_T.recall": "maps, 1,000",
            "map_T_all_known.recall": "maps, all",
        },
        f"Ours are {_COUNTED}; {_SEMANTIC}; {_TOP}, so that delta changes nothing",
        shares=(
            "popularity",
            "previous_token",
            *(f"{w}.recall" for w in ("hit_count", "learned", "map_T", "map_T_all_known")),
        ),
    ),
    "finemoe_figure14b": FineTable(
        "FineMoE's figure 14b: hits in percent by who leaves first, nothing fetched ahead:",
        _TASK | {"num_rows": "rows"},
        f"Ours are {_COUNTED}. Its rule leaves out recency on purpose; decayed frequency has it",
        by="way",
        value="hit_rate",
        shares=("hit_rate",),
    ),
    "finemoe_figure15": FineTable(
        "FineMoE's figure 15: stall of a layer in its computing times, by prefetch distance and r:",
        _TASK | {"load_time": "r", "way": "policy"},
        f"Ours are a simulation, {_COUNTED}: searching costs nothing in it, so distance 1 is not "
        "punished for being late",
        by="distance",
        value="stall_per_layer",
    ),
    "finemoe_figure16a": FineTable(
        "FineMoE's figure 16a: similarity of the nearest map, and recall, by maps kept:",
        _TASK
        | {
            "capacity": "maps",
            "trajectory_similarity": "similarity",
            "share_at_least_0.75": "at least 0.75, %",
            "recall": "recall, %",
            "recall_of_new": "of new tokens, %",
        },
        f"Ours are {_COUNTED}; {_TOP}, and are less alike than whole ones",
        shares=("share_at_least_0.75", "recall", "recall_of_new"),
    ),
    "finemoe_figure16b": FineTable(
        "FineMoE's figure 16b: hits in percent by requests side by side:",
        _TASK | {"batch": "requests", "num_rows": "rows"},
        f"Ours are hits {_COUNTED}, where it has times; above eight requests nothing is predicted",
        by="way",
        value="hit_rate",
        shares=("hit_rate",),
    ),
    "finemoe_figure17": FineTable(
        "FineMoE's figure 17: what one token's pass asks for, by policy:",
        _TASK
        | {
            "way": "policy",
            "asked": "experts",
            "hits": "found",
            "loads": "loaded on demand",
            "prefetches": "ahead",
            "useful": "useful",
            "wasted": "wasted",
        },
        f"Ours are counts, {_COUNTED}, where it has milliseconds",
    ),
    "finemoe_figure18": FineTable(
        "FineMoE's figure 18: bytes of a store:",
        {
            "model": "model",
            "maps": "maps",
            "bytes": "ours, whole embeddings, MB",
            "bytes_of_maps": "maps alone, MB",
        },
        "Ours counts the embedding too, in float32, where the paper must mean maps alone. A server "
        "keeps 64 numbers of each embedding",
        megabytes=("bytes", "bytes_of_maps"),
    ),
    "finemoe_shift": FineTable(
        "A shift of the workload: recall in percent with another task's store, after it has "
        "learned\nthe new task, and by the paper's replacement alone, which never forgets:",
        {
            "task": "new task",
            "store_of": "store of",
            "recall": "at first",
            "afterwards.recall": "afterwards",
            "afterwards_of_the_other.recall": "of the old task then",
            "by_the_papers_rule.afterwards.recall": "afterwards, the paper's rule",
            "by_the_papers_rule.afterwards_of_the_other.recall": "old task, the paper's rule",
        },
        f"Ours are {_COUNTED}",
        shares=(
            "recall",
            "afterwards.recall",
            "afterwards_of_the_other.recall",
            "by_the_papers_rule.afterwards.recall",
            "by_the_papers_rule.afterwards_of_the_other.recall",
        ),
        without="recall",
    ),
    "finemoe_shared": FineTable(
        "One store for all tasks, searched as one and by task (`--store-by`), recall in percent:",
        _TASK | {"maps": "maps", "as_one.recall": "as one", "by_task.recall": "by task"},
        f"Ours are {_COUNTED}",
        shares=("as_one.recall", "by_task.recall"),
    ),
    "finemoe_timeline": FineTable(
        "Stall of a layer in its computing times, by r (a load's time in a layer's), simulated:",
        _TASK | {"batch": "requests", "load_time": "r"},
        f"Ours are {_COUNTED}",
        by="way",
        value="stall_per_layer",
    ),
    "finemoe_regimes": FineTable(
        "Served: the share of `lfu`'s stall that fetching ahead hides, and tokens a second of "
        "`auto`\nover the best fixed policy; half at r 0.3, a third at r 1 and 0.97 are the "
        "goals:",
        {
            "r": "r",
            "batch": "requests",
            "hidden_by.finemoe": "hidden by `finemoe`",
            "hidden_by.regression": "by `regression`",
            "bytes_over_lfu.finemoe": "bytes over `lfu`",
            "bytes_over_lfu.regression": "`regression`",
            "auto_over_best_fixed": "`auto` / best fixed",
            "auto_is": "`auto` is",
            "chosen_over_others": "that / best other",
        },
        f"Ours are of {_SERVED}. Servers that do the same differ too, so what `auto` chose is "
        "compared with what it\ndid not choose, each under its own name",
    ),
    "finemoe_regimes_decoding": FineTable(
        "The same of decoding alone: prompts' own passes, of which nothing is predicted, are not "
        "in it:",
        {
            "r": "r",
            "batch": "requests",
            "stall_s_per_token.lfu": "`lfu`'s stall a token, s",
            "hidden_by.finemoe": "hidden by `finemoe`",
            "hidden_by.regression": "by `regression`",
            "auto_over_best_fixed": "`auto` / best fixed",
            "auto_is": "`auto` is",
            "chosen_over_others": "that / best other",
        },
        f"Ours are of {_SERVED}",
    ),
    "finemoe_speed": FineTable(
        "What `sgl-esft plan` predicted, and what was served, in tokens a second:",
        {
            "rows": "rows",
            "r": "r",
            "batch": "requests",
            "with_adapters": "adapters",
            "predicted_tokens_per_s.expected": "predicted",
            "predicted_tokens_per_s.low": "from",
            "predicted_tokens_per_s.high": "to",
            "served_tokens_per_s": "served",
            "tokens_per_s": "by round",
            "error": "error, %",
        },
        f"Ours are of {_SERVED}; its average is over systems and models, ours over one server's "
        "settings",
        shares=("error",),
        note=_speed_note,
    ),
    "finemoe_large": FineTable(
        "A model larger than the memory, DeepSeek-V2-Lite's sizes. Answers mean nothing: weights "
        "are\nrandom, routing is replayed. 1.43 times the bound is the goal:",
        {
            "system": "policy",
            "ready_s": "until it serves, s",
            "peak_process_bytes": "peak, MB",
            "decode_s_per_token": "a token, s",
            "decode_over_bound": "over the bound",
            "mixed_s_per_token": "with adapters, s",
            "hit_rate": "hits",
            "prefill_s": "1,024 tokens, s",
            "prefill_reads_each_at_most_once": "each read once",
        },
        "Ours are of a CPU that reads a disk; its experts are in host memory beside a GPU",
        megabytes=("peak_process_bytes",),
        note=_large_note,
    ),
}

TABLES: dict[str, tuple[str, Callable[[Any], str]]] = {
    name: (each.title, each.made) for name, each in FINE_TABLES.items()
}

PLOTTED = {
    "finemoe_figure4": "Recall by prefetch distance: maps, counts of requests, popularity",
    "finemoe_figure12": "Hits by rows of a layer, by policy, with Belady's bound",
    "finemoe_timeline": "Stall by speed of the link, by policy",
    "finemoe_shift": "Recall while a store of another task learns",
    "finemoe_regimes": "Stall that fetching ahead hides, by speed of the link and requests",
}
