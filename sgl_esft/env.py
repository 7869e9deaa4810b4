"""Every environment variable this package reads, each with its meaning and default.

| variable | values | default | meaning |
|---|---|---|---|
| ESFT_CONFIG | JSON of `EsftConfig` | unset | set by the launcher; unset = weaving off |
| ESFT_PLATFORM | auto, cpu, native | auto | whether the CPU reference platform takes over |

A value outside its set is a `ConfigError`, not a default.
"""

from __future__ import annotations

import os

from sgl_esft.errors import ConfigError

CONFIG = "ESFT_CONFIG"
PLATFORM = "ESFT_PLATFORM"
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
