"""The picture of the demo's expert memory, as a server on one rank reports it.

`python -m bench.report.draw_memory` writes docs/pictures/memory.svg.

the zoo's folders -> slots and pages as the server lays them out -> [memory_picture] -> SVG
"""

from __future__ import annotations

from pathlib import Path

from sgl_esft import zoo
from sgl_esft.formats.manifest import read_manifest
from sgl_esft.formats.model_spec import DTYPE_BYTES, MoeSpec, read_moe_spec
from sgl_esft.memory.report import DeviceMemory, LayerMemory, MemoryReport, layer_memory
from sgl_esft.tools.memory_svg import report_svg
from sgl_esft.weave.expert_memory import ExpertArena, choose_page_bytes, open_arena
from sgl_esft.weave.slot_layout import SlotLayout

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "pictures" / "memory.svg"


def memory_picture() -> str:
    """The demo's base and adapters, each in the slot of its place in the launcher's order."""
    spec = read_moe_spec(zoo.base_path())
    manifests = {name: read_manifest(path, spec) for name, path in zoo.adapter_paths().items()}
    layout = SlotLayout.plan(
        num_base=spec.num_experts,
        num_routed=spec.num_experts,
        num_adapters=len(manifests),
        max_experts_per_adapter=max(m.max_experts_per_layer for m in manifests.values()),
    )
    slot_bytes = _slot_bytes(spec)
    arena = open_arena("host", 0, choose_page_bytes(slot_bytes))
    experts = [manifest.experts for manifest in manifests.values()]
    layers = [
        _lay_out(layer_id, layout, arena, slot_bytes, [len(e.get(layer_id, ())) for e in experts])
        for layer_id in spec.moe_layer_ids
    ]
    device = DeviceMemory(
        rank=0,
        device="cpu",
        expert_memory="virtual",
        pool=None,
        resident_bytes=None,
        adapters={name: slot for slot, name in enumerate(manifests)},
        kv=None,
        layers=tuple(layers),
    )
    return report_svg(MemoryReport((device,)))


def _slot_bytes(spec: MoeSpec) -> tuple[int, int]:
    """Bytes of an expert's w13 and w2."""
    matrix = spec.hidden_size * spec.expert_intermediate_size * DTYPE_BYTES[spec.dtype]
    return 2 * matrix, matrix


def _lay_out(
    layer_id: int,
    layout: SlotLayout,
    arena: ExpertArena,
    slot_bytes: tuple[int, int],
    num_experts: list[int],
) -> LayerMemory:
    memory = arena.make_layer(layout.num_slots, slot_bytes)
    memory.map(range(layout.num_base))
    runs = {}
    for slot, count in enumerate(num_experts):
        runs[slot] = memory.choose(layout.adapter_range(slot), count)
        memory.map(runs[slot])
    return layer_memory(layer_id, layout, sum(slot_bytes), memory.usage(), runs)


if __name__ == "__main__":
    PICTURE.write_text(memory_picture())
