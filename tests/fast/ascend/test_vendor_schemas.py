"""The simulated operators have the signatures that torch-npu registers."""

from __future__ import annotations

import zipfile

import pytest

from scripts.vendor_headers import WHEELS, download, fetch
from tests.support.npu_simulator.schemas import SCHEMAS
from tests.support.npu_simulator.stand_in import OPERATORS


@pytest.fixture(scope="module")
def library() -> bytes:
    """The library in the wheel; a registered signature stands in it as a C string."""
    fetch()
    if not list(WHEELS.glob("torch_npu-*.whl")):
        download()
    (wheel,) = WHEELS.glob("torch_npu-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.read("torch_npu/lib/libtorch_npu.so")


def test_each_is_in_the_vendors_library(library: bytes) -> None:
    assert set(SCHEMAS) == set(OPERATORS)
    missing = [name for name, text in SCHEMAS.items() if f"\0{text}\0".encode() not in library]
    assert missing == []


def test_init_routing_is_the_documented_call(library: bytes) -> None:
    """npu_moe_init_routing_v2 is held to aclnnMoeInitRoutingV3's document, because it calls it."""
    assert b"call aclnnMoeInitRoutingV3 failed" in library
