"""merge and extract are each other's inverse, bit for bit; bad input leaves nothing behind."""

import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sgl_esft.errors import (
    AdapterMismatchError,
    ConfigError,
    UnsupportedAdapterError,
    UnsupportedModelError,
)
from sgl_esft.formats import checkpoint
from sgl_esft.formats.manifest import read_manifest
from sgl_esft.formats.model_spec import read_moe_spec
from sgl_esft.offload.pack import PACKED_NAME
from sgl_esft.tools.extract import extract_adapter
from sgl_esft.tools.merge import merge_adapter
from tests.support.adapter_factory import (
    SERVED_ARCHITECTURES,
    write_random_adapter,
    write_random_base,
)
from tests.support.base_factory import save_shards

Tensors = dict[str, torch.Tensor]

EXPERTS = {1: (3,), 3: (0, 5, 15)}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_random_base(tmp_path / "base", "DeepseekV2ForCausalLM", seed=1, num_shards=3)


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    return write_random_adapter(tmp_path / "adapter", base, seed=2, experts=EXPERTS)


@pytest.fixture
def merged(base: Path, adapter: Path, tmp_path: Path) -> Path:
    merge_adapter(base, adapter, tmp_path / "merged")
    return tmp_path / "merged"


def load(folder: Path) -> Tensors:
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= {name: tensor.clone() for name, tensor in load_file(file).items()}
    return tensors


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def changed_names(one: Path, other: Path) -> set[str]:
    first, second = load(one), load(other)
    assert first.keys() == second.keys()
    return {name for name in first if bits(first[name]) != bits(second[name])}


def retune(base: Path, folder: Path, edit: Callable[[Tensors], object], shards: int = 2) -> Path:
    """A copy of the checkpoint in other shards, with `edit` applied to its tensors."""
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = load(base)
    edit(tensors)
    save_shards(folder, tensors, shards)
    return folder


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", SERVED_ARCHITECTURES)
def test_merge_changes_the_tuned_experts_and_nothing_else(
    architecture: str, dtype: str, num_shards: int, tmp_path: Path
) -> None:
    base = write_random_base(
        tmp_path / "base", architecture, seed=1, num_shards=num_shards, dtype=dtype
    )
    spec = read_moe_spec(base)
    adapter = write_random_adapter(tmp_path / "adapter", base, seed=2, old_prefix=num_shards == 1)
    merge_adapter(base, adapter, tmp_path / "merged")
    manifest = read_manifest(adapter, spec)
    merged = load(tmp_path / "merged")
    written = load(adapter)
    for key, location in manifest.tensors.items():
        assert torch.equal(merged[spec.expert_tensor_name(*key)], written[location.name])
    tuned = {spec.expert_tensor_name(*key) for key in manifest.tensors}
    assert changed_names(base, tmp_path / "merged") == tuned
    assert {f.name for f in (tmp_path / "merged").iterdir()} == {f.name for f in base.iterdir()}


def test_merge_into_an_empty_folder_copies_what_belongs(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    (base / "configuration_deepseek.py").write_text("# remote code of the base")
    for name in (
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        "old.safetensors",
        ".cache",
        PACKED_NAME,
    ):
        (base / name).write_text("stale")
    (base / "original").mkdir()
    (tmp_path / "out").mkdir()
    merge_adapter(base, adapter, tmp_path / "out")
    written = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"config.json", "tokenizer.json", "configuration_deepseek.py"} <= written
    assert sorted(name for name in written if "model" in name) == [
        *(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)),
        "model.safetensors.index.json",
    ]
    assert (tmp_path / "out" / "config.json").read_bytes() == (base / "config.json").read_bytes()


@pytest.mark.parametrize("existing", ["folder", "file"])
def test_merge_refuses_to_overwrite(
    existing: str, base: Path, adapter: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    if existing == "folder":
        out.mkdir()
    kept = out / "keep" if existing == "folder" else out
    kept.write_text("mine")
    with pytest.raises(ConfigError, match="not an empty folder"):
        merge_adapter(base, adapter, out)
    assert kept.read_text() == "mine"


def test_failed_merge_leaves_nothing(
    base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        assert any((tmp_path / "deep").iterdir()), "the partial folder is there while it is made"
        raise OSError("disk full")

    monkeypatch.setattr("sgl_esft.tools.merge.copy_to", fail)
    with pytest.raises(OSError, match="disk full"):
        merge_adapter(base, adapter, tmp_path / "deep" / "out")
    assert list((tmp_path / "deep").iterdir()) == []


def test_two_runs_do_not_share_a_partial_folder(base: Path, adapter: Path, tmp_path: Path) -> None:
    (tmp_path / ".out.partial").mkdir()
    with pytest.raises(ConfigError, match="another run"):
        merge_adapter(base, adapter, tmp_path / "out")
    assert (tmp_path / ".out.partial").exists()


def test_merge_streams(
    base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_CHUNK_BYTES", 10_007)
    tracemalloc.start()
    try:
        merge_adapter(base, adapter, tmp_path / "out")
        extract_adapter(base, tmp_path / "out", tmp_path / "again")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The checkpoint has 7 MB; headers and one chunk at a time need far less.
    assert peak < 1_500_000
    assert load(tmp_path / "again").keys() == load(adapter).keys()


def _index(base: Path, edit: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((base / checkpoint.INDEX_NAME).read_text())
    edit(index["weight_map"])
    (base / checkpoint.INDEX_NAME).write_text(json.dumps(index))


def _drop_from_index(base: Path) -> None:
    kept = min(file.name for file in base.glob("*.safetensors"))
    _index(base, lambda m: [m.pop(name) for name, file in list(m.items()) if file != kept])


def _config(base: Path, **changes: object) -> None:
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | changes))


BAD_BASES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (lambda base: [f.unlink() for f in base.glob("*.safetensors*")], "safetensors"),
    "lost shard": (lambda base: min(base.glob("*.safetensors")).unlink(), "cannot read"),
    "lost index entry": (lambda base: _index(base, lambda m: m.clear()), "weight_map"),
    "index leaves folder": (lambda base: _index(base, lambda m: m.update(x="../x")), "weight_map"),
    "lost expert": (_drop_from_index, "no tensor"),
    "twice": (
        lambda base: (
            (base / checkpoint.INDEX_NAME).unlink(),
            shutil.copy(min(base.glob("*.safetensors")), base / "z.safetensors"),
        ),
        "holds tensor",
    ),
    "config lies": (lambda base: _config(base, moe_intermediate_size=32), "config.json says"),
}


@pytest.mark.parametrize("case", BAD_BASES)
def test_bad_base(case: str, base: Path, adapter: Path, tmp_path: Path) -> None:
    damage, message = BAD_BASES[case]
    damage(base)
    with pytest.raises(UnsupportedModelError, match=message):
        merge_adapter(base, adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_extract_returns_what_merge_wrote(
    base: Path, adapter: Path, merged: Path, tmp_path: Path
) -> None:
    manifest = extract_adapter(base, merged, tmp_path / "extracted")
    assert manifest == read_manifest(tmp_path / "extracted", read_moe_spec(base))
    assert manifest.experts == EXPERTS
    before, after = load(adapter), load(tmp_path / "extracted")
    assert {n: bits(t) for n, t in before.items()} == {n: bits(t) for n, t in after.items()}

    merge_adapter(base, tmp_path / "extracted", tmp_path / "again")
    for file in merged.iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()


def test_one_bit_in_one_projection_is_a_difference(base: Path, tmp_path: Path) -> None:
    name = "model.layers.2.mlp.experts.7.down_proj.weight"

    one, two = (
        retune(
            base,
            tmp_path / f"{shards}",
            lambda tensors, z=zero: tensors[name][0, 0].fill_(z),
            shards,
        )
        for shards, zero in ((2, 0.0), (1, -0.0))
    )
    assert extract_adapter(one, two, tmp_path / "out").experts == {2: (7,)}


def test_layers_limit_the_comparison(base: Path, merged: Path, tmp_path: Path) -> None:
    assert extract_adapter(base, merged, tmp_path / "a", layers=[3, 2]).experts == {3: (0, 5, 15)}
    with pytest.raises(ConfigError, match=r"layers \[0, 9\]"):
        extract_adapter(base, merged, tmp_path / "b", layers=[0, 1, 9])
    with pytest.raises(UnsupportedAdapterError, match="nothing to extract"):
        extract_adapter(base, merged, tmp_path / "c", layers=[2])


def _touch_norms(tensors: Tensors) -> None:
    for name in tensors:
        if "norm" in name:
            tensors[name] += 1


BAD_TUNED: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "nothing changed": (lambda _: None, "nothing to extract"),
    "router": (
        lambda tensors: tensors["model.layers.1.mlp.gate.weight"].zero_(),
        r"model\.layers\.1\.mlp\.gate\.weight",
    ),
    "shared expert": (
        lambda tensors: tensors["model.layers.1.mlp.shared_experts.up_proj.weight"].zero_(),
        "shared_experts",
    ),
    "many": (_touch_norms, r"^13 tensors .*(norm.*){5} and 8 more"),
    "lost": (
        lambda tensors: tensors.pop("lm_head.weight"),
        r"one of the checkpoints only: lm_head\.weight",
    ),
    "new": (
        lambda tensors: tensors.update(extra=torch.zeros(1)),
        "one of the checkpoints only: extra",
    ),
    "reshaped": (
        lambda tensors: tensors.update(
            {"lm_head.weight": tensors["lm_head.weight"].T.contiguous()}
        ),
        r"lm_head\.weight",
    ),
}


@pytest.mark.parametrize("case", BAD_TUNED)
def test_bad_tuned_checkpoint(case: str, base: Path, tmp_path: Path) -> None:
    edit, message = BAD_TUNED[case]
    tuned = retune(base, tmp_path / "tuned", edit)
    with pytest.raises(UnsupportedAdapterError, match=message):
        extract_adapter(base, tuned, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_checkpoints_of_two_models(base: Path, tmp_path: Path) -> None:
    other = write_random_base(tmp_path / "other", "DeepseekV2ForCausalLM", seed=1, dtype="bfloat16")
    with pytest.raises(AdapterMismatchError, match="dtype float32"):
        extract_adapter(base, other, tmp_path / "out")
