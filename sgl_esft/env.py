"""Every environment variable this package reads, each with its meaning and default.

| variable | values | default | meaning |
|---|---|---|---|
| ESFT_CONFIG | JSON of `EsftConfig` | unset | set by the launcher; unset = weaving off |
| ESFT_PLATFORM | auto, cpu, native | auto | whether the CPU reference platform takes over |
| ESFT_DEVICE_MEMORY | a size, such as 512MiB | unset | of each of the CPU platform's devices |
| ESFT_HEARTBEAT_TABLE | a file | unset | set by the launcher: where ranks show that they turn |
| ESFT_LOAD_FILE | a file | unset | set by the launcher: where ranks write their load |
| ESFT_DEVICE_LEDGER | a file | unset | where servers that share devices write what they use |
| ESFT_LOG_FORMAT | text, json | text | set by the launcher, from --log-format |
| ESFT_QUIET | 1 | unset | set by the launcher: notices of every start are left out |
| XDG_CACHE_HOME | a folder | ~/.cache | below it adapters' quantised copies are kept |
| ESFT_KEY | a server's admin key | unset | shown to it by `sgl-esft memory` and `adapters` |

A value outside its set is a `ConfigError`, not a default.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, get_args

from sgl_esft.byte_size import parse_bytes
from sgl_esft.errors import ConfigError

CONFIG = "ESFT_CONFIG"
PLATFORM = "ESFT_PLATFORM"
DEVICE_MEMORY = "ESFT_DEVICE_MEMORY"
DEVICE_LEDGER = "ESFT_DEVICE_LEDGER"
LOG_FORMAT = "ESFT_LOG_FORMAT"
LogFormat = Literal["text", "json"]
QUIET = "ESFT_QUIET"
KEY = "ESFT_KEY"
CACHE_HOME = "XDG_CACHE_HOME"
HEARTBEAT_TABLE = "ESFT_HEARTBEAT_TABLE"
LOAD_FILE = "ESFT_LOAD_FILE"
_PLATFORMS = ("auto", "cpu", "native")


def config_json() -> str | None:
    """The launcher's configuration as JSON, or None when weaving is off."""
    return os.environ.get(CONFIG) or None


def platform() -> str:
    """auto, cpu or native. Raises ConfigError for anything else."""
    value = os.environ.get(PLATFORM, "auto")
    if value not in _PLATFORMS:
        raise ConfigError(f"{PLATFORM}={value!r}: set one of {', '.join(_PLATFORMS)}")
    return value


def device_memory() -> int | None:
    """Bytes of each of the CPU platform's devices; None = not bounded. Raises ConfigError."""
    text = os.environ.get(DEVICE_MEMORY)
    return parse_bytes(text, DEVICE_MEMORY) if text else None


def device_ledger() -> Path | None:
    """The file in which servers share devices; None = each has devices of its own."""
    text = os.environ.get(DEVICE_LEDGER)
    return Path(text) if text else None


def log_format() -> str:
    """text or json. Raises ConfigError for anything else."""
    value = os.environ.get(LOG_FORMAT) or "text"
    if value not in get_args(LogFormat):
        raise ConfigError(f"{LOG_FORMAT}={value!r}: set one of {', '.join(get_args(LogFormat))}")
    return value


def is_quiet() -> bool:
    """Whether what third parties say at every start is left out (observe/console.py)."""
    return os.environ.get(QUIET) == "1"


def key() -> str | None:
    """The key that the command line tools show to a server; None = they show none."""
    return os.environ.get(KEY) or None


def cache_home() -> Path:
    """Where this user's programs keep what they can make anew; relative values count as unset."""
    text = os.environ.get(CACHE_HOME, "")
    return Path(text) if text.startswith("/") else Path.home() / ".cache"


def heartbeat_table() -> Path | None:
    """Where loops of this server write that they turn; None outside our launcher."""
    text = os.environ.get(HEARTBEAT_TABLE)
    return Path(text) if text else None


def load_file() -> Path | None:
    """Where ranks of this server write their load; None outside our launcher."""
    text = os.environ.get(LOAD_FILE)
    return Path(text) if text else None
