"""The README's pictures: `python -m scripts.draw_pictures` writes docs/pictures/*.svg.

    SlotLayout, ExpertMap (a small example) -> [draw] -> docs/pictures/shared.svg
    the steps of docs/data_flow.md          -> [draw] -> docs/pictures/request.svg
    the demo's slots (draw_memory.py)                 -> docs/pictures/memory.svg

Each picture brings its own background, so it reads on a light page and on a dark one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from bench.report.draw_memory import memory_picture
from sgl_esft.weave.expert_map import ExpertMap, base_row
from sgl_esft.weave.slot_layout import SlotLayout

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"

# The example: one layer of 8 experts, two adapter slots of 3. Adapter slot -> its expert ids.
NUM_EXPERTS = 8
ADAPTERS = {0: ("reverse", (2, 5)), 1: ("caesar", (0, 5, 7))}
LAYOUT = SlotLayout.plan(num_base=8, num_routed=8, num_adapters=2, max_experts_per_adapter=3)
ROUTED = (5, 1)  # the experts that the router chose for each token of the example

_FILLS = {0: "blue", 1: "amber"}
_STYLE = """\
text { font-family: "Segoe UI", "Helvetica Neue", Arial, sans-serif; font-size: 13px;
       fill: #111827; }
.small { font-size: 11.5px; fill: #4b5563; }
.head { font-weight: 600; font-size: 14px; }
.mono { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 12px; }
.mid { text-anchor: middle; }
.end { text-anchor: end; }
rect { rx: 5px; stroke-width: 1.2; }
.page { fill: #ffffff; stroke: #d1d5db; rx: 10px; }
.sglang { fill: #ffffff; stroke: #6b7280; }
.ours { fill: #ccfbf1; stroke: #0f766e; }
.group { fill: #f9fafb; stroke: #9ca3af; stroke-dasharray: 5 4; }
.grey { fill: #e5e7eb; stroke: #6b7280; }
.blue { fill: #bfdbfe; stroke: #1d4ed8; }
.amber { fill: #fde68a; stroke: #b45309; }
.empty { fill: #ffffff; stroke: #9ca3af; stroke-dasharray: 3 3; }
.arrow { fill: none; stroke: #374151; stroke-width: 1.6; marker-end: url(#tip); }"""
_TIP = (
    '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
    'markerHeight="7" orient="auto"><path d="M0 0 L10 5 L0 10 z" fill="#374151"/></marker></defs>'
)


class Picture:
    """An SVG in the making; x and y are pixels from the top left corner."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._open = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img">\n<title>{escape(title)}</title>'
        )
        self._parts: list[str] = []
        self.box(1, 1, width - 2, height - 2, "page")

    def box(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        self._parts.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"/>'
        )

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        self._parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(words)}</text>')

    def arrow(self, *points: tuple[float, float]) -> None:
        path = " L".join(f"{x:g} {y:g}" for x, y in points)
        self._parts.append(f'<path class="arrow" d="M{path}"/>')

    def step(self, x: float, y: float, width: float, kind: str, lines: Sequence[str]) -> None:
        """A box with a bold first line and small further ones; 96 pixels high."""
        self.box(x, y, width, 96, kind)
        self.text(x + width / 2, y + 22, lines[0], "head mid")
        for i, line in enumerate(lines[1:]):
            self.text(x + width / 2, y + 43 + 17 * i, line, "small mid")

    def cell(self, x: float, y: float, size: float, kind: str, words: str) -> None:
        self.box(x, y, size, size, kind)
        self.text(x + size / 2, y + size / 2 + 4, words, "mono mid")

    def svg(self) -> str:
        style = f"<style>\n{_STYLE}\n</style>"
        return "\n".join([self._open, style, _TIP, *self._parts, "</svg>\n"])


def request_picture() -> str:
    """A request's life."""
    picture = Picture(890, 452, "The life of a request, from the client to the next token")
    _draw_arrival(picture)
    _draw_forward(picture)
    picture.arrow((802, 122), (802, 148), (94, 148), (94, 205))
    picture.text(444, 142, "one batch: requests of the base and of up to N adapters", "small mid")
    _draw_legend(picture)
    return picture.svg()


def _draw_arrival(picture: Picture) -> None:
    steps = (
        (
            20,
            145,
            "sglang",
            ("Client", '"adapter": "reverse"', "or model, lora_path,", "or an sgl program"),
        ),
        (
            195,
            150,
            "ours",
            ("1 Which adapter?", "all ways to say it", "mean one name;", "else 404"),
        ),
        (
            375,
            150,
            "sglang",
            ("2 Registry", "name to adapter id;", "counted in use until", "the end"),
        ),
        (
            555,
            150,
            "sglang",
            ("3 Scheduler", "continuous batching;", "prefix cache keyed", "by adapter id"),
        ),
        (
            735,
            135,
            "ours",
            ("4 Adapter slot", "host copy to device", "if it is cold; base", "requests have -1"),
        ),
    )
    for x, width, kind, lines in steps:
        picture.step(x, 26, width, kind, lines)
    for (x, width, *_), (next_x, *_) in itertools.pairwise(steps):
        picture.arrow((x + width, 74), (next_x, 74))


def _draw_forward(picture: Picture) -> None:
    picture.box(14, 170, 862, 232, "group")
    picture.text(750, 192, "one forward pass", "small")
    picture.step(
        24, 206, 140, "ours", ("5 Tag tokens", "each token gets its", "request's adapter", "slot")
    )
    _draw_ids(picture, 78, "token_adapter_slots", [(0,), (-1,), (1,)])
    picture.box(186, 180, 544, 208, "group")
    picture.text(200, 199, "in each MoE layer", "small")
    picture.step(
        198, 206, 140, "sglang", ("6 Router", "one for all: the", "top-k experts of", "each token")
    )
    picture.step(
        378,
        206,
        160,
        "ours",
        ("7 Reroute", "slot = expert_map", "[adapter slot, expert]", "-1 passes through"),
    )
    picture.step(
        578,
        206,
        140,
        "sglang",
        ("8 Experts", "SGLang's own MoE", "over rows of one", "weight tensor"),
    )
    picture.step(752, 206, 112, "sglang", ("9 Sample", "next token,", "back to 3"))
    for start, end in ((164, 198), (338, 378), (538, 578), (718, 752)):
        picture.arrow((start, 254), (end, 254))
    _draw_ids(picture, 342, "expert ids [tokens, k]", [ROUTED] * 3)
    rows = expert_map().table.tolist()
    slots = [tuple(rows[tag][e] for e in ROUTED) for tag in (0, -1, 1)]
    _draw_ids(picture, 542, "slot ids [tokens, k]", slots)


def _draw_ids(picture: Picture, x: float, title: str, ids: Sequence[tuple[int, ...]]) -> None:
    """Three tokens' ids below the arrow at x: the tokens of adapter slots 0, -1 and 1."""
    for row, (kind, pair) in enumerate(zip(("blue", "grey", "amber"), ids, strict=True)):
        picture.box(x - 24, 311 + 20 * row, 80, 18, kind)
        picture.text(x + 16, 324 + 20 * row, "\u00a0\u00a0".join(map(str, pair)), "mono mid")
    picture.text(x + 16, 382, title, "small mid")


def _draw_legend(picture: Picture) -> None:
    entries = (("ours", "this project"), ("sglang", "SGLang, unmodified"), ("blue", "reverse"))
    entries += (("amber", "caesar"), ("grey", "base"))
    x = 30.0
    for kind, words in entries:
        picture.box(x, 417, 18, 18, kind)
        picture.text(x + 26, 431, words)
        x += 60 + 7.2 * len(words)


def expert_map() -> ExpertMap:
    """The example's expert map, made by the code that serves."""
    row = base_row(
        num_experts=NUM_EXPERTS, num_routed_global=NUM_EXPERTS, num_routed_local=NUM_EXPERTS,
        ep_rank=0,
    )  # fmt: skip
    example = ExpertMap(row, LAYOUT, "cpu")
    for adapter_slot, (_, experts) in ADAPTERS.items():
        slots = LAYOUT.adapter_range(adapter_slot)
        example.write(adapter_slot, dict(zip(experts, slots, strict=False)))
    return example


def shared_picture() -> str:
    """What is shared and what is not."""
    picture = Picture(890, 520, "What the base and the adapters share, and what they do not")
    _draw_trunk_and_kv(picture)
    _draw_expert_tensor(picture)
    _draw_map(picture)
    return picture.svg()


def _draw_trunk_and_kv(picture: Picture) -> None:
    picture.text(24, 36, "The trunk: one copy, shared by all", "head")
    picture.box(24, 48, 500, 62, "grey")
    picture.text(274, 74, "embedding, attention, dense layers, norms, head,", "mid")
    picture.text(274, 95, "and in each MoE layer the router and the shared experts", "mid")
    picture.text(556, 36, "KV cache: one pool", "head")
    kinds = ("grey", "blue", "blue", "grey", "amber", "blue", "grey", "amber", "grey", "empty")
    for i, kind in enumerate(kinds):
        picture.box(556 + 31 * i, 48, 28, 28, kind)
    picture.text(556, 95, "an entry is of one adapter or of the base, and", "small")
    picture.text(556, 110, "is reused only there (keyed by adapter id)", "small")


def _draw_expert_tensor(picture: Picture) -> None:
    picture.text(24, 152, "The expert tensor of one MoE layer: a row is a slot", "head")
    for slot in range(LAYOUT.num_slots):
        kind, words = _content(slot)
        x = _slot_x(slot)
        picture.text(x + 26, 176, str(slot), "small mid")
        picture.cell(x, 182, 52, kind, words)
    picture.text(250, 256, "base experts: one copy, shared by all", "mid")
    for adapter_slot, (name, _) in ADAPTERS.items():
        slots = LAYOUT.adapter_range(adapter_slot)
        middle = (_slot_x(slots[0]) + _slot_x(slots[-1]) + 52) / 2
        picture.text(middle, 256, f"adapter slot {adapter_slot}: {name}", "mid")
        picture.text(middle, 273, "its own experts, E_max slots", "small mid")
    picture.text(250, 273, "slot = expert id", "small mid")


def _slot_x(slot: int) -> float:
    """Cells of 52 pixels, with a gap before each adapter slot."""
    adapter = max(0, (slot - LAYOUT.num_base) // LAYOUT.slots_per_adapter + 1)
    return 24 + 57 * slot + 20 * adapter


def _content(slot: int) -> tuple[str, str]:
    """What sits in a slot: (kind of cell, words)."""
    if slot < LAYOUT.num_base:
        return "grey", f"e{slot}"
    adapter_slot, place = divmod(slot - LAYOUT.num_base, LAYOUT.slots_per_adapter)
    experts = ADAPTERS[adapter_slot][1]
    if place < len(experts):
        return _FILLS[adapter_slot], f"e{experts[place]}"
    return "empty", "empty"


def _draw_map(picture: Picture) -> None:
    picture.text(24, 318, "expert_map of this layer: which slot to use", "head")
    picture.text(120, 344, "expert id", "small end")
    rows = expert_map().table.tolist()
    labels = {a: f"{a}  {name}" for a, (name, _) in ADAPTERS.items()} | {-1: "-1  base"}
    for expert in range(NUM_EXPERTS):
        picture.text(150 + 44 * expert, 344, str(expert), "small mid")
    for i, (tag, label) in enumerate(labels.items()):
        y = 354 + 44 * i
        picture.text(120, y + 24, label, "end")
        for expert, slot in enumerate(rows[tag]):
            kind = "grey" if slot == expert else _FILLS[tag]
            picture.cell(130 + 44 * expert, y, 40, kind, str(slot))
    picture.text(
        24,
        506,
        "Drawn small: 8 experts, two adapter slots of 3. Padded: an empty slot takes memory too.",
        "small",
    )
    _draw_lookups(picture, rows)


def _draw_lookups(picture: Picture, rows: list[list[int]]) -> None:
    picture.text(530, 318, f"The router says experts {ROUTED[0]} and {ROUTED[1]}:", "head")
    for i, tag in enumerate((*ADAPTERS, -1)):
        name, kind = (ADAPTERS[tag][0], _FILLS[tag]) if tag in ADAPTERS else ("base", "grey")
        y = 354 + 44 * i
        picture.box(530, y, 150, 40, kind)
        picture.text(605, y + 24, f"token of {name}", "mid")
        picture.arrow((684, y + 20), (716, y + 20))
        slots = " and ".join(str(rows[tag][expert]) for expert in ROUTED)
        picture.text(726, y + 24, f"slots {slots}")


def main() -> None:
    """Write both pictures."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures().items():
        (PICTURES / name).write_text(picture)


def pictures() -> dict[str, str]:
    """File name -> SVG."""
    return {
        "memory.svg": memory_picture(),
        "request.svg": request_picture(),
        "shared.svg": shared_picture(),
    }


if __name__ == "__main__":
    main()
