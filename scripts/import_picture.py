"""docs/pictures/architecture.svg from the real imports: `python -m scripts.import_picture`.

    sources -> [room_imports] -> arrows between rooms -> [levels] -> [draw] -> SVG, whose
    description lists every arrow (a test compares it with the code)

A room is a folder of a package, the whole of `launch` or `kernels`, or a module at a package's
root that imports a room. The other modules at a root are its base, which every room may import: of
a base no arrows are drawn. Nor are arrows that two others make, nor imports for type checkers.
"""

from __future__ import annotations

import ast
import xml.etree.ElementTree as ET
from collections.abc import Collection, Iterator, Mapping
from functools import cache, partial
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle
from matplotlib.path import Path as Curve

from bench.report.plot_style import BLUE, GREEN, ORANGE, VERMILION, to_svg

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "pictures" / "architecture.svg"


class Package(NamedTuple):
    """Its folder, whether folders in it are rooms, its place from left to right, its colour."""

    folder: str
    has_rooms: bool
    place: int
    colour: str


# By the name that each is imported by.
PACKAGES = {
    "sgl_elastic": Package("sgl_elastic", True, 0, ORANGE),
    "sgl_esft_launch": Package("launch", False, 1, VERMILION),
    "sgl_esft": Package("sgl_esft", True, 2, BLUE),
    "sgl_esft_kernels": Package("kernels", False, 2, GREEN),
}
LATE, EARLY = "..>", "-->"
BOX, GAP, BEND = 1.65, 0.25, 0.2  # width of a box, space beside it, half the width of a bend
HEIGHT, LEVEL = 0.5, 1.0  # of a box, of a level
ROUNDS = 30
NOTE = """\
An arrow: imports. Dashed: late imports alone.
Not drawn: what others of these arrows imply,
and the modules at a package's root that every room may import."""

Arrows = dict[tuple[str, str], str]


class Import(NamedTuple):
    """`from base import name`, or `import base` with an empty name."""

    base: str
    name: str
    kind: str


def imports_of(node: ast.AST, kind: str = EARLY) -> Iterator[Import]:
    """Everything the source imports, but for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(each.name, "", kind) for each in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from (Import(child.module or "", each.name, kind) for each in child.names)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from imports_of(child, LATE)
        elif not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            yield from imports_of(child, kind)


def read_sources() -> dict[str, str]:
    """Module -> source, of all packages."""
    found = {}
    for package, (folder, *_) in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([package, *parts]).removesuffix(".__init__")] = path.read_text()
    return found


def room_imports(sources: Mapping[str, str]) -> Arrows:
    """(room, room it imports) -> LATE where no import runs when the room's module is imported."""
    wanted = {module: set(modules_of(source, sources)) for module, source in sources.items()}
    folders = {module.rpartition(".")[0] for module in sources}

    def folder_of(module: str) -> str:
        parts = module.split(".")
        if not PACKAGES[parts[0]].has_rooms:
            return parts[0]
        inner = ".".join(parts[:2])
        return inner if len(parts) > 1 and inner in folders else ""

    def room_of(module: str) -> str:
        imports_a_room = "." in module and any(folder_of(each) for each, _ in wanted[module])
        return folder_of(module) or (module if imports_a_room else "")

    arrows: Arrows = {}
    for module, found in wanted.items():
        for target, kind in found:
            ends = room_of(module), room_of(target)
            if all(ends) and ends[0] != ends[1]:
                arrows[ends] = min(kind, arrows.get(ends, kind))
    return arrows


def modules_of(source: str, known: Collection[str]) -> Iterator[tuple[str, str]]:
    """(module of ours that the source imports, how)."""
    for base, name, kind in imports_of(ast.parse(source)):
        inner = f"{base}.{name}"
        if inner in known or base in known:
            yield (inner if inner in known else base), kind


def listing(arrows: Arrows) -> str:
    """`room --> room` or `room ..> room` (late imports alone), a line each."""
    return "\n".join(f"{a} {kind} {b}" for (a, b), kind in sorted(arrows.items()))


def listed_in(svg: str) -> str:
    """The listing that a drawn picture has in its description."""
    found = ET.fromstring(svg).find(".//{http://purl.org/dc/elements/1.1/}description")
    return "" if found is None else "\n".join(str(found.text).split(", "))


def levels(arrows: Arrows) -> dict[str, int]:
    """Room -> its level: above all that it imports; near its importers if those are more.

    Raises graphlib.CycleError, which names them, for rooms that import each other in a circle.
    """
    below: dict[str, list[str]] = {}
    for a, b in sorted(arrows):
        below.setdefault(a, []).append(b)
    order = list(TopologicalSorter(below).static_order())
    found: dict[str, int] = {}
    for room in order:
        found[room] = max((1 + found[each] for each in below.get(room, ())), default=0)
    for room in reversed(order):
        above = [a for a, b in arrows if b == room]
        if len(above) > len(below.get(room, ())):
            found[room] = min(found[each] for each in above) - 1
    return found


def shown(arrows: Arrows) -> Arrows:
    """Without those that a way over other rooms makes too."""

    @cache
    def reach(room: str) -> frozenset[str]:
        below = [b for a, b in arrows if a == room]
        return frozenset(below).union(*(reach(each) for each in below))

    return {
        (a, b): kind
        for (a, b), kind in arrows.items()
        if not any(b in reach(c) for x, c in arrows if x == a and c != b)
    }


class Layout:
    """Where each room and each bend of an arrow stands: ordered level by level, then spaced."""

    def __init__(self, arrows: Arrows) -> None:
        drawn = shown(arrows)
        self.level = levels(drawn)
        self.ways = {ends: self._way(*ends) for ends in sorted(drawn)}
        points = {*self.level, *(each for way in self.ways.values() for each in way)}
        self.lines = [
            sorted(each for each in points if self._level(each) == n)
            for n in range(1 + max(self.level.values()))
        ]
        self.near: dict[str, set[str]] = {each: set() for each in points}
        for way in self.ways.values():
            for a, b in pairwise(way):
                self.near[a].add(b)
                self.near[b].add(a)
        self.x = {each: float(n) for line in self.lines for n, each in enumerate(line)}
        for _ in range(ROUNDS):
            for line in (*self.lines, *reversed(self.lines)):
                self._order_and_space(line)

    def y(self, point: str) -> float:
        return LEVEL * self._level(point)

    def _level(self, point: str) -> int:
        room, _, level = point.partition("@")
        return int(level) if level else self.level[room]

    def _way(self, a: str, b: str) -> list[str]:
        """From room to room, with a bend on each level between; `a b@3` for one on level 3."""
        between = range(self.level[a] - 1, self.level[b], -1)
        return [a, *(f"{a} {b}@{level}" for level in between), b]

    def _order_and_space(self, line: list[str]) -> None:
        """Each at the mean of its neighbours, as far as those beside it leave it room."""
        mean = {e: sum(self.x[n] for n in sorted(self.near[e])) / len(self.near[e]) for e in line}
        line.sort(key=lambda each: (package_of(each).place, mean[each], each))
        at: list[float] = []
        for n, each in enumerate(line):
            least = at[-1] + apart(line[n - 1], each) if at else mean[each]
            at.append(max(mean[each], least))
        shift = sum(at) / len(at) - sum(mean.values()) / len(mean)
        self.x.update({each: x - shift for each, x in zip(line, at, strict=True)})


def package_of(point: str) -> Package:
    """Of a room or a bend; a bend is its first room's."""
    return PACKAGES[point.split(" ", maxsplit=1)[0].partition(".")[0]]


def apart(a: str, b: str) -> float:
    """Least distance of two neighbours' middles."""
    return sum(BEND if "@" in each else (BOX + GAP) / 2 for each in (a, b))


def draw(arrows: Arrows) -> Figure:
    """Boxes in levels, arrows downwards; dashed are late imports alone."""
    layout = Layout(arrows)
    left, right = min(layout.x.values()) - BOX, max(layout.x.values()) + BOX
    top = LEVEL * len(layout.lines)
    figure = Figure(figsize=((right - left) * 0.6, top * 0.62))
    figure.set_layout_engine("none")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(left, right), ylim=(-1.2 * LEVEL, top))
    axes.axis("off")
    for ends, way in layout.ways.items():
        axes.add_patch(_arrow(layout, way, "--" if arrows[ends] == LATE else "-"))
    for room in layout.level:
        _box(axes, layout.x[room], layout.y(room), room)
    axes.text(left + GAP, -1.15 * LEVEL, NOTE, fontsize=8, va="bottom")
    return figure


def _arrow(layout: Layout, way: list[str], style: str) -> FancyArrowPatch:
    """Through all bends, upright at both ends."""
    points = [(layout.x[each], layout.y(each)) for each in way]
    points[0] = (points[0][0], points[0][1] - HEIGHT / 2)
    points[-1] = (points[-1][0], points[-1][1] + HEIGHT / 2)
    slopes = [
        0.0 if n in (0, len(points) - 1) else (points[n + 1][0] - points[n - 1][0]) / 6
        for n in range(len(points))
    ]
    corners, codes = points[:1], [Curve.MOVETO]
    for (a, b), (x, y), (new_x, new_y) in zip(pairwise(slopes), points, points[1:], strict=False):
        third = (y - new_y) / 3
        corners += [(x + a, y - third), (new_x - b, new_y + third), (new_x, new_y)]
        codes += [Curve.CURVE4] * 3
    return FancyArrowPatch(
        path=Curve(corners, codes),
        arrowstyle="-|>",
        mutation_scale=8,
        color=package_of(way[0]).colour,
        linestyle=style,
        linewidth=1.1,
        zorder=1,
    )


def _box(axes: Axes, x: float, y: float, room: str) -> None:
    name, _, inner = room.partition(".")
    folder, colour = PACKAGES[name].folder, PACKAGES[name].colour
    size = (BOX - 0.1, HEIGHT)
    corner = (x - size[0] / 2, y - HEIGHT / 2)
    axes.add_patch(Rectangle(corner, *size, facecolor="white", edgecolor=colour, zorder=2))
    words = {"ha": "center", "va": "center", "zorder": 3}
    axes.text(x, y + 0.1 * bool(inner), inner or folder, **words)
    axes.text(x, y - 0.13, folder if inner else "", fontsize=7, **words)


def main() -> None:
    """Draw it."""
    arrows = room_imports(read_sources())
    text = to_svg(partial(draw, arrows), Description=listing(arrows).replace("\n", ", "))
    PICTURE.write_text(text)


if __name__ == "__main__":
    main()
