"""Whether base, adapters and a little KV cache fit a device with a byte budget: asked of the files.

    LaunchPlan -> [check] -> nothing, or how much --device-memory has to be

Counted is no more than what a rank holds for sure, so that nothing is refused here that would have
served. What SGLang derives from weights while it loads is not counted; the rank's own books refuse
what that makes too large (platform/device_memory.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sgl_esft import env
from sgl_esft.byte_size import mebibytes, parse_bytes
from sgl_esft.config import EsftConfig
from sgl_esft.errors import DeviceMemoryError, UnsupportedModelError
from sgl_esft.formats.adapter_shapes import AdapterShape, read_adapter_shape
from sgl_esft.formats.model_spec import DTYPE_BYTES
from sgl_esft.memory.model_sizes import ModelSizes, read_model_sizes
from sgl_esft_launch.arguments import last_value
from sgl_esft_launch.plan import LaunchPlan
from sgl_esft_launch.tiers import ep_size_of

LEAST_KV_TOKENS = 256  # a rank with less cannot serve anything useful


@dataclass(frozen=True)
class Need:
    """Bytes of one rank's device."""

    base: int
    adapters: int
    kv: int
    extra: int  # not to be sure of: the remedy counts it, the check does not

    def smallest(self, fraction: float) -> int:
        """The smallest device of which `fraction` holds all of it."""
        return math.ceil((self.base + self.adapters + self.kv) / fraction)

    def check(self, budget: int, fraction: float = 1.0) -> None:
        """Raises DeviceMemoryError, with the smallest device that would do."""
        smallest = self.smallest(fraction)
        if budget >= smallest:
            return
        part = "" if fraction == 1 else f" in {fraction:g} of it"
        found = (
            f"the base model does not fit: its weights take {_mib(self.base)} of each device"
            if budget * fraction < self.base
            else f"the base model fits ({_mib(self.base)}), but not with adapters "
            f"({_mib(self.adapters)}) and {LEAST_KV_TOKENS} tokens of KV cache ({_mib(self.kv)})"
            f"{part}: name fewer of --esft-adapters, lower --max-adapters"
        )
        raise DeviceMemoryError(
            f"--device-memory {_mib(budget)}: {found}; the smallest that fits all is "
            f"--device-memory {mebibytes(smallest + math.ceil(self.extra / fraction))}"
        )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):,.2f}MiB"


def check(launch: LaunchPlan) -> None:
    """A launch without --elastic. Raises DeviceMemoryError."""
    budget = launch.device_environment.get(env.DEVICE_MEMORY)
    sizes = served_sizes(Path(launch.model_path), launch.sglang_argv)
    if budget is None or sizes is None:
        return
    fraction = float(last_value(launch.sglang_argv, "--mem-fraction-static") or 1)
    need_of(launch, sizes).check(parse_bytes(budget, "--device-memory"), fraction)


def served_sizes(path: Path, argv: Sequence[str]) -> ModelSizes | None:
    """The base in the dtype it will have; None where only SGLang can tell."""
    if not path.is_dir() or any(last_value(argv, f) for f in ("--config", "--quantization")):
        return None
    try:
        sizes = read_model_sizes(path)
    except UnsupportedModelError:  # --no-esft serves others too
        return None
    # SGLang makes float16 of float32 unless it is told not to.
    dtype = "float32" if last_value(argv, "--dtype") in ("float32", "float") else "bfloat16"
    old, new = DTYPE_BYTES[sizes.spec.dtype], DTYPE_BYTES[dtype]
    spec = replace(sizes.spec, dtype=dtype)
    trunk, derived = (n // old * new for n in (sizes.trunk_bytes, sizes.derived_bytes))
    scaled = replace(sizes, spec=spec, derived_bytes=derived)
    return replace(scaled, total_bytes=trunk + scaled.routed_bytes)


def kv_bytes(sizes: ModelSizes, argv: Sequence[str], tokens: int) -> int:
    """Of so many tokens on a rank."""
    dtype = last_value(argv, "--kv-cache-dtype") or "auto"
    return tokens * sizes.kv_bytes_per_token("fp8_e5m2" if dtype.startswith("fp") else None)


def need_of(launch: LaunchPlan, sizes: ModelSizes) -> Need:
    """Of one rank."""
    argv = launch.sglang_argv
    ranks = int(last_value(argv, "--tp-size") or 1) * int(last_value(argv, "--pp-size") or 1)
    given = last_value(argv, "--max-total-tokens")
    tokens = min(LEAST_KV_TOKENS, int(given)) if given else LEAST_KV_TOKENS
    kv = kv_bytes(sizes, argv, tokens) // ranks
    derived = sizes.derived_bytes // ranks
    if launch.config is None:
        return Need(sizes.total_bytes // ranks + derived, 0, kv, sizes.rotary_bytes)
    shapes = [read_adapter_shape(path, sizes.spec) for path in launch.adapters.values()]
    experts, adapters = _experts(
        sizes, launch.config, shapes[: launch.config.max_adapters], ranks, ep_size_of(argv)
    )
    trunk = sizes.trunk_bytes // ranks + derived
    return Need(trunk + experts, adapters, kv, sizes.rotary_bytes)


def _experts(
    sizes: ModelSizes,
    config: EsftConfig,
    shapes: Sequence[AdapterShape],
    ranks: int,
    ep_size: int,
) -> tuple[int, int]:
    """Bytes of base experts and of adapters' experts; in whole pages where one rank has all."""
    spec, slots = sizes.spec, min(config.max_experts_per_adapter, sizes.spec.num_experts)
    all_slots = config.max_adapters * slots * len(spec.moe_layer_ids) * spec.expert_bytes
    if config.tiers is not None:  # rows are each rank's own, and adapters are in them
        shard_bytes = spec.expert_bytes // max(1, ranks // ep_size)
        return config.tiers.num_rows * len(spec.moe_layer_ids) * shard_bytes, 0
    if config.expert_memory == "padded":
        return sizes.routed_bytes // ranks, all_slots // ranks
    base, used = sizes.routed_bytes // ranks, _used(sizes, shapes) // ranks
    if ranks == 1:
        from sgl_esft.memory.plan import expert_usage  # needs the extension module
        from sgl_esft.weave.expert_memory import choose_page_bytes

        page_bytes = config.expert_page_bytes or choose_page_bytes(sizes.slot_bytes)
        base = expert_usage(sizes, (), slots, page_bytes).mapped_bytes
        used = expert_usage(sizes, shapes, slots, page_bytes).mapped_bytes - base
    if config.adapter_memory_bytes is not None:
        return base, config.adapter_memory_bytes
    return base, used if shapes else all_slots // ranks


def _used(sizes: ModelSizes, shapes: Sequence[AdapterShape]) -> int:
    return sum(shape.num_experts for shape in shapes) * sizes.spec.expert_bytes
