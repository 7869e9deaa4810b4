"""The LoRA adapters of one rank: read and checked here, kept and computed by SGLang's own manager.

    disk --read, in a thread--> LoraAdapter --admit--> [LoraStore] -> SGLang's LoRA manager
    a load message, a command --> [BothStores] --> this, or the adapter plane: by the folder's kind

Beside it, the adapter plane has the ESFT adapters. An id is of one of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sgl_esft.errors import InvariantError, UnknownAdapterError
from sgl_esft.formats.adapter_config import kind_of
from sgl_esft.formats.lora_manifest import LoraManifest, Side, read_matrix
from sgl_esft.formats.lora_targets import LoraModule
from sgl_esft.memory.report import LoraMemory
from sgl_esft.weave.adapter_pages import check_pin
from sgl_esft.weave.host_cache import HostAdapter, OnRead
from sgl_esft.weave.plane import AdapterPlane, AdapterSource

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

# (name, folder) -> manifest; raises one of the Adapter* errors
CheckLora = Callable[[str, str], LoraManifest]
# (id, name, folder, pinned) -> SGLang's LoRARef
MakeRef = Callable[[str, str, str, bool], Any]
# (SGLang's manager, ref, config, tensors): give it an adapter that was checked
LoadTensors = Callable[[Any, Any, Any, Mapping[str, torch.Tensor]], None]


@dataclass(frozen=True)
class LoraAdapter:
    """One adapter's matrices in host memory, put together as SGLang's layers want them."""

    name: str
    manifest: LoraManifest
    # "model.layers.0.self_attn.qkv_proj.lora_A.weight" -> [parts * rank, in]; lora_B: [out, rank]
    tensors: Mapping[str, torch.Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


class LoraStore:
    """Loaded LoRA adapters; their slots on the device are SGLang's cache over them."""

    def __init__(
        self,
        inner: Any,
        check: CheckLora,
        make_ref: MakeRef,
        load_tensors: LoadTensors,
        metrics: LoraMetrics | None = None,
    ) -> None:
        """inner: SGLang's LoRA manager; it has a slot for requests without LoRA besides."""
        self.inner = inner
        self.num_slots = int(inner.max_loras_per_batch) - 1
        self._check = check
        self._make_ref = make_ref
        self._load_tensors = load_tensors
        self._loaded: dict[str, LoraAdapter] = {}
        self._slot_bytes = int(inner.num_bytes_of_slot())
        self._metrics = metrics
        self._num_on_device = 0

    # ---- what rank_command_handler.py asks of a store ----

    def read(self, source: AdapterSource, on_size: Callable[[int], None], on_read: OnRead) -> Any:
        """Validate and read; another thread may call it. Raises one of the Adapter* errors."""
        manifest = self._check(source.name, source.path)
        on_size(manifest.num_bytes)
        return read_lora(source.name, manifest, on_read)

    def begin(self, source: AdapterSource, adapter: LoraAdapter) -> None:
        """Take in what was read. Raises NoFreeSlotError for a pin that leaves the others none."""
        if source.pinned:
            self._check_pin(source.name)
        ref = self._make_ref(
            # SGLang refuses a second adapter of one name, and versions have one.
            *(source.adapter_id, source.adapter_id, source.path, source.pinned)
        )
        self._load_tensors(self.inner, ref, adapter.manifest.config, adapter.tensors)
        self._loaded[source.adapter_id] = adapter

    def unload(self, adapter_id: str) -> None:
        """Forget an adapter that no request uses any more. Raises UnknownAdapterError."""
        if adapter_id not in self._loaded:
            raise UnknownAdapterError(f"adapter id {adapter_id} is not loaded")
        result = self.inner.unload_lora_adapter(self.inner.lora_refs[adapter_id])
        if not result.success:
            raise InvariantError(f"SGLang keeps a LoRA adapter: {result.error_message}")
        del self._loaded[adapter_id]
        self._publish()

    def set_pinned(self, adapter_id: str, pinned: bool) -> None:
        """Keep a loaded adapter in its slot, or let it go. Raises NoFreeSlotError."""
        ref, adapter = self.inner.lora_refs[adapter_id], self._loaded[adapter_id]
        if bool(ref.pinned) == pinned:
            return
        if pinned:
            self._check_pin(adapter.name)
        self.inner.lora_refs[adapter_id] = self._make_ref(
            adapter_id, adapter_id, ref.lora_path, pinned
        )
        self.inner.num_pinned_loras += 1 if pinned else -1

    def is_loaded(self, adapter_id: str) -> bool:
        return adapter_id in self._loaded

    def name_of(self, adapter_id: str) -> str | None:
        adapter = self._loaded.get(adapter_id)
        return None if adapter is None else adapter.name

    @property
    def names(self) -> dict[str, str]:
        """Adapter name -> folder, of everything loaded."""
        return {a.name: str(a.manifest.path) for a in self._loaded.values()}

    def placements(self) -> dict[str, tuple[int, int]]:
        """Adapter id -> (LoRA slot, bytes of it), of everything on the device."""
        slots = self.inner.memory_pool.uid_to_buffer_id
        return {each: (slots[each], self._slot_bytes) for each in self._loaded if each in slots}

    def _check_pin(self, name: str) -> None:
        check_pin(name, self.inner.num_pinned_loras, self.num_slots, "--max-loras")

    def memory(self) -> LoraMemory:
        """What GET /v1/memory says of this rank."""
        names = {self._loaded[each].name: slot for each, (slot, _) in self.placements().items()}
        return LoraMemory(self.num_slots, self._slot_bytes, names)

    # ---- scheduling and forward ----

    def can_run_together(self, adapter_ids: Collection[str]) -> bool:
        """Whether one batch may hold all of these, beside requests without LoRA."""
        return bool(self.inner.validate_lora_batch({None, *adapter_ids}))

    def ensure_on_device(self, adapter_ids: Collection[str]) -> None:
        """Give every adapter of a batch a slot. Raises UnknownAdapterError."""
        unknown = [each for each in adapter_ids if each not in self._loaded]
        if unknown:
            raise UnknownAdapterError(f"adapter ids {sorted(unknown)} are not loaded")
        self.inner.fetch_new_loras({None, *adapter_ids})
        self._publish()

    def _publish(self) -> None:
        now = len(self.inner.memory_pool.uid_to_buffer_id) - 1  # the base's own
        if self._metrics is not None and now != self._num_on_device:
            self._metrics.set(now)
        self._num_on_device = now

    def prepare(self, forward_batch: Any, adapter_ids: Sequence[str | None]) -> None:
        """Tell LoRA's layers whose rows are whose; without any, they compute the base alone."""
        if not any(adapter_ids):
            self.inner.reset_lora_batch()
            return
        missing = set(adapter_ids) - self.inner.memory_pool.uid_to_buffer_id.keys()
        if missing:  # SGLang would compute these as the base
            raise InvariantError(f"LoRA ids {missing} are in a batch but not on the device")
        theirs, forward_batch.lora_ids = forward_batch.lora_ids, list(adapter_ids)
        try:
            self.inner.prepare_lora_batch(forward_batch)
        finally:
            forward_batch.lora_ids = theirs

    def reset(self) -> None:
        self.inner.reset_lora_batch()


class LoraMetrics:
    """One rank's LoRA slots, beside SGLang's own metrics at /metrics (with --enable-metrics)."""

    def __init__(self, rank: int, registry: CollectorRegistry | None = None) -> None:
        # SGLang names the folder that its processes share before it starts a rank, and
        # prometheus_client reads that name when it is imported.
        from prometheus_client import REGISTRY, Gauge

        self._on_device = Gauge(
            "sgl_esft:loras_on_device",
            "LoRA adapters that have a LoRA slot.",
            labelnames=("rank",),
            multiprocess_mode="mostrecent",
            registry=registry or REGISTRY,
        ).labels(str(rank))

    def set(self, num_on_device: int) -> None:
        """Publish how many there are now."""
        self._on_device.set(num_on_device)


class BothStores:
    """One rank's adapters of both kinds, as rank_command_handler.py sees them."""

    is_resident = False  # no adapter keeps its slot: LoRA is refused where they do

    def __init__(self, plane: AdapterPlane, lora: LoraStore) -> None:
        self._plane = plane
        self._lora = lora
        self.layers = plane.layers
        self.num_slots = plane.num_slots
        self.uses = plane.uses

    def read(
        self,
        source: AdapterSource,
        on_size: Callable[[int], None] = lambda num_bytes: None,
        on_read: OnRead = lambda num_bytes: None,
    ) -> HostAdapter | LoraAdapter:
        """By what the folder holds now. Raises one of the Adapter* errors."""
        is_lora = kind_of(Path(source.path)) == "lora"
        store: Any = self._lora if is_lora else self._plane
        found: HostAdapter | LoraAdapter = store.read(source, on_size, on_read)
        return found

    def load(self, source: AdapterSource) -> None:
        """Read and take in."""
        self.admit(source, self.read(source))

    def admit(self, source: AdapterSource, adapter: HostAdapter | LoraAdapter) -> None:
        """Take in what was read, all at once."""
        if isinstance(adapter, LoraAdapter):
            self._lora.begin(source, adapter)
        else:
            self._plane.admit(source, adapter)

    def begin(self, source: AdapterSource, adapter: HostAdapter | LoraAdapter) -> int:
        """Layers to be placed; LoRA's matrices go to the device with their first batch."""
        if isinstance(adapter, LoraAdapter):
            self._lora.begin(source, adapter)
            return 0
        return self._plane.begin(source, adapter)

    def place_next(self, adapter_id: str) -> int:
        return 0 if self._lora.is_loaded(adapter_id) else self._plane.place_next(adapter_id)

    def finish(self, adapter_id: str) -> None:
        if not self._lora.is_loaded(adapter_id):
            self._plane.finish(adapter_id)

    def stay_on_host(self, adapter_id: str) -> None:
        if not self._lora.is_loaded(adapter_id):
            self._plane.stay_on_host(adapter_id)

    def unload(self, adapter_id: str) -> None:
        self._of(adapter_id).unload(adapter_id)

    def set_pinned(self, adapter_id: str, pinned: bool) -> None:
        self._of(adapter_id).set_pinned(adapter_id, pinned)

    def is_loaded(self, adapter_id: str) -> bool:
        return self._of(adapter_id).is_loaded(adapter_id)

    def name_of(self, adapter_id: str) -> str | None:
        return self._of(adapter_id).name_of(adapter_id)

    @property
    def names(self) -> dict[str, str]:
        return {**self._plane.names, **self._lora.names}

    def placements(self) -> dict[str, tuple[int, int]]:
        return {**self._plane.placements(), **self._lora.placements()}

    def _of(self, adapter_id: str) -> AdapterPlane | LoraStore:
        return self._lora if self._lora.is_loaded(adapter_id) else self._plane


def read_lora(name: str, manifest: LoraManifest, on_read: OnRead) -> LoraAdapter:
    """Read a validated adapter's matrices, a few megabytes at a time.

    Parts of a layer that the adapter leaves alone are zeros. Raises AdapterNotFiniteError, and
    AdapterFormatError when a file changed or broke after it was validated.
    """
    tensors: dict[str, torch.Tensor] = {}
    for module in manifest.modules:
        for side in ("A", "B"):
            parts = [
                _read_part(name, manifest, module, place, side, on_read)
                for place in range(len(module.parts))
            ]
            dtype = next(part.dtype for part in parts if part is not None)
            whole = [
                _zeros(module, place, side, manifest.config.rank, dtype) if part is None else part
                for place, part in enumerate(parts)
            ]
            tensors[f"{module.path}.lora_{side}.weight"] = torch.cat(whole)
    return LoraAdapter(name, manifest, tensors)


def _read_part(
    name: str,
    manifest: LoraManifest,
    module: LoraModule,
    place: int,
    side: Side,
    on_read: OnRead,
) -> torch.Tensor | None:
    """One matrix; None where the adapter has none."""
    tensor = manifest.tensors.get((module, place, side))
    if tensor is None:
        return None
    raw = read_matrix(name, tensor, on_read)
    return torch.frombuffer(raw, dtype=getattr(torch, tensor.info.dtype)).view(tensor.info.shape)


def _zeros(
    module: LoraModule, place: int, side: Side, rank: int, dtype: torch.dtype
) -> torch.Tensor:
    rows, columns = (
        (rank, module.in_features) if side == "A" else (module.parts[place].out_features, rank)
    )
    return torch.zeros((rows, columns), dtype=dtype)
