"""An adapter folder is read exactly or refused with the right error, whatever is in it."""

import errno
import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sgl_esft.errors import (
    AdapterFormatError,
    AdapterMismatchError,
)
from sgl_esft.formats import manifest as adapter_format
from sgl_esft.formats.manifest import (
    AdapterManifest,
    check_fits,
    content_digest,
    read_manifest,
)
from sgl_esft.formats.model_spec import PROJS, MoeSpec, read_moe_spec
from tests.support.adapter_factory import (
    BAD_ADAPTERS,
    SERVED_ARCHITECTURES,
    corrupt,
    write_random_adapter,
    write_random_base,
)

EXPERTS = {1: (3,), 2: (0, 5, 15)}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_base(tmp_path_factory.mktemp("base"), "DeepseekV2ForCausalLM", seed=1)


@pytest.fixture(scope="module")
def spec(base: Path) -> MoeSpec:
    return read_moe_spec(base)


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    return write_random_adapter(tmp_path / "adapter", base, seed=2, experts=EXPERTS)


@pytest.fixture
def manifest(adapter: Path, spec: MoeSpec) -> AdapterManifest:
    return read_manifest(adapter, spec)


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("old_prefix", [False, True])
@pytest.mark.parametrize("architecture", SERVED_ARCHITECTURES)
def test_reads_what_was_written(
    architecture: str, old_prefix: bool, num_shards: int, tmp_path: Path
) -> None:
    base = write_random_base(tmp_path / "base", architecture, seed=1)
    spec = read_moe_spec(base)
    folder = write_random_adapter(
        tmp_path / "a", base, seed=2, old_prefix=old_prefix, num_shards=num_shards
    )
    manifest = read_manifest(folder, spec)
    written: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        written |= load_file(file)
    assert manifest.num_bytes == manifest.num_experts * spec.expert_bytes
    assert len(manifest.files) == num_shards
    for key, location in manifest.tensors.items():
        name = spec.expert_tensor_name(*key)
        assert location.name == (name.removeprefix("model.") if old_prefix else name)
        assert location.shape == tuple(written[location.name].shape)
        assert location.name in load_file(location.file)


def test_numbers(manifest: AdapterManifest) -> None:
    assert manifest.experts == EXPERTS
    assert (manifest.num_experts, manifest.max_experts_per_layer) == (4, 3)
    # Layers 1, 2, 3 hold 1, 3 and 0 experts: (2 + 0 + 3) / (3 * 3).
    assert manifest.sparsity == pytest.approx(5 / 9)
    assert manifest.mean_experts_per_layer == pytest.approx(4 / 3)
    assert manifest.dtype == "float32"
    assert manifest.tensors.keys() == {
        (layer, expert, proj) for layer in EXPERTS for expert in EXPERTS[layer] for proj in PROJS
    }


def test_flags_may_be_left_out_and_empty_layers_count_as_absent(
    adapter: Path, spec: MoeSpec
) -> None:
    config = {"experts": {"3": [], "2": [15, 0, 5], "1": [3]}}
    (adapter / "expert_cfg.json").write_text(json.dumps(config))
    assert read_manifest(adapter, spec).experts == EXPERTS


def test_harmless_files_are_ignored(adapter: Path, spec: MoeSpec) -> None:
    for name in ("README.md", "tokenizer.json", "tokenizer.model", ".gitattributes"):
        (adapter / name).write_text("anything")
    (adapter / "config.json").write_text('{"architectures": ["DeepseekV2ForCausalLM"]}')
    (adapter / "runs").mkdir()
    (adapter / "runs" / "optimizer.pt").write_bytes(b"PK\x03\x04")
    (adapter / "LICENSE").symlink_to("README.md")
    assert read_manifest(adapter, spec).experts == EXPERTS


def test_header_length_may_look_like_a_pickle(adapter: Path, spec: MoeSpec) -> None:
    """A header of 0x280 bytes starts the file with 80 02, the magic of pickle protocol 2."""
    file = adapter / "model.safetensors"
    raw = file.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = raw[8:end].rstrip()
    padded = header.ljust((len(header) // 0x10000 + 1) * 0x10000 + 0x0280)
    file.write_bytes(len(padded).to_bytes(8, "little") + padded + raw[end:])
    assert file.read_bytes().startswith(b"\x80\x02")
    assert read_manifest(adapter, spec).experts == EXPERTS


@pytest.mark.parametrize("kind", BAD_ADAPTERS)
def test_bad_adapter(kind: str, adapter: Path, spec: MoeSpec) -> None:
    error = corrupt(adapter, kind)
    with pytest.raises(error) as caught:
        read_manifest(adapter, spec)
    assert type(caught.value) is error
    assert BAD_ADAPTERS[kind].message in str(caught.value)
    assert str(adapter.parent) not in str(caught.value), "a client may read the message"


@pytest.mark.parametrize(
    "kind", [kind for kind, bad in BAD_ADAPTERS.items() if not bad.needs_dense_layer]
)
def test_bad_adapter_of_a_mixtral(kind: str, tmp_path: Path) -> None:
    base = write_random_base(tmp_path / "base", "MixtralForCausalLM", seed=1)
    adapter = write_random_adapter(tmp_path / "adapter", base, seed=2)
    with pytest.raises(corrupt(adapter, kind)):
        read_manifest(adapter, read_moe_spec(base))


def test_adapter_of_another_architecture(adapter: Path) -> None:
    other = MoeSpec("MixtralForCausalLM", 4, (0, 1, 2, 3), 16, 128, 64, "float32")
    with pytest.raises(AdapterFormatError, match="of no expert"):
        read_manifest(adapter, other)


def test_check_fits(manifest: AdapterManifest) -> None:
    check_fits(manifest, 3)
    with pytest.raises(
        AdapterMismatchError, match=r"3 experts in layer 2.*--max-experts-per-adapter 3"
    ):
        check_fits(manifest, 2)


def test_digest_does_not_depend_on_the_folder(
    manifest: AdapterManifest, adapter: Path, spec: MoeSpec, tmp_path: Path
) -> None:
    copy = shutil.copytree(adapter, tmp_path / "copy")
    (copy / "README.md").write_text("not hashed")
    assert content_digest(copy) == content_digest(manifest.path)
    assert len(content_digest(manifest.path)) == 32


def _flip_last_byte(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)


CHANGES: dict[str, Callable[[Path], object]] = {
    "weights": lambda folder: _flip_last_byte(folder / "model.safetensors"),
    "config": lambda folder: _flip_last_byte(folder / "expert_cfg.json"),
    "file name": lambda folder: (folder / "model.safetensors").rename(folder / "m.safetensors"),
    "file name that is not Unicode": lambda folder: (folder / "model.safetensors").rename(
        folder / os.fsdecode(b"\xff.safetensors")
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_digest_changes(change: str, adapter: Path) -> None:
    before = content_digest(adapter)
    CHANGES[change](adapter)
    assert content_digest(adapter) != before


def test_a_file_that_breaks_while_it_is_digested_is_the_adapters_fault(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_broken(path: Path, error: type[Exception]) -> io.BufferedReader:
        class Broken(io.FileIO):
            def readinto(self, buffer: object) -> int:
                raise OSError(errno.EIO, "Input/output error")

        return io.BufferedReader(Broken(path))

    monkeypatch.setattr(adapter_format, "open_regular", open_broken)
    with pytest.raises(AdapterFormatError, match="cannot be read: Input/output error"):
        content_digest(adapter)
