"""Reroute's kernel through the vendor's compiler to Linalg, and what that text must hold."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

import pytest

from scripts import ascend_env
from scripts.ascend_lowering import LoweringError, Request, lower, reroute_request
from scripts.requirements_files import read_pins
from sgl_esft_kernels.reroute_triton_ascend import Blocks, plan_blocks, plan_rows
from tests.fast.kernels.lowered_text import (
    allocations,
    bytes_if_nothing_is_shared,
    iterators,
    operations,
    scalar_accesses,
    scalar_loops,
    vector_bodies,
)

# id dtype, k, adapters, experts: DeepSeek-V2-Lite's sizes, DeepSeek-V2's, and neighbours.
SERVED = list(itertools.product(("int32", "int64"), (6, 8), (4, 20), (64, 160)))
# Maps of several tiles; with few experts a token, the most tags a block.
WITH_TILES = [
    ("int32", 6, 64, 160),
    ("int64", 8, 64, 256),
    ("int64", 1, 64, 256),
    ("int64", 2, 64, 256),
]

UNIFIED_BUFFER = 192 * 1024  # bytes of a vector core of the 910B

NAIVE_FILE = Path(__file__).with_name("ascend_naive_kernel.py")
POINTERS = dict.fromkeys(("ids_ptr", "tags_ptr", "map_ptr", "out_ptr"), "*i32")
NAIVE = Request(
    str(NAIVE_FILE), "reroute_from_global_memory", POINTERS | {"num_ids": "i32"}, {"K": 6, "M": 64}
)
GATHER = dict.fromkeys(("values_ptr", "index_ptr", "out_ptr"), "*i32")

Specialisation = tuple[str, int, int, int]


@pytest.fixture(scope="module")
def lowered() -> dict[Specialisation, str]:
    asked = SERVED + WITH_TILES
    return dict(zip(asked, lower([reroute_request(*each) for each in asked]), strict=True))


def rows_request(asked: Specialisation) -> Request:
    """The kernel with `where`, whose table is as long as the map."""
    _, k, num_adapters, num_experts = asked
    plain = reroute_request(*asked)
    signature = {}
    for name, kind in plain.signature.items():
        signature |= {"where_ptr": "*i32"} if name == "out_ptr" else {}
        signature[name] = kind
    num_cells = (num_adapters + 1) * num_experts
    constants = plain.constants | plan_rows(k, num_cells, num_cells)
    return Request(plain.source, "reroute_rows_kernel", signature, constants)


@pytest.fixture(scope="module")
def lowered_rows() -> dict[Specialisation, str]:
    asked = SERVED + WITH_TILES
    return dict(zip(asked, lower([rows_request(each) for each in asked]), strict=True))


@pytest.fixture(scope="module")
def naive() -> str:
    return lower([NAIVE])[0]


def blocks_of(asked: Specialisation) -> Blocks:
    _, k, num_adapters, num_experts = asked
    return plan_blocks(k, (num_adapters + 1) * num_experts)


@pytest.mark.parametrize("asked", SERVED + WITH_TILES, ids=str)
def test_no_element_is_touched_alone(
    asked: Specialisation, lowered: dict[Specialisation, str]
) -> None:
    check_vectors(lowered[asked], id_dtype=asked[0], num_lookups=1)


@pytest.mark.parametrize("asked", SERVED + WITH_TILES, ids=str)
def test_no_element_is_touched_alone_with_where(
    asked: Specialisation, lowered_rows: dict[Specialisation, str]
) -> None:
    check_vectors(lowered_rows[asked], id_dtype=asked[0], num_lookups=2)


def check_vectors(text: str, *, id_dtype: str, num_lookups: int) -> None:
    """All of it is done for whole vectors, by what vector cores have."""
    assert scalar_accesses(text) == {}
    assert scalar_loops(text) == []
    assert iterators(text) == {'"parallel"'}
    bodies = vector_bodies(text)
    conversions = {"arith.trunci : i64 to i32", "arith.extsi : i32 to i64"}
    assert {body for body in bodies if not body.endswith(" : i32")} == {
        "arith.bitcast : i32 to f32",
        "arith.bitcast : f32 to i32",
        "arith.index_cast : index to i32",
        *(conversions if id_dtype == "int64" else ()),
    }
    assert [body for body in bodies if "cmp" in body] == num_lookups * ["arith.cmpi eq : i32"]
    assert [body for body in bodies if "div" in body or "rem" in body] == []


@pytest.mark.parametrize("asked", SERVED + WITH_TILES, ids=str)
def test_loads_gathers_stores_and_buffers_are_those_of_the_plan(
    asked: Specialisation, lowered: dict[Specialisation, str]
) -> None:
    text, blocks, id_type = lowered[asked], blocks_of(asked), asked[0].replace("int", "i")
    found = operations(text)
    assert found["memref.copy"] == 3  # ids, tags, a tile of the map
    assert found["bufferization.materialize_in_destination"] == 1  # slot ids
    assert found["scf.for"] == (1 if asked in SERVED else 2)  # blocks; tiles, where not all fit
    assert found["func.call"] == 2  # both lookups are gathers of whole blocks
    calls = re.findall(r"func\.call @triton_gather\w*\(.*\) : \((.*)\) -> (.*)", text)
    assert calls == [
        (f"tensor<{source}xf32>, tensor<{blocks.lanes}xi32>, i32", f"tensor<{blocks.lanes}xf32>")
        for source in (blocks.tag_lanes, blocks.tile)
    ]
    wanted = {f"{blocks.tag_lanes}xi32", f"{blocks.lanes}x{id_type}", f"{blocks.tile}xi32"}
    assert allocations(text) == wanted
    assert 64 * 1024 < bytes_if_nothing_is_shared(text) <= UNIFIED_BUFFER  # all values at once


@pytest.mark.parametrize("asked", SERVED + WITH_TILES, ids=str)
def test_where_is_one_load_and_one_gather_more(
    asked: Specialisation, lowered_rows: dict[Specialisation, str]
) -> None:
    text, plan = lowered_rows[asked], rows_request(asked).constants
    found = operations(text)
    assert found["memref.copy"] == 4  # ids, tags, a tile of the map, a tile of `where`
    assert found["bufferization.materialize_in_destination"] == 1  # rows
    tables = (plan["TILE"], plan["WHERE_TILE"])
    assert found["scf.for"] == 1 + sum(tile < plan["NUM_SLOTS"] for tile in tables)
    calls = re.findall(r"func\.call @triton_gather\w*\(.*\) : \((.*)\) -> (.*)", text)
    lanes = plan["LANES"]
    assert calls == [
        (f"tensor<{source}xf32>, tensor<{lanes}xi32>, i32", f"tensor<{lanes}xf32>")
        for source in (plan["TAG_LANES"], *tables)
    ]
    assert bytes_if_nothing_is_shared(text) <= UNIFIED_BUFFER  # all values at once


def test_checks_find_the_scalar_loops_of_a_cuda_style_kernel(naive: str) -> None:
    assert scalar_accesses(naive) == {
        "tensor.extract": 2,  # the tag and the id of an element
        "tensor.insert": 2,
        "memref.load": 2,  # its tag, its cell of the map
        "ExtractedLoadOrStore": 2,
    }
    assert "arith.cmpi slt : i32" in vector_bodies(naive)
    loops = scalar_loops(naive)
    assert len(loops) == 2
    for loop in loops:
        assert "memref.load" in loop
        assert "scf.if" not in loop, "the mask comes after, as a select between vectors"


def test_gather_of_int32_is_refused() -> None:
    with pytest.raises(LoweringError, match=r"Expected dtype .* but got int32"):
        lower([Request(str(NAIVE_FILE), "gather_of_int32", GATHER, {})])


def test_the_compiler_is_the_one_that_an_npu_gets() -> None:
    pins, npu = read_pins("triton-ascend.txt"), read_pins("npu.txt")
    assert pins["triton-ascend"] == npu["triton-ascend"]


def test_missing_wheel_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(ascend_env.AscendEnvironmentError, match=r"^triton-ascend 3\.2\.0 cannot"):
        ascend_env.make(tmp_path / "venv")
    assert list((tmp_path / "venv").glob(".made-*")) == []  # so the next try is a new one


def test_another_python_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ascend_env, "PYTHON_VERSION", "3.99")
    with pytest.raises(ascend_env.AscendEnvironmentError, match=r"put python3\.99 on the PATH"):
        ascend_env.choose_python()
