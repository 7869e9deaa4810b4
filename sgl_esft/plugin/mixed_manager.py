"""ESFT and LoRA adapters side by side, in the place SGLang built for LoRA.

    SGLang --ids of a batch--> [MixedManager] --ESFT parts--> EsftManager -> plane, tags
                                              --LoRA parts--> lora_store.py -> SGLang's LoRA manager

A request carries one id: an ESFT adapter's, a LoRA adapter's, or both joined by "+", the ESFT
adapter's first. The process that serves HTTP makes the id (registry_hooks.py), and the prefix cache
is keyed by it. Without LoRA there is no such object, and nothing of this runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any

from sgl_esft import sglang_api
from sgl_esft.config import EsftConfig
from sgl_esft.formats.lora_manifest import check_lora, served_targets
from sgl_esft.http.adapter_names import parts_of
from sgl_esft.plugin.lora_manager import EsftManager
from sgl_esft.plugin.lora_store import BothStores, LoraMetrics, LoraStore

_parts = lru_cache(maxsize=1 << 12)(parts_of)


class MixedManager(EsftManager):
    """`EsftManager` beside SGLang's own LoRA manager."""

    def __init__(self, *arguments: Any, lora: LoraStore, **named: Any) -> None:
        """lora: this rank's LoRA adapters."""
        self.lora = lora
        super().__init__(*arguments, **named)

    def _make_store(self) -> Any:
        return BothStores(self.plane, self.lora)

    # ---- scheduling ----

    def has(self, adapter_id: str) -> bool:
        return all(self.store.is_loaded(part) for part in _parts(adapter_id))

    def name_of(self, adapter_id: str) -> str | None:
        """Of two adapters, both names joined as a request may say them."""
        names = [self.store.name_of(part) for part in _parts(adapter_id)]
        return None if None in names else "+".join(filter(None, names))

    def validate_lora_batch(self, lora_ids: set[str | None]) -> bool:
        esft, lora = self._kinds(lora_ids)
        return super().validate_lora_batch(esft) and self.lora.can_run_together(lora)

    def fetch_new_loras(
        self, new_loras: set[str | None], running_loras: set[str | None] | None = None
    ) -> None:
        esft, lora = self._kinds(new_loras | (running_loras or set()))
        super().fetch_new_loras(esft)
        self.lora.ensure_on_device(lora)

    def _kinds(self, adapter_ids: Iterable[str | None]) -> tuple[set[str | None], set[str]]:
        """(ESFT parts, LoRA parts) of a batch's ids."""
        parts = {part for each in adapter_ids if each is not None for part in _parts(each)}
        lora = {part for part in parts if self.lora.is_loaded(part)}
        return {*parts - lora}, lora

    # ---- forward ----

    def reset_lora_batch(self) -> None:
        super().reset_lora_batch()
        self.lora.reset()

    def prepare_lora_batch(self, forward_batch: Any) -> None:
        """Tag the tokens with their ESFT slots, and tell LoRA's layers of their LoRA slots."""
        ids: Sequence[str | None] | None = forward_batch.lora_ids
        pairs = [self._pair(each) for each in ids or ()]
        forward_batch.lora_ids = ids and [esft for esft, _ in pairs]
        try:
            super().prepare_lora_batch(forward_batch)
        finally:
            forward_batch.lora_ids = ids
        self.lora.prepare(forward_batch, [lora for _, lora in pairs])

    def _pair(self, adapter_id: str | None) -> tuple[str | None, str | None]:
        """(ESFT part, LoRA part) of one request's id."""
        esft = lora = None
        for part in () if adapter_id is None else _parts(adapter_id):
            if self.lora.is_loaded(part):
                lora = part
            else:
                esft = part
        return esft, lora


def manager_kind(runner: Any, config: EsftConfig) -> Callable[..., EsftManager]:
    """What the manager of a loaded model is made by: with LoRA, its layers are wrapped by now.

    Raises UnsupportedModelError when the model has other layers than its config.json says.
    """
    if config.lora is None:
        return EsftManager
    from sgl_esft.plugin import lora_layers

    targets = served_targets(sglang_api.base_config(*sglang_api.served_model()), config.lora)
    inner = lora_layers.make_lora_manager(runner, config.lora, targets)
    store = LoraStore(
        inner,
        lambda name, folder: check_lora(name, folder, (), targets, config),
        lambda i, name, path, pinned: sglang_api.make_adapter_ref(name, path, pinned, i),
        lora_layers.load_tensors,
        LoraMetrics(sglang_api.tp_rank()) if sglang_api.has_metrics() else None,
    )
    return partial(MixedManager, lora=store)
