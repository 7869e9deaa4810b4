"""An adapter's files as experts are read from them: in the base's own scheme.

    validated manifest --[find_stored]--> StoredAdapter -> source.py (places)
      stored as the base is: its own files
      unquantised, over a quantised base: its copy (quant/adapter_cache.py), made if it is not there

A row takes an expert's numbers and scales as they lie on disk, so an adapter that would have to be
quantised while a layer waits has its copy made before it is known to anybody.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from sgl_esft.formats.manifest import AdapterManifest, content_digest
from sgl_esft.formats.model_spec import MoeSpec
from sgl_esft.offload.source import ExpertPlace, ExpertSource
from sgl_esft.quant.adapter_cache import bytes_to_quantise, quantised_copy
from sgl_esft.quant.adapter_copy import OnRead
from sgl_esft.weave.moe_layer import ExpertShard


@dataclass(frozen=True)
class Copies:
    """Where adapters' quantised copies are kept, and what all of them may take."""

    folder: Path
    max_bytes: int | None


@dataclass(frozen=True, eq=False)
class StoredAdapter:
    """What `ExpertSource.register` takes. A quantised copy stays on disk while this is held.

    `manifest`: its `path` is the adapter's own folder, its tensors may lie in another.
    """

    manifest: AdapterManifest


def find_stored(
    manifest: AdapterManifest,
    spec: MoeSpec,
    copies: Copies,
    on_size: Callable[[int], None] = lambda num_bytes: None,
    on_read: OnRead = lambda num_bytes: None,
) -> StoredAdapter:
    """The adapter itself, or its copy. Where there is one to find or to make, all of it is read.

    on_size is told the bytes that on_read will be told of. Raises as `quantised_copy` does.
    """
    if manifest.scheme == spec.scheme:
        on_size(0)
        return StoredAdapter(manifest)
    digest = content_digest(manifest.path, lambda: on_read(0))
    on_size(bytes_to_quantise(manifest, spec, digest, copies.folder))
    lease = ExitStack()
    copy = lease.enter_context(
        quantised_copy(manifest, spec, digest, copies.folder, on_read, max_bytes=copies.max_bytes)
    )
    stored = StoredAdapter(copy)
    # The lease is a lock of the copy's own, which ends with its process too.
    weakref.finalize(stored, lease.close).atexit = False
    return stored


def register(
    source: ExpertSource, owner: str, stored: StoredAdapter, shards: Mapping[int, ExpertShard]
) -> Mapping[int, Mapping[int, ExpertPlace]]:
    """Layer id -> expert id -> place, of a rank's experts: `shards` by layer id.

    Raises AdapterFormatError when the files are not what was validated; nothing is known then.
    """
    source.register(owner, stored.manifest)
    return {
        layer_id: {
            expert_id: source.place(owner, layer_id, expert_id)
            for expert_id in expert_ids
            if expert_id in shards[layer_id].expert_ids
        }
        for layer_id, expert_ids in stored.manifest.experts.items()
    }
