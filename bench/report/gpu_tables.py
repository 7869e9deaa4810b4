"""Tables of bench/gpu: each function makes one from a part's file, of what is there.

bench/results/gpu*.json -> [a function each] -> readme_tables.py

A step that has no figures says why, and the line below names all of them: INCOMPLETE.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bench.report.markdown import ratio, table, where

_MIB = 1 << 20


def gpu_check(result: Any) -> str:
    """One layer by SGLang's kernel against its definition, and the versions."""
    versions = ("torch", "triton", "sglang", "sglang-kernel")
    parts = [_part(result["steps"], "self-check", _self_check)]
    parts += [f"{name} {result['versions'][name]}" for name in versions]
    return f"{parts[0]}\n\nWith {', '.join(parts[1:])}. {_evidence(result)}"


def gpu_memory(result: Any) -> str:
    """Calls of the driver; then what a model makes of them."""
    steps = result["steps"]
    parts = [
        _part(steps, "device tests", lambda step: f"{len(step['passed'])} C++ tests passed."),
        _part(steps, "vmm", _calls_of_the_driver),
        "\n".join(
            [
                _part(steps, "fragmentation", _fragmentation),
                _part(steps, "load", _load),
                _part(steps, "share", _share),
            ]
        ),
        *(_part(steps, name, _moe) for name in steps if name.startswith("moe: ")),
    ]
    return "\n\n".join([*parts, _evidence(result)])


def _self_check(step: Any) -> str:
    layer = step["layer"]
    return (
        f"{step['hooks']} hooks put in place; a layer by {layer['experts']} over slots with holes "
        f"is {layer['off']:.4f} of its norm off the definition, in bfloat16."
    )


def _calls_of_the_driver(step: Any) -> str:
    """Microseconds by size of page."""
    names = dict.fromkeys((r["kind"], r["operation"], r["per"]) for r in step["rows"])
    sizes = list(dict.fromkeys(row["page_bytes"] for row in step["rows"]))
    found = {
        (row["kind"], row["operation"], row["per"], row["page_bytes"]): row["microseconds"]
        for row in step["rows"]
    }
    rows = [
        [
            name[0],
            name[1].replace("_", " "),
            name[2],
            *(ratio(found.get((*name, s))) for s in sizes),
        ]
        for name in names
    ]
    header = ["", "microseconds of", "for each", *(f"pages of {s // _MIB} MiB" for s in sizes)]
    return table(header, rows)


def _fragmentation(step: Any) -> str:
    return (
        f"- {step['num_adapters']} adapters of table 1 over {step['num_layers']} layers: F_mem "
        f"{step['virtual']:.3f} virtual, {step['padded']:.3f} padded; "
        f"{step['pool_bytes'] / 1e9:.1f} GB of pages."
    )


def _load(step: Any) -> str:
    over = {name: ratio(found["wall"]) for name, found in step["over_memcpy"].items()}
    return (
        f"- Loading an adapter of {step['adapter_bytes'] / 1e9:.1f} GB from host memory over one "
        f"copy of its bytes: {over['warm']} from the pool, {over['cold']} with pages created, "
        f"{over['padded']} padded; {step['goal']} is the goal."
    )


def _share(step: Any) -> str:
    return (
        f"- A page to another process, until it is mapped there: {ratio(step['microseconds'])} "
        f"microseconds; contents {step['contents']}."
    )


def _moe(step: Any) -> str:
    cells = [ratio(row["over_plain"]) for row in step["rows"]]
    header = [f"{step['method']}, over plain memory; {step['goal']} is the goal"]
    return table(
        [*header, *(f"{row['num_tokens']} tokens" for row in step["rows"])], [["", *cells]]
    )


def gpu_reroute(result: Any) -> str:
    """Launches of a layer, microseconds of a call, a model's step minus its floor."""
    return _parts(
        result,
        {"reroute: launches": _launches, "reroute: time": _calls, "model step": _model_step},
    )


def gpu_serve(result: Any) -> str:
    """TTFT and TPOT by batch and number of adapters, over plain SGLang."""
    return _parts(result, {"serve": _served_rows, "serve: equality": _equality})


def gpu_answers(result: Any) -> str:
    """Log-probabilities beside merged models' and plain SGLang's, and what a tier costs."""
    return _parts(
        result,
        {
            "serve: equality": _equality,
            "tiers: equality": _tiers,
            "quantised: equality": _quantised,
        },
    )


def _parts(result: Any, steps: Mapping[str, Callable[[Any], str]]) -> str:
    """Each step's table, and where all of it is from."""
    parts = [_part(result["steps"], name, make) for name, make in steps.items()]
    return "\n\n".join([*parts, _evidence(result)])


def _evidence(result: Any) -> str:
    words, missing = result["evidence"], ", ".join(result.get("missing", ()))
    gaps = f" INCOMPLETE, without figures: {missing}." if missing else ""
    return f"{words[:1].upper()}{words[1:]}.{gaps}{_devices(result['steps'])} {where(result)}"


def _devices(steps: Any) -> str:
    """Which step ran where, if not all on one device; older results do not say it."""
    by_device: dict[str, list[str]] = {}
    for name, step in steps.items():
        if step["ok"] and "device" in step:
            by_device.setdefault(step["device"], []).append(name)
    if len(by_device) < 2:
        return ""
    return " " + "; ".join(f"on {device}: {', '.join(n)}" for device, n in by_device.items()) + "."


def _part(steps: Any, name: str, make: Callable[[Any], str]) -> str:
    """One step of bench/gpu/run.py as a table, or why there is none."""
    step = steps.get(name, {"ok": False, "not_run": True, "reason": "no result"})
    if step["ok"]:
        return make(step)
    return f"*{name}*: {'not run' if step.get('not_run') else 'failed'}: {step['reason']}"


def _launches(step: Any) -> str:
    """Kernels among a graph's nodes; a dash where there was no GPU to count on."""
    nodes = step["nodes_a_layer"]
    cells = ["-" if found is None else str(found["kernel"]) for found in nodes.values()]
    return table([f"kernels of a MoE layer, {step['experts']}", *nodes], [["", *cells]])


def _calls(step: Any) -> str:
    """Over the unfused chain where microseconds were not recorded."""
    unit = "microseconds_a_call"
    if unit not in step["rows"][0]["warm_l2"]:
        unit = "over_unfused_chain"
    kinds = list(step["rows"][0]["warm_l2"][unit])
    rows = [
        [str(row["num_tokens"]), cache, *(ratio(row[key][unit].get(kind)) for kind in kinds)]
        for row in step["rows"]
        for key, cache in (("warm_l2", "warm"), ("cold_l2", "cold"))
        if key in row
    ]
    return table([f"{unit.replace('_', ' ')}: tokens", "L2", *kinds], rows)


def _model_step(step: Any) -> str:
    kinds = list(step["rows"][0]["over_merged"])
    rows = []
    for row in step["rows"]:
        cells = [str(row["num_tokens"]), str(row["num_adapters"]), f"{row['floor']:.3f}"]
        for kind in kinds:
            points = 100 * (row["over_merged"][kind]["median"] - row["floor"])
            cells.append(f"{ratio(row['over_merged'][kind])}; {points:+.1f}")
        rows.append(cells)
    header = ["tokens", "adapters", "floor"]
    return table([*header, *(f"{kind} / merged; points over the floor" for kind in kinds)], rows)


def _served_rows(step: Any) -> str:
    """A cell without ratios had too little time."""
    rows = []
    for row in step["rows"]:
        cells = [str(row["batch_size"]), str(row["num_adapters"])]
        cells += [ratio(row.get(f"{metric}_over_plain")) for metric in ("ttft", "tpot")]
        points = row.get("tpot_points_over_floor")
        over = "not run" if points is None else f"{100 * points:+.1f}"
        rows.append(
            [*cells, f"{row['floor']:.3f}", over, str(row.get("rounds", row.get("reason")))]
        )
    header = ["requests", "adapters", "TTFT", "TPOT", "floor of TPOT", "points over the floor"]
    words = f"{step['num_layers']} layers; {step['rounds_left_out']} runs of a cell had no time."
    return f"{table([*header, 'rounds'], rows)}\n\n{words}"


def _equality(step: Any) -> str:
    return (
        f"Log-probabilities of {step['tokens']} tokens: an adapter is {step['off']:.3g} off its "
        f"merged model, the woven base {step['rounding']:.3g} off the plain one; merged and base "
        f"are {step['distance']:.3g} apart."
    )


_OFF = ("rounding", "off", "distance")  # of equality.py


def _tiers(step: Any) -> str:
    """The largest of each server's rows, and what it is of."""
    rows = []
    for server in dict.fromkeys(row["server"] for row in step["rows"]):
        own = [row for row in step["rows"] if row["server"] == server]
        for phase in dict.fromkeys(row["phase"] for row in own):
            worst = max(
                (row for row in own if row["phase"] == phase), key=lambda row: float(row["off"])
            )
            cells = [f"{worst[name]:.3g}" for name in _OFF]
            rows.append([server, phase, worst["model"], *cells])
    times = ", ".join(f"{n} {ratio(ms)}" for n, ms in step["milliseconds_a_token"].items())
    loads = ", ".join(f"{n} {of['demand']:.0f}" for n, of in step["counted"].items())
    header = ["server", "of", "most off", *_OFF]
    return f"{table(header, rows)}\n\nMilliseconds a token: {times}. Experts read: {loads}."


def _quantised(step: Any) -> str:
    rows = [[row["scheme"], *(f"{row[name]:.3g}" for name in _OFF)] for row in step["rows"]]
    return table(["scheme", *_OFF], rows)


TABLES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "gpu_check": ("What is asked first of a machine with a GPU:", gpu_check),
    "gpu": (
        "The virtual expert tensor on a GPU, median and quartiles:",
        gpu_memory,
    ),
    "gpu_reroute": (
        "Rerouting on a GPU, in CUDA graphs; at most 1.5 microseconds a call, one adapter at most\n"
        "0.5 and 20 adapters at most 3 points over the floor are the goals:",
        gpu_reroute,
    ),
    "gpu_serve": (
        "SGLang serving DeepSeek-V2-Lite's shape on a GPU, woven over plain SGLang:",
        gpu_serve,
    ),
    "gpu_answers": (
        "Answers on a GPU, log-probabilities of a token: how far off, what rounding alone makes,\n"
        "and how far another model is; at most 2 roundings off, and 3 or more away, are wanted:",
        gpu_answers,
    ),
}
