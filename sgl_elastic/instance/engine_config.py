"""What an engine rank must know of the runtime around it, as its supervisor hands it down.

instance/process.py --ELASTIC_ENGINE--> [EngineConfig] --> engine/*
                    --[rank_environment]--> the supervisor's environment --SGLang--> ranks

Device d is the d-th that the front sees; its memory worker, which sees what the front sees, opens
it by that number. A supervisor sees the devices of its instance only, in the order of its ranks,
and SGLang shows each rank no other than its own. To the rank that is device 0, whose addresses
engine/memory.py reserves.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from sgl_elastic.errors import ElasticConfigError

VARIABLE = "ELASTIC_ENGINE"
SPARE = "ELASTIC_SPARE"  # "1": this process will be an engine's, and has no configuration yet
_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "acl": "ASCEND_RT_VISIBLE_DEVICES"}
_ONE_EACH = {"SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS": "1"}


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One instance, as its ranks see it. Rank r runs on `device_ids[r]`."""

    instance: str
    directory: str  # sockets of the runtime, mode 0700
    device_ids: tuple[int, ...]
    backend: str  # of sgl_vmm: host, cuda or acl
    page_bytes: int
    max_kv_tokens: int  # KV addresses of a rank, without the padding row
    num_sources: int = 1  # with redundant experts: ranks that tokens may come from, at most

    @property
    def front_socket(self) -> Path:
        """Where the instance manager listens for ranks."""
        return Path(self.directory) / "ranks.sock"

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> EngineConfig:
        """Raises ElasticConfigError if `text` is not what `to_json` writes."""
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise ElasticConfigError(f"{VARIABLE} is not an engine's: {error}") from error


def is_engine() -> bool:
    """Whether this process is, or will be, one of an elastic engine's."""
    return current() is not None or os.environ.get(SPARE) == "1"


@functools.cache
def current() -> EngineConfig | None:
    """This process's configuration; None outside the elastic runtime."""
    text = os.environ.get(VARIABLE)
    return None if not text else EngineConfig.from_json(text)


def required() -> EngineConfig:
    """As `current`, for code that only runs in an elastic engine. Raises ElasticConfigError."""
    config = current()
    if config is None:
        raise ElasticConfigError(f"{VARIABLE} is not set, but the elastic engine's code runs")
    return config


def rank_environment(
    backend: str, device_ids: Sequence[int], environment: Mapping[str, str]
) -> dict[str, str]:
    """What to set before SGLang is imported; nothing on a CPU, where devices are only numbers.

    `environment` is the front's. Raises ElasticConfigError for a device that it does not show.
    """
    name = _VISIBLE.get(backend)
    if name is None:
        return {}
    shown = environment.get(name)
    if shown is None:
        return {name: ",".join(map(str, device_ids)), **_ONE_EACH}
    names = [each.strip() for each in shown.split(",") if each.strip()]
    if max(device_ids) >= len(names):
        raise ElasticConfigError(
            f"device {max(device_ids)}, but {name}={shown} shows {len(names)}: name more there, or "
            "lower --max-devices"
        )
    return {name: ",".join(names[device_id] for device_id in device_ids), **_ONE_EACH}


def start_method(backend: str) -> str:
    """Of multiprocessing, for ranks.

    On a CPU a rank is a copy of its supervisor, which has imported all that it needs: it starts at
    once, and shares that memory. A process that uses an accelerator cannot go on in a copy, and
    SGLang may ask the accelerator for its abilities in the supervisor.
    """
    return "fork" if backend == "host" else "spawn"
