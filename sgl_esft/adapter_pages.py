"""How many pages adapters may take on a rank; the same number on every rank.

    manifests, layers -> [pages_needed] -> admission of adapters and batches (adapters.py)
    --adapter-memory, first adapters -> [bound_pages] -> its limit

Ranks hold different experts but must admit the same batches, so an adapter counts
with the most pages that it can take on any rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from sgl_esft.adapter_format import AdapterManifest
from sgl_esft.config import EsftConfig
from sgl_esft.errors import DeviceMemoryError, OutOfExpertMemoryError
from sgl_esft.expert_memory import ExpertArena
from sgl_esft.moe_layer import WovenLayer

Layers = Mapping[int, WovenLayer]


def pages_needed(manifest: AdapterManifest, layers: Layers) -> int:
    """The most pages the adapter takes on any rank, wherever its experts come to lie."""
    num_pages = 0
    for layer_id, expert_ids in manifest.experts.items():
        layer = layers[layer_id]
        experts_of_rank = Counter(e // len(layer.shard.expert_ids) for e in expert_ids)
        num_pages += layer.memory.max_pages(max(experts_of_rank.values(), default=0))
    return num_pages


def bound_pages(
    arena: ExpertArena | None,
    layers: Layers,
    config: EsftConfig,
    initial: Iterable[AdapterManifest],
    *,
    has_limit: bool,
) -> int | None:
    """Pages for all adapters together; None = as many as they want.

    --adapter-memory decides, if given. Otherwise, on a device with limited memory
    (`has_limit`): what the initial adapters need, or, without any, what all slots need. Pages that
    no initial adapter will take are made now, before SGLang sizes the KV cache by what is left.
    Raises DeviceMemoryError when the device has too few.
    """
    if arena is None:
        return None
    if config.adapter_memory_bytes is not None:
        return _reserve(arena, -(-config.adapter_memory_bytes // arena.page_bytes))
    if not has_limit:
        return None
    needed = sorted((pages_needed(manifest, layers) for manifest in initial), reverse=True)
    if needed:
        return sum(needed[: config.max_adapters])
    per_adapter = (
        layer.memory.max_pages(layer.layout.slots_per_adapter) for layer in layers.values()
    )
    return _reserve(arena, config.max_adapters * sum(per_adapter))


def _reserve(arena: ExpertArena, num_pages: int) -> int:
    try:
        arena.reserve_pages(num_pages)
    except OutOfExpertMemoryError as error:
        raise DeviceMemoryError(
            f"no room for adapters: {error}; or set a smaller --adapter-memory"
        ) from error
    return num_pages
