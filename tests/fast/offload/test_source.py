"""Where experts lie: the ranges are those of safetensors, by headers only; files and owners."""

from __future__ import annotations

import gc
import json
import logging
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sgl_esft.errors import (
    AdapterFormatError,
    ConfigError,
    ExpertReadError,
    InvariantError,
    UnsupportedModelError,
)
from sgl_esft.formats.manifest import read_manifest
from sgl_esft.formats.model_spec import PROJS, MoeSpec, read_moe_spec
from sgl_esft.offload import source as source_module
from sgl_esft.offload.pack import ALIGNMENT, PACKED_NAME, pack_experts
from sgl_esft.offload.source import ExpertPlace, ExpertSource, OpenFile
from tests.support.adapter_factory import write_random_adapter, write_random_base

# Two MoE layers of three experts. One projection has eight pages in float32, and half of it a
# whole number of pages in every type.
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "moe_intermediate_size": 64,
    "n_routed_experts": 3,
    "num_hidden_layers": 3,
    "intermediate_size": 64,
    "vocab_size": 300,
}
EXPERTS = {1: (0, 2), 2: (1,)}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base of two shards and an adapter, in bfloat16, not to be written to."""
    root = tmp_path_factory.mktemp("offload")
    write_model(root)
    return root


def write_model(root: Path, dtype: str = "bfloat16", num_shards: int = 2) -> None:
    sizes = {**SIZES, "dtype": dtype}
    base = write_random_base(
        root / "base", "DeepseekV2ForCausalLM", seed=1, num_shards=num_shards, **sizes
    )
    write_random_adapter(root / "math", base, seed=2, experts=EXPERTS, num_shards=num_shards)


def copied(root: Path, to: Path) -> Path:
    shutil.copytree(root, to)
    return to


def load(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def registered(root: Path) -> ExpertSource:
    """A source that knows the base and, as "math", the adapter."""
    source = ExpertSource(root / "base")
    source.register("math", read_manifest(root / "math", source.spec))
    return source


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def ranges_hold(place: ExpertPlace, tensors: dict[str, torch.Tensor], spec: MoeSpec) -> bool:
    """Whether the place's ranges are the tensors, by a plain read."""
    for proj in PROJS:
        found = getattr(place, proj)
        wanted = tensors[spec.expert_tensor_name(place.layer_id, place.expert_id, proj)]
        path = Path(f"/proc/self/fd/{found.file.fd}")
        raw = path.read_bytes()[found.start : found.start + found.shape[0] * found.row_bytes]
        if tuple(wanted.shape) != found.shape or as_bytes(wanted) != raw:
            return False
    return True


@pytest.mark.parametrize("is_packed", [False, True])
def test_the_base_is_where_safetensors_says(root: Path, tmp_path: Path, is_packed: bool) -> None:
    if is_packed:
        pack_experts(root / "base", tmp_path / "packed")
    source = ExpertSource(root / "base", tmp_path / "packed" if is_packed else None)
    tensors, spec = load(root / "base"), read_moe_spec(root / "base")
    assert source.spec == spec
    for layer in (1, 2):
        for expert in range(3):
            place = source.place(None, layer, expert)
            assert (place.owner, place.layer_id, place.expert_id) == (None, layer, expert)
            assert place.dtype == "bfloat16"
            assert ranges_hold(place, tensors, spec)
            assert (place.gate.start % ALIGNMENT == 0) == is_packed
            assert len(place.files) == (1 if is_packed else 2), "dealt out over the shards"


def test_an_adapters_experts_are_its_own(root: Path) -> None:
    source = registered(root)
    tensors = load(root / "math")
    for layer, ids in EXPERTS.items():
        for expert in ids:
            place = source.place("math", layer, expert)
            assert place.owner == "math"
            assert ranges_hold(place, tensors, source.spec)
    assert not ranges_hold(source.place(None, 1, 0), tensors, source.spec)


def test_names_of_the_old_style(root: Path, tmp_path: Path) -> None:
    base = root / "base"
    write_random_adapter(tmp_path / "old", base, seed=3, experts={1: (1,)}, old_prefix=True)
    source = ExpertSource(base)
    source.register("old", read_manifest(tmp_path / "old", source.spec))
    tensors = {f"model.{name}": tensor for name, tensor in load(tmp_path / "old").items()}
    assert ranges_hold(source.place("old", 1, 1), tensors, source.spec)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ((None, 1, 3), "the base has no expert 3 in layer 1"),
        ((None, 0, 0), "the base has no expert 0 in layer 0"),
        (("math", 1, 1), "adapter 'math' has no expert 1 in layer 1"),
        (("law", 1, 0), "adapter 'law' has no expert 0"),
    ],
)
def test_an_expert_that_is_nowhere(
    root: Path, key: tuple[str | None, int, int], message: str
) -> None:
    source = registered(root)
    with pytest.raises(InvariantError, match=message):
        source.place(*key)


def test_only_headers_are_read(root: Path) -> None:
    def num_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    num_all = sum(file.stat().st_size for file in root.rglob("*.safetensors"))
    registered(root)
    before = num_read()
    registered(root)
    assert num_read() - before < num_all / 4


def test_a_file_is_opened_once_and_closed_with_its_last_place(root: Path) -> None:
    before = open_descriptors()
    source = ExpertSource(root / "base")
    assert open_descriptors() == before + 2
    source.register("math", read_manifest(root / "math", source.spec))
    assert open_descriptors() == before + 4
    place = source.place("math", 1, 0)
    gc.disable()  # a place in a circle would be closed some time, and not now
    try:
        source.forget("math")
        assert open_descriptors() == before + 4, "one of its experts may be being read"
        place.gate.file.check_unchanged()
        del place
        assert open_descriptors() == before + 2
        del source
        assert open_descriptors() == before
    finally:
        gc.enable()


def test_owners_come_and_go(root: Path) -> None:
    source = registered(root)
    manifest = read_manifest(root / "math", source.spec)
    with pytest.raises(InvariantError, match="'math' are registered already"):
        source.register("math", manifest)
    source.register("again", manifest)
    source.forget("math")
    with pytest.raises(InvariantError, match="'math' has no expert"):
        source.place("math", 1, 0)
    with pytest.raises(InvariantError, match="'math' are not registered"):
        source.forget("math")
    assert source.place("again", 1, 0).owner == "again"


def without_a_tensor(file: Path) -> None:
    tensors = load_file(file)
    del tensors[sorted(tensors)[0]]
    save_file(tensors, file)


def in_another_type(file: Path) -> None:
    save_file({name: tensor.half() for name, tensor in load_file(file).items()}, file)


def cut_short(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


@pytest.mark.parametrize("change", [without_a_tensor, in_another_type, cut_short, Path.unlink])
def test_an_adapter_that_changed_since_it_was_validated(
    root: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    copy = copied(root, tmp_path / "copy")
    source = ExpertSource(copy / "base")
    manifest = read_manifest(copy / "math", source.spec)
    change(manifest.files[0])
    before = open_descriptors()
    with pytest.raises(AdapterFormatError) as caught:
        source.register("math", manifest)
    assert str(tmp_path) not in str(caught.value), "a client may read it"
    assert open_descriptors() == before
    with pytest.raises(InvariantError):
        source.place("math", 1, 0)


@pytest.mark.parametrize("which", ["base", "math"])
def test_a_file_that_is_replaced_between_its_header_and_its_opening(
    root: Path, tmp_path: Path, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = copied(root, tmp_path / "copy")
    source = registered(copy) if which == "base" else ExpertSource(copy / "base")
    opened = source_module.open_regular

    def late(path: Path, error: Any) -> Any:
        if path.parent.name == which:
            replace_by_copy(path)
        return opened(path, error)

    manifest = read_manifest(copy / "math", source.spec)
    monkeypatch.setattr(source_module, "open_regular", late)
    error = UnsupportedModelError if which == "base" else AdapterFormatError
    with pytest.raises(error, match="changed while it was opened"):
        ExpertSource(copy / "base") if which == "base" else source.register("math", manifest)


def replace_by_copy(path: Path, edit: Callable[[bytes], bytes] = lambda raw: raw) -> None:
    """Another inode of the same name."""
    other = path.with_suffix(".new")
    other.write_bytes(edit(path.read_bytes()))
    other.replace(path)


def test_a_base_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"no config\.json"):
        ExpertSource(tmp_path / "nothing")


def test_a_packed_file_beside_the_base_is_found(root: Path, tmp_path: Path) -> None:
    copy = copied(root, tmp_path / "copy")
    assert ExpertSource(copy / "base").packed is None
    pack_experts(copy / "base", copy / "base" / PACKED_NAME)
    source = ExpertSource(copy / "base")
    assert source.packed == copy / "base" / PACKED_NAME
    assert {file.name for file in source.place(None, 1, 0).files} == {PACKED_NAME}


def test_one_that_is_named_but_missing(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read gone"):
        ExpertSource(root / "base", tmp_path / "gone")


def test_a_filesystem_without_direct_reads_is_told_of_once(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(source_module, "_leave_page_cache", lambda fd: False)
    with caplog.at_level(logging.WARNING, source_module.__name__):
        source = registered(root)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "O_DIRECT" in caplog.text
    assert not source.place(None, 1, 0).gate.file.is_direct


def test_the_kernel_refuses_direct_reads_of_what_is_made_up() -> None:
    """The refusal itself, which no filesystem of a disk here gives."""
    with Path("/proc/self/status").open("rb") as file:
        assert source_module._leave_page_cache(file.fileno()) is False


def test_a_descriptor_really_is_direct_when_it_says_so(root: Path) -> None:
    import fcntl

    for file in ExpertSource(root / "base").place(None, 1, 0).files:
        flags = fcntl.fcntl(file.fd, fcntl.F_GETFL)
        assert bool(flags & os.O_DIRECT) == file.is_direct


def opened(path: Path) -> OpenFile:
    return OpenFile.take(path.open("rb"), path.name)


def rewritten(path: Path) -> None:
    path.write_bytes(b"y" * 100)


def longer(path: Path) -> None:
    path.write_bytes(b"x" * 101)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (rewritten, "it was written to"),
        (longer, "it had 100 bytes, now 101"),
        (lambda path: os.truncate(path, 99), "it had 100 bytes, now 99"),
    ],
)
def test_a_file_that_changes_where_it_lies(
    tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"x" * 100)
    file = opened(path)
    file.check_unchanged()
    change(path)
    with pytest.raises(ExpertReadError, match=f"weights changed while it was served: {message}"):
        file.check_unchanged()


@pytest.mark.parametrize("change", [replace_by_copy, Path.unlink, lambda p: p.rename(f"{p}.old")])
def test_a_name_that_changes_hands_is_no_change(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"x" * 100)
    file = opened(path)
    change(path)
    file.check_unchanged()


def test_config_and_tensors_must_agree(root: Path, tmp_path: Path) -> None:
    copy = copied(root, tmp_path / "copy")
    config = json.loads((copy / "base/config.json").read_text())
    (copy / "base/config.json").write_text(json.dumps({**config, "dtype": "float16"}))
    with pytest.raises(UnsupportedModelError, match="as bfloat16"):
        ExpertSource(copy / "base")


def test_what_loading_left_in_the_page_cache_is_dropped(root: Path, tmp_path: Path) -> None:
    base = shutil.copytree(root / "base", tmp_path / "base")
    os.sync()  # dirty pages stay
    shards = sorted(base.glob("*.safetensors"))
    num_bytes = sum(len(shard.read_bytes()) for shard in shards)
    source = ExpertSource(base)
    assert _cached_bytes(shards) >= num_bytes
    source.drop_page_cache()
    assert _cached_bytes(shards) < num_bytes // 4


def _cached_bytes(paths: list[Path]) -> int:
    """As util-linux counts them."""
    found = subprocess.run(
        ["fincore", "--bytes", "--noheadings", "--output", "RES", *map(str, paths)],
        capture_output=True,
        text=True,
        check=True,
    )
    return sum(map(int, found.stdout.split()))
