"""The rerouting kernel alone: its C++ tests, and the instructions that it takes for an id.

csrc/reroute -> csrc_build.py -> test_reroute (plain, sanitized), count_reroute (callgrind)

test_cpp.py runs test_reroute.cpp with the other C++ tests; what is here is about this kernel only.
"""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

import pytest

from bench.common.callgrind import VALGRIND, per_call
from tests.fast.csrc.csrc_build import CSRC, build_tests

needs_valgrind = pytest.mark.skipif(VALGRIND is None, reason="valgrind is not installed")

# Instructions for each looked-up id of a large batch, by bits of an id, and those of a call on one
# token. Measured with GCC 12: 8.0, 10.7 and 190; other compilers may need some more.
MOST_PER_ID = {32: 12, 64: 16}
MOST_FOR_ONE_TOKEN = 300
TOP_K = 6


@cache
def call_instructions(num_tokens: int, top_k: int, id_bits: int) -> float:
    return per_call(build_tests() / "count_reroute", num_tokens, top_k, id_bits)


@pytest.mark.parametrize("sanitize", [False, pytest.param(True, marks=pytest.mark.full)])
def test_the_kernel_needs_no_python_and_no_torch(sanitize: bool) -> None:
    executable = build_tests(sanitize=sanitize) / "test_reroute"
    linked = subprocess.run(["ldd", str(executable)], capture_output=True, text=True, check=True)
    assert "torch" not in linked.stdout
    assert "python" not in linked.stdout


def test_only_the_binding_includes_torch() -> None:
    including = [path.name for path in (CSRC / "reroute").iterdir() if uses_torch(path)]
    assert including == ["torch_op.cpp"]


def uses_torch(path: Path) -> bool:
    lines = path.read_text().splitlines()
    return any(line.startswith(("#include <torch", "#include <ATen")) for line in lines)


@needs_valgrind
@pytest.mark.parametrize("id_bits", [32, 64])
def test_an_id_of_a_large_batch_takes_few_instructions(id_bits: int) -> None:
    assert call_instructions(4096, TOP_K, id_bits) / (4096 * TOP_K) < MOST_PER_ID[id_bits]


@needs_valgrind
@pytest.mark.parametrize("id_bits", [32, 64])
def test_a_call_on_one_token_takes_few_instructions(id_bits: int) -> None:
    assert call_instructions(1, TOP_K, id_bits) < MOST_FOR_ONE_TOKEN


@needs_valgrind
@pytest.mark.parametrize("id_bits", [32, 64])
def test_instructions_are_linear_in_tokens(id_bits: int) -> None:
    """A token costs the same between 64 and 1024 tokens as between 1024 and 4096."""
    at = {tokens: call_instructions(tokens, TOP_K, id_bits) for tokens in (64, 1024, 4096)}
    early, late = (at[1024] - at[64]) / 960, (at[4096] - at[1024]) / 3072
    assert late == pytest.approx(early, rel=0.02)


@needs_valgrind
def test_any_number_of_experts_a_token_takes_few_instructions() -> None:
    """Those without code of their own take the plain loop."""
    for top_k in (1, 4, 7, 8):
        per_id = call_instructions(1024, top_k, 32) / (1024 * top_k)
        assert per_id < (30 if top_k == 1 else 1.5 * MOST_PER_ID[32]), top_k
