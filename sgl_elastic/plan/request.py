"""Which devices a scale request means.

ScaleRequest, old placement, number of devices --> [resolve] --> device ids --> placement.py
"""

from __future__ import annotations

from sgl_elastic.errors import BadScaleError
from sgl_elastic.types import Placement, ScaleRequest


def resolve(request: ScaleRequest, old: Placement, max_devices: int) -> tuple[int, ...]:
    """Device ids to end up with, ascending; the present tuple itself where they are the same set.

    Devices are numbered 0 to `max_devices - 1`. Named devices win. Else what is there stays but for
    `leave`: the lowest free ids join, or the highest ids leave. Ascending, so that one set of
    devices is one set of ranks and a parked standby can be found for it. Raises BadScaleError.
    """
    _check_range("device_ids", request.device_ids, max_devices)
    _check_range("leave", request.leave, max_devices)
    if not 1 <= request.dp_size <= max_devices:
        raise BadScaleError(
            f"dp_size is {request.dp_size}; there are {max_devices} devices, so take 1 to "
            f"{max_devices}."
        )
    strangers = sorted(set(request.leave) - set(old.device_ids))
    if strangers:
        raise BadScaleError(
            f"leave names devices {strangers}, which serve nothing; in use are "
            f"{sorted(old.device_ids)}."
        )
    wanted = _named(request) if request.device_ids else _chosen(request, old, max_devices)
    return old.device_ids if set(wanted) == set(old.device_ids) else tuple(sorted(wanted))


def _check_range(field: str, device_ids: tuple[int, ...], max_devices: int) -> None:
    unknown = sorted({device for device in device_ids if not 0 <= device < max_devices})
    if unknown:
        raise BadScaleError(
            f"{field} names devices {unknown}, which do not exist; take some of 0 to "
            f"{max_devices - 1}."
        )
    if len(set(device_ids)) != len(device_ids):
        raise BadScaleError(f"{field} is {list(device_ids)}; name each device once.")


def _named(request: ScaleRequest) -> tuple[int, ...]:
    if len(request.device_ids) != request.dp_size:
        raise BadScaleError(
            f"dp_size is {request.dp_size}, but device_ids names {len(request.device_ids)} "
            f"devices: {list(request.device_ids)}. Make them agree."
        )
    both = sorted(set(request.device_ids) & set(request.leave))
    if both:
        raise BadScaleError(f"devices {both} are in device_ids and in leave; take one of the two.")
    return request.device_ids


def _chosen(request: ScaleRequest, old: Placement, max_devices: int) -> tuple[int, ...]:
    leave = set(request.leave)
    kept = sorted(set(old.device_ids) - leave)
    free = [device for device in range(max_devices) if device not in {*old.device_ids}]
    wanted = [*kept, *free][: request.dp_size]
    if len(wanted) < request.dp_size:
        raise BadScaleError(
            f"dp_size is {request.dp_size}, but without {sorted(leave)} there are only "
            f"{len(wanted)} devices. Lower dp_size or let fewer leave."
        )
    return tuple(wanted)
