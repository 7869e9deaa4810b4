"""What the launcher decided, as one frozen value that every process reads.

flags (launch_server) -> EsftConfig -> ESFT_CONFIG -> each SGLang process
"""

from __future__ import annotations

import functools
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args

from sgl_esft import env
from sgl_esft.errors import ConfigError

ExpertMemoryKind = Literal["virtual", "padded"]
# docs/batching.md: what more and fewer give. Who waits for an adapter's slot may be overtaken more
# often: each turn on a slot costs copies of a whole adapter.
DEFAULT_MAX_OVERTAKES = 2
DEFAULT_SLOT_OVERTAKES = 32
DEFAULT_HEAT_EVERY = 16
DEFAULT_QUANTISED_ADAPTERS_BYTES = 64 * 10**9
MAX_PAGE_BYTES = 2 << 20
MIN_PAGE_BYTES = 4 << 10

RerouteKind = Literal["fused", "router", "unfused"]
StoreBy = Literal["all", "adapter"]

EXPERT_MEMORY_KINDS: tuple[str, ...] = get_args(ExpertMemoryKind)
REROUTE_KINDS: tuple[str, ...] = get_args(RerouteKind)
STORE_BY: tuple[str, ...] = get_args(StoreBy)


DEFAULT_PREFETCH_DISTANCE = 3  # FineMoE section 6.1; docs/offload.md: what others give
DEFAULT_MAP_STORE_BYTES = 64 << 20


@dataclass(frozen=True)
class TierConfig:
    """Experts in tiers, as configured at launch (`--expert-cache`)."""

    num_rows: int  # experts of each layer that are on the device at a time, of each rank
    top_k: int  # experts that one token needs in a layer
    policy: str = "auto"
    read_threads: int | None = None  # that read at a time; None = measured at start
    loads_per_layer: float | None = None  # experts read while a layer is computed; None = measured
    prefetch_distance: int = DEFAULT_PREFETCH_DISTANCE  # layers
    map_store_bytes: int = DEFAULT_MAP_STORE_BYTES
    map_store_file: str | None = None  # kept across restarts
    store_by: StoreBy = "all"  # whose expert maps a request is compared with
    probe_file: str | None = None  # of `sgl-esft offload train`, for the policy `learned`
    pack_file: str | None = None  # of `sgl-esft pack`; None = the checkpoint's own files
    read_bytes_per_s: int | None = None  # at most; None = what the storage gives
    host_bytes: int = 0  # of experts between the checkpoint and a device, of each rank; 0 = none

    def __post_init__(self) -> None:
        if self.read_threads is not None:
            _check_at_least(1, "--expert-read-threads", self.read_threads)
        _check_at_least(0, "--expert-host-memory", self.host_bytes)
        _check_at_least(1, "--prefetch-distance", self.prefetch_distance)
        _check_at_least(1, "--expert-map-memory", self.map_store_bytes)
        if self.probe_file is not None and self.policy != "learned":
            raise ConfigError("--expert-probe is for --expert-policy learned: leave it out")
        _check_choice("--store-by", self.store_by, STORE_BY)
        if self.store_by != "all" and self.policy != "finemoe":
            raise ConfigError("--store-by is for --expert-policy finemoe: leave it out")
        if self.num_rows < self.top_k:
            raise ConfigError(
                f"--expert-cache: {self.num_rows} experts of a layer, and one token needs "
                f"{self.top_k}: give more memory"
            )
        if self.loads_per_layer is not None and not 0 <= self.loads_per_layer < float("inf"):
            raise ConfigError(f"--expert-loads-per-layer {self.loads_per_layer}: 0 or more")


@dataclass(frozen=True)
class RecordConfig:
    """A trace of the routing, as configured at launch (`--record-routing`)."""

    folder: str
    max_bytes: int


@dataclass(frozen=True)
class LoraLimits:
    """LoRA adapters beside ESFT ones, as configured at launch (`--enable-lora`)."""

    max_loras: int  # LoRA slots on the device: so many adapters can run in one batch
    max_rank: int
    targets: tuple[str, ...] | None = None  # projections; None = all that the model has

    def __post_init__(self) -> None:
        _check_at_least(1, "--max-loras", self.max_loras)
        _check_at_least(1, "--max-lora-rank", self.max_rank)
        if self.targets is not None:  # JSON has lists only
            object.__setattr__(self, "targets", tuple(self.targets))


@dataclass(frozen=True)
class EsftConfig:
    """Weaving, as configured at launch."""

    max_adapters: int  # N: adapter slots on the device
    max_experts_per_adapter: int  # E_max: slots reserved per adapter and layer
    expert_memory: ExpertMemoryKind = "virtual"
    expert_page_bytes: int | None = None  # on the host; None = by the experts' size
    adapter_memory_bytes: int | None = None  # pages for adapters, made at start; None = as needed
    adapter_host_bytes: int | None = None  # of all loaded adapters' experts; None = no limit
    quantised_adapters: str | None = None  # folder of adapters' quantised copies; None = default
    quantised_adapters_bytes: int = DEFAULT_QUANTISED_ADAPTERS_BYTES  # of all copies in it
    reroute: str = "fused"
    adapter_root: str | None = None  # adapters may only lie below; None = anywhere
    max_overtakes: int = DEFAULT_MAX_OVERTAKES  # B of adapter_batching; 0 = first come first served
    slot_overtakes: int = DEFAULT_SLOT_OVERTAKES  # the same of who waits for an adapter's slot
    heat_every: int = DEFAULT_HEAT_EVERY  # experts are counted in every so many steps; 0 = never
    tiers: TierConfig | None = None  # None = every expert is on the device
    record: RecordConfig | None = None  # None = the routing is not recorded
    lora: LoraLimits | None = None  # None = no LoRA adapters

    def __post_init__(self) -> None:
        _check_at_least(1, "--max-adapters", self.max_adapters)
        _check_at_least(1, "--max-experts-per-adapter", self.max_experts_per_adapter)
        _check_at_least(0, "--max-overtakes", self.max_overtakes)
        _check_at_least(0, "--heat-every", self.heat_every)
        if self.adapter_memory_bytes is not None:
            _check_at_least(1, "--adapter-memory", self.adapter_memory_bytes)
        if self.adapter_host_bytes is not None:
            _check_at_least(1, "--adapter-host-memory", self.adapter_host_bytes)
        _check_at_least(1, "--quantised-adapters-bytes", self.quantised_adapters_bytes)
        if self.expert_page_bytes is not None:
            _check_page_bytes(self.expert_page_bytes)
        _check_choice("--expert-memory", self.expert_memory, EXPERT_MEMORY_KINDS)
        if self.expert_memory == "padded" and (self.expert_page_bytes or self.adapter_memory_bytes):
            raise ConfigError(
                "--expert-page-size and --adapter-memory belong to --expert-memory virtual: "
                "padded memory has no pages"
            )
        _check_choice("--reroute", self.reroute, REROUTE_KINDS)
        if self.tiers is not None:
            self._check_tiers()
        if self.record is not None and self.reroute == "router":
            raise ConfigError("--reroute router knows no expert ids to record: use --reroute fused")

    def _check_tiers(self) -> None:
        if self.lora is not None:
            raise ConfigError(
                "--enable-lora and --expert-cache: LoRA beside experts in tiers was not shown; "
                "leave one of them out"
            )
        if self.reroute == "router":
            raise ConfigError("--reroute router and --expert-cache: use --reroute fused")
        if self.adapter_memory_bytes is not None or self.adapter_host_bytes is not None:
            raise ConfigError(
                "--adapter-memory and --adapter-host-memory bound copies of adapters, and with "
                "--expert-cache there are none: leave them out"
            )

    @property
    def adapter_files(self) -> tuple[str, ...]:
        """A folder with one of these holds an adapter that this server may load."""
        esft = ("expert_cfg.json",)
        return esft if self.lora is None else (*esft, "adapter_config.json")

    @property
    def adapter_root_path(self) -> Path | None:
        return None if self.adapter_root is None else Path(self.adapter_root)

    @property
    def quantised_adapters_path(self) -> Path:
        """Where adapters' quantised copies are kept over a quantised base."""
        if self.quantised_adapters is not None:
            return Path(self.quantised_adapters)
        return env.cache_home() / "sgl-esft" / "quantised-adapters"

    def export(self) -> None:
        """Hand the configuration to the processes SGLang will start."""
        os.environ[env.CONFIG] = json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises ConfigError if `text` is not what `export` writes."""
        try:
            fields: dict[str, Any] = dict(json.loads(text))
            tiers, record = fields.pop("tiers", None), fields.pop("record", None)
            lora = fields.pop("lora", None)
            return cls(
                **fields,
                tiers=None if tiers is None else TierConfig(**tiers),
                record=None if record is None else RecordConfig(**record),
                lora=None if lora is None else LoraLimits(**lora),
            )
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{env.CONFIG} is not a configuration: {error}") from error


@functools.cache
def current_config() -> EsftConfig | None:
    """This process's configuration; None when weaving is off."""
    text = env.config_json()
    return None if text is None else EsftConfig.from_json(text)


def required_config() -> EsftConfig:
    """As `current_config`, for code that only runs while weaving. Raises ConfigError."""
    config = current_config()
    if config is None:
        raise ConfigError(f"{env.CONFIG} is not set, but weaving code runs")
    return config


def _check_at_least(least: int, flag: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{flag} {value!r}: must be a whole number of at least {least}")


def _check_page_bytes(page_bytes: int) -> None:
    _check_at_least(1, "--expert-page-size", page_bytes)
    if page_bytes & (page_bytes - 1) or not MIN_PAGE_BYTES <= page_bytes <= MAX_PAGE_BYTES:
        raise ConfigError(
            f"--expert-page-size {page_bytes} bytes: must be a power of two from 4KiB to 2MiB"
        )


def _check_choice(flag: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{flag} {value!r}: choose one of {', '.join(choices)}")
