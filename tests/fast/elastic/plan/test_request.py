"""Which devices a request means: growing, shrinking, replacing, and what is refused."""

from __future__ import annotations

from itertools import combinations

import pytest

from sgl_elastic.errors import BadScaleError
from sgl_elastic.plan.request import resolve
from sgl_elastic.types import Placement, ScaleRequest


def on(*devices: int) -> Placement:
    return Placement(devices, (devices[0],) * 4, (10,) * len(devices))


@pytest.mark.parametrize(
    ("request_", "old", "expected"),
    [
        (ScaleRequest(3), (0, 1), (0, 1, 2)),
        (ScaleRequest(3), (1, 3), (0, 1, 3)),
        (ScaleRequest(1), (0, 1), (0,)),
        (ScaleRequest(2), (1, 3, 5), (1, 3)),
        (ScaleRequest(2), (0, 1), (0, 1)),
        (ScaleRequest(2), (3, 1), (3, 1)),  # the same set: the very same ranks
        (ScaleRequest(1, leave=(0,)), (0, 1), (1,)),
        (ScaleRequest(1, leave=(0,)), (0, 1, 2), (1,)),
        (ScaleRequest(2, leave=(1,)), (0, 1), (0, 2)),  # a replacement
        (ScaleRequest(3, leave=(0,)), (0, 1), (1, 2, 3)),
        (ScaleRequest(2, device_ids=(5, 2)), (0, 1), (2, 5)),
        (ScaleRequest(2, device_ids=(1, 3)), (3, 1), (3, 1)),
        (ScaleRequest(1, device_ids=(2,), leave=(0,)), (0, 2), (2,)),
    ],
)
def test_wanted_devices(
    request_: ScaleRequest, old: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert resolve(request_, on(*old), 6) == expected


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (ScaleRequest(0), "dp_size is 0"),
        (ScaleRequest(-1), "dp_size is -1"),
        (ScaleRequest(7), "there are 6 devices"),
        (ScaleRequest(2, device_ids=(0, 6)), r"device_ids names devices \[6\]"),
        (ScaleRequest(2, device_ids=(0, -1)), r"device_ids names devices \[-1\]"),
        (ScaleRequest(2, device_ids=(3, 3)), "each device once"),
        (ScaleRequest(3, device_ids=(3, 4)), "Make them agree"),
        (ScaleRequest(1, leave=(9,)), r"leave names devices \[9\]"),
        (ScaleRequest(1, leave=(0, 0)), "each device once"),
        (ScaleRequest(1, leave=(4,)), r"\[4\], which serve nothing"),
        (ScaleRequest(1, device_ids=(0,), leave=(0,)), "take one of the two"),
        (ScaleRequest(6, leave=(0,)), "only 5 devices"),
    ],
)
def test_nonsense_is_refused(request_: ScaleRequest, message: str) -> None:
    with pytest.raises(BadScaleError, match=message):
        resolve(request_, on(0, 1), 6)


def test_every_request_keeps_as_many_devices_as_it_can() -> None:
    for size in range(1, 5):
        for old in combinations(range(4), size):
            for dp_size in range(1, 5):
                wanted = resolve(ScaleRequest(dp_size), on(*old), 4)
                assert len(set(wanted)) == dp_size
                assert len(set(wanted) & set(old)) == min(dp_size, size)
