"""--record-routing: a rank's routing as a trace, for `sgl-esft offload simulate`.

    a batch is tagged --[Recorder.begin]--  a layer's top-k --[watch]-->  the last layer: one step
    adapters changed slots ---------------> one SlotChange before it    -> offload/trace.py

One rank of those that see the same tokens writes. Steps that replay a CUDA graph run no Python and
are not in the trace.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sgl_esft import sglang_api
from sgl_esft.config import RecordConfig
from sgl_esft.offload.routing import Floats, Ints
from sgl_esft.offload.trace import SlotChange, TraceHeader, TraceStep, TraceWriter
from sgl_esft.plugin.adapter_owners import AdapterOwners
from sgl_esft.plugin.decoded_tokens import EMBEDDING_SIZE, DecodedTokens, embedding_layer
from sgl_esft.weave.batch_tags import BatchTags
from sgl_esft.weave.moe_layer import WovenLayer
from sgl_esft.weave.plane import AdapterPlane

FLUSH_PERIOD_S = 1.0


def trace_folder(folder: str) -> Path:
    """Replicas of --dp-size see requests of their own: each but the first has a number behind."""
    rank = sglang_api.rank_in_server()
    return Path(folder) if rank == 0 else Path(f"{folder}.{rank}")


class Recorder:
    """Of one rank; `layers` in the order of the model."""

    def __init__(
        self,
        config: RecordConfig,
        plane: AdapterPlane,
        tags: BatchTags,
        decoded: DecodedTokens,
        model: torch.nn.Module,
        top_k: int,
    ) -> None:
        """Raises ConfigError for a folder that has something in it."""
        self._layers: list[WovenLayer] = list(plane.layers.values())
        first = self._layers[0]
        self._plane = plane
        self._tags = tags
        self._decoded = decoded
        self._num_experts = first.layout.num_routed
        header = TraceHeader(
            num_layers=len(self._layers),
            num_experts=first.expert_map.table.shape[1],
            top_k=top_k,
            num_slots=first.layout.num_slots,
            num_base=first.layout.num_base,
            embedding_size=EMBEDDING_SIZE,
        )
        self._writer = TraceWriter(trace_folder(config.folder), header, config.max_bytes)
        self._numbers = AdapterOwners(plane)
        self._owners: Mapping[int, str] = {}  # adapter slot -> adapter id, as last written
        self._num_changes = -1
        self._has_new = threading.Event()  # an idle server writes nothing, and is not woken for it
        self._begin_pass()
        embedding_layer(model).register_forward_hook(self._embedded)
        threading.Thread(target=self._flush, name="routing-trace", daemon=True).start()

    def _begin_pass(self) -> None:
        self._ids: list[Ints] = []
        self._probs: list[Floats] = []
        self._embeddings: Floats = np.zeros((0, EMBEDDING_SIZE), np.float32)

    def begin(self, forward_batch: Any, adapter_slots: Sequence[int]) -> None:
        """A batch was tagged; a pass that was not finished is left out."""
        self._decoded.begin(forward_batch, adapter_slots)
        self._begin_pass()
        if self._num_changes != self._plane.uses.num_changes:
            self._num_changes = self._plane.uses.num_changes
            self._writer.add(self._change())

    def _change(self) -> SlotChange:
        owners = {p.adapter_slot: p.source.adapter_id for p in self._plane.placed()}
        changed = [a for a, owner in self._owners.items() if owners.get(a) != owner]
        self._owners = owners
        forgotten = tuple(
            (index, slot)
            for index, layer in enumerate(self._layers)
            for adapter_slot in changed
            for slot in layer.layout.adapter_range(adapter_slot)
        )
        maps = [layer.expert_map.table.cpu().numpy() for layer in self._layers]
        return SlotChange(np.stack(maps).astype(np.int64), forgotten, self._numbers.numbers())

    def _embedded(self, _module: Any, _inputs: Any, output: torch.Tensor) -> None:
        if self._decoded.num_tokens:
            self._embeddings = self._decoded.embeddings(output)

    def watch(self, layer_id: int) -> Callable[[Any], None]:
        """What a layer calls with its top-k output, in expert ids (plugin/runner_core.py)."""

        def see(topk_output: Any) -> None:
            self._ids.append(topk_output.topk_ids.cpu().numpy().astype(np.int64))
            probs = self._decoded.probabilities(layer_id, topk_output)
            if probs is not None:
                self._probs.append(probs)
            if len(self._ids) == len(self._layers):
                self._finish()

        return see

    def _finish(self) -> None:
        ids = np.stack(self._ids)
        none = np.zeros((len(self._layers), 0, self._num_experts), np.float32)
        tokens = self._decoded.tokens
        slots = self._tags.token_adapter_slots(ids.shape[1]).cpu().numpy()
        self._writer.add(
            TraceStep(
                () if tokens is None else tokens.request_ids,
                slots.astype(np.int64),
                ids,
                np.stack(self._probs) if self._probs else none,
                self._embeddings,
            )
        )
        self._has_new.set()
        self._begin_pass()

    def _flush(self) -> None:
        """A rank is ended by a signal: what a trace lacks then is the last second's steps."""
        while True:
            self._has_new.wait()
            time.sleep(FLUSH_PERIOD_S)  # others come with it
            self._has_new.clear()
            self._writer.flush()
