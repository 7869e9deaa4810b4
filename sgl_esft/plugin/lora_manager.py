"""EsftManager: the adapter plane in the place SGLang built for LoRA.

    SGLang scheduler / model runner --LoRA manager's calls--> [EsftManager] -> weave/plane.py
                                                                            -> batch_tags.py

SGLang carries a LoRA adapter through its whole stack: names, reference counts,
LRU, limits, scheduling, the prefix cache's key. This object has the face that
stack asks for, so all of it serves ESFT adapters. "lora" in a name here is
SGLang's word for "adapter".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sgl_esft.errors import EsftError, UnsupportedModelError
from sgl_esft.lifecycle.commands import decode, is_command, named, reply_table
from sgl_esft.lifecycle.rank_command_handler import ALONE, RankCommandHandler, RankGroup
from sgl_esft.weave.batch_tags import BASE, BatchTags, rows_of_source, tag_tokens
from sgl_esft.weave.heat import HeatSampler
from sgl_esft.weave.plane import AdapterPlane, AdapterSource

# (success, error message, loaded name -> path) -> SGLang's LoRAUpdateOutput
MakeResult = Callable[[bool, str, dict[str, str]], Any]
# local tags [n] -> tags of the whole DP gather, in the order of the gathered hidden states;
# PADDING where no rank has a token
GatherTags = Callable[[torch.Tensor, Any], torch.Tensor]


class StepWatcher(Protocol):
    """Who is told of each batch: experts in tiers, a recorder."""

    def begin(self, forward_batch: Any, adapter_slots: Sequence[int]) -> None:
        """A batch was tagged: the adapter slot of each request."""


@dataclass(frozen=True)
class LoraBackend:
    """What SGLang asks LoRA's kernels: whether a batch of the base alone has other graphs."""

    skip_inactive_dense_lora: bool = False
    skip_inactive_lora_batches: bool = False


class EsftManager:
    """What `ModelRunner.lora_manager` is when weaving is on."""

    lora_backend = LoraBackend()

    memory_pool = None  # SGLang reads LoRA pool metrics off it when there is one
    lora: Any = (
        None  # this rank's LoRA adapters (plugin/mixed_manager.py); None = the server has none
    )
    supports_prefill_cuda_graph = False

    def __init__(
        self,
        plane: AdapterPlane,
        tags: BatchTags,
        make_result: MakeResult,
        gather_tags: GatherTags | None,
        publish: Callable[[], None] | None = None,
        num_dp_ranks: int = 1,
        group: RankGroup = ALONE,
        heat: HeatSampler | None = None,
        num_sources: int = 1,
        tiers: Any = None,
    ) -> None:
        """gather_tags: given under DP attention, where tokens of `num_dp_ranks` meet in the MoE.

        num_sources: of the layers' expert maps; above 1 a tag says the token's rank as well.
        group: the ranks that get the same messages in the same order, this one among them.
        publish: called whenever other adapters are on the device than before, or were looked up.
        """
        self.plane = plane
        self.tags = tags
        self._make_result = make_result
        self._gather_tags = gather_tags
        self._publish = publish
        self._num_dp_ranks = num_dp_ranks
        self.store: Any = self._make_store()
        self._command_handler = RankCommandHandler(self.store, group)
        self._source = group.rank if num_sources > 1 else None
        self._num_sources = num_sources
        self.heat = heat  # None = experts are not counted
        self.tiers = tiers  # plugin/tiers.py; None = every expert is on the device
        self.watchers: tuple[StepWatcher, ...] = ()
        self._published = (-1, -1)  # changes and hits, when `publish` was called last

    def _make_store(self) -> Any:
        """What holds the adapters that are loaded."""
        return self.plane

    @property
    def attn_dp_enabled(self) -> bool:
        return self._gather_tags is not None

    # ---- loading ----

    def load_initial(self, refs: Iterable[Any]) -> None:
        """Load what the server was started with. Raises EsftError: do not start without it."""
        for ref in refs:
            self.store.load(_source_of(ref))
        self._publish_changes()

    def load_lora_adapter(self, lora_ref: Any) -> Any:
        """Load, pin or unpin what is loaded, or carry out a command (lifecycle/commands.py).

        A failure is reported to the caller by name and changes nothing.
        """
        if is_command(lora_ref.lora_path):
            command = decode(lora_ref.lora_path or "")
            return self._report(lambda: reply_table(command, self._command_handler.answer(command)))
        return self._report(lambda: self._command_handler.take_in(_source_of(lora_ref)))

    def unload_lora_adapter(self, lora_ref: Any) -> Any:
        return self._report(lambda: self.store.unload(lora_ref.lora_id))

    def load_lora_adapter_from_tensors(self, lora_ref: Any, *_: Any, **__: Any) -> Any:
        message = (
            "UnsupportedAdapterError: an ESFT adapter is loaded from a folder, not from tensors"
        )
        return self._make_result(False, message, self.store.names)

    def _report(self, action: Callable[[], dict[str, str] | None]) -> Any:
        """SGLang's answer: `action`'s own table of adapters, or if it has none what is loaded."""
        try:
            table = action()
        except EsftError as error:
            return self._make_result(False, named(error), self.store.names)
        self._publish_changes()
        return self._make_result(True, "", self.store.names if table is None else table)

    def _publish_changes(self) -> None:
        now = (self.plane.uses.num_changes, self.plane.uses.num_hits)
        if self._publish is not None and self._published != now:
            self._publish()
            self._published = now

    # ---- scheduling ----

    def has(self, adapter_id: str) -> bool:
        """Whether requests of this adapter can run here."""
        return self.plane.is_loaded(adapter_id)

    def name_of(self, adapter_id: str) -> str | None:
        """What requests call an adapter; None if it is not loaded here."""
        return self.plane.name_of(adapter_id)

    def validate_lora_batch(self, lora_ids: set[str | None]) -> bool:
        """Whether one batch may hold these adapters; the base (None) takes no slot."""
        return self.plane.can_run_together(_adapters(lora_ids))

    def fetch_new_loras(
        self, new_loras: set[str | None], running_loras: set[str | None] | None = None
    ) -> None:
        """Bring the adapters of the batch about to run onto the device."""
        self.plane.ensure_on_device(_adapters(new_loras | (running_loras or set())))
        self._publish_changes()

    # ---- forward ----

    def reset_lora_batch(self) -> None:
        self.tags.reset()

    def prepare_lora_batch(self, forward_batch: Any) -> None:
        """Tag the batch's tokens with their adapters' slots.

        Under DP attention SGLang calls this after padding, on every rank, idle
        ones included, because the tags are gathered as the hidden states will be.
        """
        slots = [BASE if i is None else self.plane.slot_of(i) for i in forward_batch.lora_ids or ()]
        local = tag_tokens(slots, _num_tokens_per_request(forward_batch, len(slots)))
        if self._source is not None:
            local = rows_of_source(local, self._source, self.plane.num_slots, self._num_sources)
        real_tokens: int | torch.Tensor = local.shape[0]
        if self._gather_tags is None:
            self.tags.set(local)
        else:
            gathered = self._gather_tags(local, forward_batch)
            self.tags.set(gathered.clamp(min=BASE))
            real_tokens = gathered >= BASE
        if self.heat is not None:
            self.heat.begin_step(real_tokens)
        for watcher in self.watchers:
            watcher.begin(forward_batch, slots)

    # ---- CUDA graphs ----

    def init_decode_cuda_graph_batch_info(
        self, max_bs_in_cuda_graph: int, num_tokens_per_req: int
    ) -> None:
        """SGLang is about to capture decode graphs; the tag buffer must not move afterwards.

        A graph reads the tags and the expert maps where they lie, so adapters may
        come and go between its replays.
        """
        self.tags.reserve(max_bs_in_cuda_graph * num_tokens_per_req * self._num_dp_ranks)

    def reset_routing_cache(self) -> None:
        """Nothing is kept from one forward pass to the next but the tags."""

    def can_use_prefill_cuda_graph(self, forward_batch: Any) -> bool:
        return False


def _source_of(ref: Any) -> AdapterSource:
    return AdapterSource(
        adapter_id=ref.lora_id,
        name=ref.lora_name or "",
        path=ref.lora_path or "",
        pinned=bool(ref.pinned),
    )


def _adapters(lora_ids: Iterable[str | None]) -> set[str]:
    return {lora_id for lora_id in lora_ids if lora_id is not None}


def _num_tokens_per_request(forward_batch: Any, num_requests: int) -> Sequence[int]:
    mode = forward_batch.forward_mode
    if mode.is_decode() or mode.is_idle():
        return [1] * num_requests
    if not mode.is_extend() or mode.is_target_verify():
        raise UnsupportedModelError(f"weaving does not support a forward pass of mode {mode.name}")
    return list(forward_batch.extend_seq_lens_cpu[:num_requests])
