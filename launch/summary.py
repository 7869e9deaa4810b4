"""What a person needs of a server that is ready: model, adapters, memory, address, a request.

LaunchPlan, tokens of KV cache -> [lines]
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from sgl_esft import zoo
from sgl_esft.byte_size import gigabytes
from sgl_esft.config import LoraLimits, TierConfig
from sgl_esft.errors import EsftError
from sgl_esft.memory.model_sizes import read_model_sizes
from sgl_esft_launch.plan import LaunchPlan

_NAMES_SHOWN = 8


def lines(launch: LaunchPlan, kv_tokens: int | None, devices: str = "") -> Iterator[str]:
    """A handful, each with its word in front. `devices`: of an elastic server."""
    url = f"http://{launch.host}:{launch.port}"
    yield f"model     {launch.model_path}{' (the demo)' if is_demo(launch) else ''}"
    yield f"adapters  {_adapters(launch)}"
    yield f"memory    {_memory(launch, kv_tokens)}"
    if launch.config is not None and launch.config.tiers is not None:
        yield f"experts   {_tiers(launch.config.tiers)}"
    if devices:
        yield f"devices   {devices}"
    yield f"address   {url}  (in a browser: {url}/dashboard)"
    yield f"try       {_request(launch, url)}"


def is_demo(launch: LaunchPlan) -> bool:
    """Whether the base is the demo's."""
    return launch.model_path == str(zoo.base_path())


def _adapters(launch: LaunchPlan) -> str:
    if launch.config is None:
        return "none: weaving is off"
    names = list(launch.all_adapters)
    shown = ", ".join(names[:_NAMES_SHOWN]) or "none yet"
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return (
        f"{shown}{more}; {launch.config.max_adapters} slots of "
        f"{launch.config.max_experts_per_adapter} experts a layer{_lora(launch.config.lora)}"
    )


def _lora(limits: LoraLimits | None) -> str:
    return "" if limits is None else f", {limits.max_loras} LoRA slots of rank {limits.max_rank}"


def _memory(launch: LaunchPlan, kv_tokens: int | None) -> str:
    found = [] if kv_tokens is None else [f"{kv_tokens:,} tokens of KV cache a rank"]
    try:
        size = read_model_sizes(Path(launch.model_path)).total_bytes
        found.insert(0, f"base {gigabytes(size)}")
    except EsftError:  # not a folder, or not a model that we can count
        pass
    return ", ".join([*found, *(["sgl-esft memory shows all of it"] if launch.config else [])])


def _tiers(tiers: TierConfig) -> str:
    return (
        f"{tiers.num_rows} of each layer in memory at a time, the others are read when they are "
        f"needed; policy {tiers.policy}"
    )


def _request(launch: LaunchPlan, url: str) -> str:
    body: dict[str, object] = {"text": "Hello", "sampling_params": {"max_new_tokens": 16}}
    if is_demo(launch):
        body = {"text": "coffee -> ", "sampling_params": {"temperature": 0, "stop": "\n"}}
    if launch.all_adapters:
        body["adapter"] = next(iter(launch.all_adapters))
    headers = "-H 'Content-Type: application/json'"
    if launch.access.policy.keys:
        headers += ' -H "Authorization: Bearer $KEY"'
    return f"curl {url}/generate {headers} -d '{json.dumps(body)}'"
