"""Who gives expert memory: this process's own arena, or somebody outside it (sgl_elastic).

    sgl_elastic.engine --install--> [page_source] <--current-- expert_tensor.py, plugin/build.py

A page source outlives its engines and may put memory behind other experts while the engine
lives, so its layers are SharedLayers: every expert has a slot for good, and which of them are
here changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from sgl_esft.weave.expert_memory import SlotMemory
from sgl_esft.weave.slot_layout import SlotLayout


class PageSource(Protocol):
    """What stands behind the slots of all MoE layers of this process.

    `num_sources`: ranks that tokens may come from, where who computes an expert depends on that,
    because experts have copies; 1 = it does not.
    """

    @property
    def num_sources(self) -> int: ...

    def create_experts(
        self, layer: torch.nn.Module, layout: SlotLayout, create: Callable[[], None]
    ) -> SlotMemory:
        """As `expert_tensor.create_experts`, with memory that belongs to the source."""

    def woven(self, manager: Any) -> None:
        """Weaving is done: the EsftManager of this rank, to be told what moves."""


_source: PageSource | None = None


def install(source: PageSource) -> None:
    """From now on this process's experts live in the source's memory."""
    global _source
    _source = source


def num_sources() -> int:
    """The source's; 1 without one."""
    return 1 if _source is None else _source.num_sources


def current() -> PageSource | None:
    """The source; None where experts live in this process's own arena."""
    return _source
