"""How an instance's ranks come to their devices.

    EngineConfig --[rank_environment]--> the supervisor's environment --SGLang--> one device a rank

Device d is the d-th that the front sees; its memory worker, which sees what the front sees, opens
it by that number. A supervisor sees the devices of its instance only, in the order of its ranks,
and SGLang shows each rank no other than its own. To the rank that is device 0, whose addresses
engine/memory.py reserves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sgl_elastic.errors import ElasticConfigError

_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "acl": "ASCEND_RT_VISIBLE_DEVICES"}
_ONE_EACH = {"SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS": "1"}


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
