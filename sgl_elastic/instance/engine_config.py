"""What an engine rank must know of the runtime around it, as its supervisor hands it down.

instance/process.py --ELASTIC_ENGINE--> [EngineConfig] --> engine/*
"""

from __future__ import annotations

import functools
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sgl_elastic.errors import ElasticConfigError

VARIABLE = "ELASTIC_ENGINE"


@dataclass(frozen=True)
class EngineConfig:
    """One instance, as its ranks see it. Rank r runs on `device_ids[r]`."""

    instance: str
    directory: str  # sockets of the runtime, mode 0700
    device_ids: tuple[int, ...]
    backend: str  # of sgl_vmm: host, cuda or acl
    page_bytes: int
    max_kv_tokens: int  # KV addresses of a rank, without the padding row

    @property
    def front_socket(self) -> Path:
        """Where the instance manager listens for ranks."""
        return Path(self.directory) / "ranks.sock"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> EngineConfig:
        """Raises ElasticConfigError if `text` is not what `to_json` writes."""
        try:
            fields: dict[str, Any] = json.loads(text)
            return cls(**{**fields, "device_ids": tuple(fields["device_ids"])})
        except (KeyError, TypeError, ValueError) as error:
            raise ElasticConfigError(f"{VARIABLE} is not an engine's: {error}") from error


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
