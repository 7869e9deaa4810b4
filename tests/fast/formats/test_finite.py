"""Weights that are not finite: found wherever they are, in every type, and nothing else is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from sgl_esft.errors import AdapterFormatError, AdapterNotFiniteError
from sgl_esft.formats import finite
from sgl_esft.formats.finite import FiniteCheck, check_weights
from sgl_esft.formats.manifest import read_manifest
from sgl_esft.formats.model_spec import DTYPE_BYTES, MoeSpec, read_moe_spec
from sgl_esft.formats.safetensors_header import ITEM_BYTES
from sgl_esft.weave import host_cache
from sgl_esft.weave.moe_layer import ExpertShard
from tests.support.adapter_factory import write_random_adapter, write_random_base

EXPERTS = {1: (0, 2), 2: (5,)}
NAME = "model.layers.1.mlp.experts.2.up_proj.weight"
NOT_FINITE = [float("nan"), -float("nan"), float("inf"), float("-inf")]


def as_bytes(values: torch.Tensor) -> bytes:
    return values.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", [*DTYPE_BYTES, "float8_e4m3fn"])
@given(data=st.data())
def test_every_bit_pattern_is_told_as_torch_tells_it(dtype: str, data: st.DataObject) -> None:
    raw = data.draw(st.binary(max_size=64).filter(lambda b: len(b) % ITEM_BYTES[dtype] == 0))
    values = torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype)) if raw else None
    is_finite = values is None or bool(torch.isfinite(values.float()).all())
    assert FiniteCheck(dtype).holds(raw) == is_finite


@pytest.mark.parametrize("dtype", ["int8", "int32"])
def test_integers_are_finite(dtype: str) -> None:
    check = FiniteCheck(dtype)
    assert check.item_bytes == ITEM_BYTES[dtype]
    assert check.holds(b"\xff" * 64)


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
@pytest.mark.parametrize("value", NOT_FINITE)
def test_one_value_among_many(dtype: str, value: float) -> None:
    """At both ends of a piece, and in one that is not whole."""
    kind = getattr(torch, dtype)
    count = finite.PIECE_BYTES // kind.itemsize
    check = FiniteCheck(dtype)
    largest = torch.full((count * 2 + 3,), torch.finfo(kind).max, dtype=kind)
    largest[::2] = torch.finfo(kind).smallest_normal / 4
    assert check.holds(as_bytes(largest))
    for at in (0, count - 1, count, 2 * count + 2):
        values = largest.clone()
        values[at] = value
        assert not check.holds(as_bytes(values)), at


@pytest.fixture(params=DTYPE_BYTES)
def spec_and_adapter(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[MoeSpec, Path]:
    base = write_random_base(tmp_path / "base", "DeepseekV2ForCausalLM", seed=1)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "dtype": request.param}))
    return read_moe_spec(base), write_random_adapter(
        tmp_path / "math", base, seed=2, experts=EXPERTS
    )


def spoil(adapter: Path, value: float) -> None:
    tensors = load_file(adapter / "model.safetensors")
    tensors[NAME].view(-1)[-1] = value
    save_file(tensors, adapter / "model.safetensors")


def by_check(adapter: Path, spec: MoeSpec) -> None:
    check_weights("math", read_manifest(adapter, spec))


def by_rank(adapter: Path, spec: MoeSpec, on_read: host_cache.OnRead = lambda n: None) -> None:
    whole = ExpertShard(range(spec.num_experts), range(spec.expert_intermediate_size))
    shards = dict.fromkeys(spec.moe_layer_ids, whole)
    host_cache.read_adapter("math", read_manifest(adapter, spec), shards, on_read=on_read)


@pytest.mark.parametrize("read", [by_check, by_rank])
@pytest.mark.parametrize("value", NOT_FINITE)
def test_an_adapter_is_refused_by_name(
    spec_and_adapter: tuple[MoeSpec, Path], read: Callable[[Path, MoeSpec], None], value: float
) -> None:
    spec, adapter = spec_and_adapter
    read(adapter, spec)
    spoil(adapter, value)
    with pytest.raises(AdapterNotFiniteError) as caught:
        read(adapter, spec)
    message = str(caught.value)
    assert "adapter 'math'" in message
    assert "layer 1, expert 2, up projection" in message
    assert "learning rate" in message
    assert str(adapter.parent) not in message, "a client may read it"


def test_reads_that_come_in_odd_pieces(
    spec_and_adapter: tuple[MoeSpec, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value whose bytes come in two reads is checked all the same."""
    spec, adapter = spec_and_adapter
    monkeypatch.setattr(host_cache, "PIECE_BYTES", 7)
    by_rank(adapter, spec)
    spoil(adapter, float("inf"))
    with pytest.raises(AdapterNotFiniteError, match="expert 2, up"):
        by_rank(adapter, spec)


def test_a_file_that_changes_meanwhile(spec_and_adapter: tuple[MoeSpec, Path]) -> None:
    spec, adapter = spec_and_adapter
    manifest = read_manifest(adapter, spec)
    tensors = load_file(adapter / "model.safetensors")
    del tensors[NAME]
    save_file(tensors, adapter / "model.safetensors")
    with pytest.raises(AdapterFormatError, match="changed"):
        check_weights("math", manifest)
