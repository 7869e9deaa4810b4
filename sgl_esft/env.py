"""Every environment variable this package reads, each with its meaning and default.

| variable | values | default | meaning |
|---|---|---|---|
| ESFT_CONFIG | JSON of `EsftConfig` | unset | set by the launcher; unset = weaving off |
| ESFT_PLATFORM | auto, cpu, native | auto | whether the CPU reference platform takes over |
| ESFT_DEVICE_MEMORY | a size, such as 512MiB | unset | of each of the CPU platform's devices |
| ESFT_DEVICE_LEDGER | a file | unset | where servers that share devices write what they use |

A value outside its set is a `ConfigError`, not a default.
"""

from __future__ import annotations

import os
from pathlib import Path

from sgl_esft.byte_size import parse_bytes
from sgl_esft.errors import ConfigError

CONFIG = "ESFT_CONFIG"
PLATFORM = "ESFT_PLATFORM"
DEVICE_MEMORY = "ESFT_DEVICE_MEMORY"
DEVICE_LEDGER = "ESFT_DEVICE_LEDGER"
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
