"""Experts in tiers, put together for one rank of SGLang.

woven layers, TierConfig -> [build_tiers] -> Tiers: what brings experts (offload/tier.py)
a batch is tagged --[Tiers.begin]--> tokens to predict for
a woven layer's dispatch --[Tiers.inner]--> experts, computed as they arrive
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sgl_esft import sglang_api
from sgl_esft.config import EsftConfig, TierConfig
from sgl_esft.errors import ConfigError
from sgl_esft.formats.manifest import AdapterManifest
from sgl_esft.formats.model_spec import MoeSpec
from sgl_esft.memory.report import ExpertTiers
from sgl_esft.observe.expert_tier_metrics import ExpertTierMetrics, ExpertTierTotals
from sgl_esft.offload import stored_adapter
from sgl_esft.offload.ahead import Ahead
from sgl_esft.offload.decisions import Decisions
from sgl_esft.offload.device_rows import DeviceRows
from sgl_esft.offload.host_tier import HostCounts
from sgl_esft.offload.link import (
    DEVICE_READ_THREADS,
    THREAD_COUNTS,
    Link,
    make_loader,
    measured_link,
)
from sgl_esft.offload.loader import Loader, LoadJob, num_readers
from sgl_esft.offload.policies import AUTO, ExpertPolicy, auto_policy, policy_of
from sgl_esft.offload.predictors.moments import num_bytes_of
from sgl_esft.offload.predictors.predictor import Predictor
from sgl_esft.offload.reader import ExpertReader
from sgl_esft.offload.routing import Floats, Ints, StepTokens, owners_of
from sgl_esft.offload.source import ExpertPlace, ExpertSource
from sgl_esft.offload.stored_adapter import Copies, StoredAdapter, find_stored
from sgl_esft.offload.tier import ExpertTier, LoadRow, TierLayer
from sgl_esft.offload.tiered_layer import TieredLayer
from sgl_esft.platform import moe
from sgl_esft.platform.quantised_moe import experts_in, experts_of
from sgl_esft.plugin import runner_core
from sgl_esft.plugin.adapter_owners import AdapterOwners
from sgl_esft.plugin.decoded_tokens import (
    DecodedTokens,
    embedding_layer,
    find_embedding_layer,
)
from sgl_esft.plugin.tier_predictors import make_predictor
from sgl_esft.plugin.tier_waves import GraphBreak, WaveCore, rows_on_device
from sgl_esft.quant.adapter_copy import OnRead
from sgl_esft.weave.moe_layer import ExpertShard, WovenLayer

logger = logging.getLogger(__name__)


@dataclass
class Tiers:
    """What the manager and the layers of a rank ask."""

    tier: ExpertTier
    source: ExpertSource
    reader: ExpertReader
    index_of: Mapping[int, int]  # layer id -> number among the MoE layers
    decoded: DecodedTokens | None  # None = nothing is predicted
    copies: Copies  # of adapters that are quantised for the base
    device_rows: DeviceRows | None = None  # None = rows are host memory
    when_done: list[Callable[[], None]] = field(default_factory=list)  # after each forward pass
    owners: AdapterOwners | None = None  # None = nobody asks
    num_tokens: int | None = None  # of the batch at hand, without padding; None = it has none

    @property
    def failure(self) -> str | None:
        """Why tokens of the forward pass at hand have no answer; None = they have."""
        return self.tier.failure

    def report(self) -> ExpertTiers:
        """For GET /v1/memory."""
        counts, reads = self.tier.totals(), self.reader.counts
        return ExpertTiers(
            policy=self.tier.decisions.policy.name,
            num_rows=self.tier.decisions.num_rows,
            num_requests=counts.num_asked,
            num_hits=counts.num_hits,
            num_loads=counts.num_loads,
            num_prefetches=counts.num_prefetches,
            num_useful=counts.num_useful,
            num_wasted=counts.num_wasted,
            num_failed=self.tier.times.num_failed,
            read_bytes=reads.num_bytes,
            stall_s=self.tier.times.stall_s,
            max_bytes_per_s=self.reader.max_bytes_per_s,
        )

    # ---- AdapterFiles, for weave/plane.py ----

    def prepare(
        self, manifest: AdapterManifest, on_size: Callable[[int], None], on_read: OnRead
    ) -> StoredAdapter:
        """In the base's scheme. Raises as `quantised_copy` does."""
        return find_stored(manifest, self.source.spec, self.copies, on_size, on_read)

    def register(
        self, adapter_id: str, stored: StoredAdapter, shards: Mapping[int, ExpertShard]
    ) -> Mapping[int, Mapping[int, ExpertPlace]]:
        """Raises AdapterFormatError when the files are not what was validated."""
        return stored_adapter.register(self.source, adapter_id, stored, shards)

    def forget(self, adapter_id: str) -> None:
        self.source.forget(adapter_id)

    # ---- forward ----

    def begin(self, forward_batch: Any, adapter_slots: Sequence[int]) -> None:
        """A batch was tagged."""
        is_one_each = forward_batch.forward_mode.is_decode() and not sglang_api.is_dp_attention()
        self.num_tokens = len(adapter_slots) if is_one_each else None
        if self.decoded is not None:
            self.decoded.begin(forward_batch, adapter_slots)
        self.tier.begin(self._tokens())

    def _tokens(self) -> StepTokens | None:
        """Those to predict for, and whose they are where that is asked."""
        tokens = None if self.decoded is None else self.decoded.tokens
        if tokens is None or self.owners is None:
            return tokens
        return replace(tokens, owners=owners_of(tokens.adapter_slots, self.owners.numbers()))

    def embedded(self, _module: Any, _inputs: Any, output: torch.Tensor) -> None:
        """A forward hook of the model's embedding layer."""
        self._embedded(output)

    @sglang_api.graph_break
    def _embedded(self, output: torch.Tensor) -> None:
        if self.decoded is not None and self.decoded.num_tokens:
            is_wanted = self.tier.wants_embeddings
            self.tier.embedded(self.decoded.embeddings(output) if is_wanted else None)

    def inner(self, module: Any) -> Callable[[Any, Any], Any]:
        """What runs a FusedMoE's experts (plugin/runner_core.py)."""
        layer_id = int(module.layer_id)
        index = self.index_of[layer_id]
        if self.device_rows is None:
            run = self._on_host(index, layer_id)
        else:
            core = runner_core.inner_core(module, module.esft_layout)
            seen = partial(self._seen, layer_id)
            rows, num_tokens = self.device_rows, lambda: self.num_tokens
            run = WaveCore(self.tier, index, rows, core, seen, num_tokens)
        if index == len(self.index_of) - 1:
            run = partial(self._last, run)
        return run if self.device_rows is None else GraphBreak(run)

    def _on_host(self, index: int, layer_id: int) -> Callable[[Any, Any], Any]:
        """An expert at a time, as they arrive."""

        def run(dispatch_output: Any, weights: Any) -> Any:
            topk = dispatch_output.topk_output
            probs, hidden = self._seen(layer_id, dispatch_output)
            output = moe.weighted_sum(
                dispatch_output.hidden_states,
                experts_of(weights),
                topk.topk_weights,
                topk.topk_ids,
                partial(self.tier.arrivals, index, probs=probs, hidden=hidden),
            )
            return sglang_api.make_combine_input(hidden_states=output)

        return run

    def _last(self, run: Callable[[Any, Any], Any], dispatch_output: Any, weights: Any) -> Any:
        """The last layer's, and the pass is over."""
        found = run(dispatch_output, weights)
        for call in self.when_done:
            call()
        return found

    def _seen(self, layer_id: int, dispatch_output: Any) -> tuple[Floats | None, Floats | None]:
        """What looks ahead by a layer: probabilities, hidden states."""
        if self.decoded is None:
            return None, None
        probs = self.decoded.probabilities(layer_id, dispatch_output.topk_output)
        return probs, self._hidden(dispatch_output.hidden_states)

    def _hidden(self, hidden_states: torch.Tensor) -> Floats | None:
        if self.decoded is None or not self.tier.wants_hidden:
            return None
        return self.decoded.hidden(hidden_states)


def build_tiers(
    model: torch.nn.Module,
    layers: Mapping[int, WovenLayer],
    spec: MoeSpec,
    config: EsftConfig,
    model_path: str,
) -> Tiers:
    """Where experts lie, threads that read them, and who decides.

    Raises ConfigError, UnsupportedModelError.
    """
    assert config.tiers is not None
    tiered = [layer for layer in layers.values() if isinstance(layer, TieredLayer)]
    first = tiered[0]
    _check_dtype(first.w13, spec)
    packed = config.tiers.pack_file
    source = ExpertSource(Path(model_path), None if packed is None else Path(packed))
    reader = ExpertReader(
        first.shard.intermediate,
        first.is_up_first,
        first.w13.dtype,
        max_bytes_per_s=config.tiers.read_bytes_per_s,
    )
    link = _link(first, source, reader, config.tiers)
    decisions = _decisions(model, tiered, source, link, config.tiers)
    predictor = make_predictor(decisions.policy, config.tiers, spec, model, Path(model_path))
    device_rows = _device_rows(first, reader, link, config.tiers)
    load = _load_of(reader, device_rows)
    tier = _tier(tiered, decisions, predictor, partial(make_loader, reader, link.num_threads), load)
    for index, layer in enumerate(tiered):
        layer.join(tier, index, _base_places(layer, source))
    tiers = Tiers(
        tier,
        source,
        reader,
        {layer.layer_id: index for index, layer in enumerate(tiered)},
        None if predictor is None else DecodedTokens(model, spec.hidden_size),
        Copies(config.quantised_adapters_path, config.quantised_adapters_bytes),
        device_rows,
    )
    if sglang_api.has_metrics():
        tiers.when_done.append(_publisher(tiers, looks=predictor is not None))
    if predictor is not None:
        embedding_layer(model).register_forward_hook(tiers.embedded)
    source.drop_page_cache()
    return tiers


def _link(
    layer: TieredLayer, source: ExpertSource, reader: ExpertReader, config: TierConfig
) -> Link:
    """By reading some of the base's experts into rows, where those are host memory."""
    if layer.w13.device.type != "cpu":
        return Link(config.read_threads or DEVICE_READ_THREADS, None)
    num_threads = config.read_threads
    if num_threads is not None and config.loads_per_layer is not None and config.policy != AUTO:
        return Link(num_threads, None)  # nobody asks

    def read(job: LoadJob) -> None:
        reader.read(job.place, *layer.at(job.row).tensors)

    places = list(_base_places(layer, source).values())
    num_rows = layer.w13.shape[0]
    counts = [n for n in THREAD_COUNTS if n <= num_rows] if num_threads is None else [num_threads]
    return measured_link(read, places, num_rows, counts)


def _decisions(
    model: torch.nn.Module,
    tiered: Sequence[TieredLayer],
    source: ExpertSource,
    link: Link,
    config: TierConfig,
) -> Decisions:
    first = tiered[0]
    loads_per_layer = config.loads_per_layer
    if loads_per_layer is None:
        if link.load_s is None:
            raise ConfigError("--expert-cache on an accelerator: give --expert-loads-per-layer too")
        per_experts = _compute_seconds(first, source.spec, config.top_k) / link.load_s
        rest = _rest_bytes(model, len(tiered)) / (config.top_k * first.slot_bytes)
        loads_per_layer = per_experts * (1 + rest)
    policy = _policy(config, source.spec, loads_per_layer, link.load_s)
    logger.info(
        "experts in tiers: %s, %.2f loads a layer, read %d at a time",
        policy.name,
        loads_per_layer,
        link.num_threads,
    )
    return Decisions(
        len(tiered),
        first.layout.num_slots,
        first.w13.shape[0],
        policy,
        num_base=first.layout.num_base,
        loads_per_layer=loads_per_layer,
    )


def _tier(
    tiered: Sequence[TieredLayer],
    decisions: Decisions,
    predictor: Predictor | None,
    make_loader: Callable[[Callable[[LoadJob], None]], Loader],
    load: LoadRow,
) -> ExpertTier:
    looks = predictor is not None or decisions.policy.streams
    ahead = Ahead(decisions, predictor, partial(_slots_of, tiered)) if looks else None
    rows = [TierLayer(each.layer_id, each.w13, each.w2, scales=each.scales) for each in tiered]
    return ExpertTier(rows, decisions, make_loader, load, ahead)


def _device_rows(
    layer: TieredLayer, reader: ExpertReader, link: Link, config: TierConfig
) -> DeviceRows | None:
    """None where rows are host memory: experts are read straight into them."""
    if layer.w13.device.type == "cpu":
        return None
    rows = (layer.w13, layer.w2, *(layer.scales or ()))
    return rows_on_device(rows, reader.read, config.host_bytes, num_readers(link.num_threads))


def _load_of(reader: ExpertReader, device_rows: DeviceRows | None) -> LoadRow:
    if device_rows is not None:
        return device_rows.load
    return lambda job, *rows: reader.read(job.place, *rows)


def _publisher(tiers: Tiers, *, looks: bool) -> Callable[[], None]:
    """looks: something is predicted, whose recall is to be told."""
    metrics = ExpertTierMetrics(sglang_api.tp_rank())
    tier, reader, rows = tiers.tier, tiers.reader, tiers.device_rows
    layer_ids = [layer.layer_id for layer in tier.layers]

    def publish() -> None:
        host = HostCounts() if rows is None else rows.host_counts
        metrics.set(ExpertTierTotals.of(tier.totals(), tier.times, reader.counts, host))
        if looks:
            metrics.set_recall(tier.decisions.recall, layer_ids)

    return publish


def _check_dtype(w13: torch.Tensor, spec: MoeSpec) -> None:
    """Numbers of quantised experts are the checkpoint's whatever the server computes in."""
    served = str(w13.dtype).removeprefix("torch.")
    if spec.scheme is None and served != spec.dtype:
        raise ConfigError(
            f"--expert-cache: experts are read as the checkpoint has them, in {spec.dtype}, and "
            f"this server computes in {served}: use --dtype {spec.dtype}"
        )


def _policy(
    config: TierConfig, spec: MoeSpec, loads_per_layer: float, load_s: float | None
) -> ExpertPolicy:
    if config.policy == AUTO:
        num_bytes = num_bytes_of(len(spec.moe_layer_ids), spec.num_experts)
        has_room = num_bytes <= config.map_store_bytes
        can_predict = has_room and not sglang_api.is_dp_attention()
        return auto_policy(loads_per_layer, can_predict=can_predict, load_s=load_s)
    policy = policy_of(config.policy)
    if policy.predictor is not None and sglang_api.is_dp_attention():
        raise ConfigError(
            f"--expert-policy {policy.name}: under DP attention a rank does not know the requests "
            "of the others' tokens, so nothing is predicted: use lfu, lru, static, stream or auto"
        )
    return policy


def _slots_of(
    layers: Sequence[TieredLayer], layer: int, adapter_slot: int, expert_ids: Ints
) -> Ints:
    """By the layer's expert map, whose last row is the base's."""
    found: Ints = layers[layer].expert_map.table[adapter_slot].numpy()[expert_ids].astype(np.int64)
    return found


def _base_places(layer: TieredLayer, source: ExpertSource) -> dict[int, ExpertPlace]:
    """By slot: this rank's part of the base, in the order of its expert ids."""
    ids = sorted(layer.shard.expert_ids)
    return {slot: source.place(None, layer.layer_id, e) for slot, e in enumerate(ids)}


def _rest_bytes(model: torch.nn.Module, num_layers: int) -> int:
    """Of weights that a token passes besides routed experts, for each MoE layer.

    At batch 1 a weight's time is that of reading it once, so bytes say how long the rest of a layer
    takes where its experts' time is known. An embedding is one row of its table.
    """
    embedding = getattr(find_embedding_layer(model), "weight", None)
    experts = {id(w) for m in model.modules() if hasattr(m, "esft_layout") for w in m.parameters()}
    rest = [w.nbytes for w in model.parameters() if w is not embedding and id(w) not in experts]
    return sum(rest) // num_layers


def _compute_seconds(layer: TieredLayer, spec: MoeSpec, top_k: int) -> float:
    """Of one token's experts; the second time, so that nothing is touched first."""
    experts = experts_in((layer.w13, layer.w2, *(layer.scales or ())))
    hidden = torch.zeros((1, layer.w13.shape[2]), dtype=getattr(torch, spec.dtype))
    ids = torch.arange(top_k, dtype=torch.int32).remainder(layer.w13.shape[0]).view(1, -1)
    weights = torch.ones((1, top_k), dtype=torch.float32)
    for _ in range(2):
        began = time.perf_counter()
        moe.weighted_sum(hidden, experts, weights, ids)
        seconds = time.perf_counter() - began
    return seconds
