"""Adapters quantised once: what a copy holds, who makes it, who waits, what is removed, failures.

Everything real: files, locks, and processes that are killed. Only a full disk is simulated.
"""

from __future__ import annotations

import errno
import gc
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sgl_esft.errors import (
    AdapterFormatError,
    AdapterNotFiniteError,
    AdapterTooLargeError,
    InvariantError,
    QuantisedCopyError,
)
from sgl_esft.formats import manifest as manifest_module
from sgl_esft.formats.expert_scheme import SCHEME_NAMES
from sgl_esft.formats.finite import check_weights
from sgl_esft.formats.manifest import AdapterManifest, content_digest, read_manifest
from sgl_esft.formats.model_spec import MoeSpec, read_moe_spec
from sgl_esft.quant import adapter_cache, adapter_copy
from sgl_esft.quant.adapter_cache import bytes_to_quantise, copy_name, quantised_copy
from sgl_esft.quant.write import quantise_checkpoint
from sgl_esft.tools.merge import merge_adapter
from tests.fast.quant.test_write import WRITTEN, load, raw, small_base
from tests.support.adapter_factory import write_random_adapter

pytestmark = pytest.mark.usefixtures("one_thread")
each_scheme = pytest.mark.parametrize("scheme", SCHEME_NAMES)


class Made:
    """A base, unquantised and in each scheme, and an adapter of it, which tests must not change."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.base = small_base(root / "base")
        self.adapter = write_random_adapter(root / "adapter", self.base, seed=5, max_experts=3)
        self.digest = content_digest(self.adapter)
        self.name = f"{self.digest}-int8-1"

    def spec(self, scheme: str) -> MoeSpec:
        folder = self.root / scheme
        if not folder.exists():
            quantise_checkpoint(self.base, scheme, folder)
        return read_moe_spec(folder)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def spec(made: Made) -> MoeSpec:
    return made.spec("int8")


@pytest.fixture
def manifest(made: Made, spec: MoeSpec) -> AdapterManifest:
    return read_manifest(made.adapter, spec)


@pytest.fixture
def versions(made: Made, spec: MoeSpec, tmp_path: Path) -> list[AdapterManifest]:
    """The adapter and others as large, of other digests."""
    found = []
    for number in range(4):
        folder = tmp_path / f"version-{number}"
        shutil.copytree(made.adapter, folder)
        with (folder / "expert_cfg.json").open("a") as config:
            config.write("\n" * number)
        found.append(read_manifest(folder, spec))
    return found


def copied(
    manifest: AdapterManifest, spec: MoeSpec, cache: Path, *options: Any, **more: Any
) -> AbstractContextManager[AdapterManifest]:
    return quantised_copy(manifest, spec, content_digest(manifest.path), cache, *options, **more)


def names(spec: MoeSpec, *manifests: AdapterManifest) -> list[str]:
    return sorted(copy_name(content_digest(each.path), spec) for each in manifests)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "not" / "there" / "yet"


def folders(cache: Path) -> list[str]:
    """All that lies in it, hidden or not, but for the lock."""
    return sorted(path.name for path in cache.iterdir() if path.name != ".lock")


def tensors_of(copy: AdapterManifest) -> dict[str, bytes]:
    """By the name in the checkpoint."""
    found = {}
    for location in (*copy.tensors.values(), *copy.scales.values()):
        tensor = load_file(location.file)[location.name]
        assert (str(tensor.dtype), tuple(tensor.shape)) == (
            f"torch.{location.dtype}",
            location.shape,
        )
        found[location.name] = raw(tensor)
    return found


@pytest.mark.parametrize(("architecture", "scheme"), WRITTEN)
@pytest.mark.parametrize("old_prefix", [False, True])
def test_a_copy_is_the_merged_checkpoint_quantised(
    tmp_path: Path, architecture: str, scheme: str, old_prefix: bool
) -> None:
    base = small_base(tmp_path / "base", architecture)
    adapter = write_random_adapter(
        tmp_path / "adapter", base, seed=5, max_experts=3, old_prefix=old_prefix, num_shards=2
    )
    merge_adapter(base, adapter, tmp_path / "merged")
    quantise_checkpoint(tmp_path / "merged", scheme, tmp_path / "merged-quantised")
    quantise_checkpoint(base, scheme, tmp_path / "quantised")
    expected = load(tmp_path / "merged-quantised")
    spec = read_moe_spec(tmp_path / "quantised")
    plain = read_manifest(adapter, spec)
    assert plain.scheme is None
    with quantised_copy(plain, spec, content_digest(adapter), tmp_path / "cache") as copy:
        seen = tensors_of(copy)
        assert copy.scheme == spec.scheme
        assert copy.experts == plain.experts
        assert copy.path == adapter
        assert copy.num_bytes == sum(map(len, seen.values()))
        check_weights("a", copy)
    listed = {
        spec.expert_part_name(key, part)
        for key in plain.tensors
        for part in spec.expert_parts(key[2])
    }
    assert seen == {name: raw(expected[name]) for name in listed}


@each_scheme
def test_a_copy_is_an_adapter_folder(made: Made, cache: Path, scheme: str) -> None:
    spec = made.spec(scheme)
    plain = read_manifest(made.adapter, spec)
    with quantised_copy(plain, spec, made.digest, cache) as copy:
        assert spec.scheme is not None
        folder = cache / f"{made.digest}-{spec.scheme.label}-1"
        assert {file.name for file in folder.iterdir()} == {"expert_cfg.json", "model.safetensors"}
        assert replace(read_manifest(folder, spec), path=made.adapter) == copy
    assert folders(cache) == [folder.name]


def test_what_a_copy_is_called(made: Made) -> None:
    names = {copy_name("ab12", made.spec(scheme)) for scheme in SCHEME_NAMES}
    assert names == {
        "ab12-int8-1",
        "ab12-fp8-128x128-1",
        "ab12-fp8-tensor-1",
        "ab12-int4-128-bfloat16-1",
    }
    assert all(adapter_cache._COPY.fullmatch(name) for name in names)


def test_the_second_time_nothing_is_read(
    made: Made, manifest: AdapterManifest, spec: MoeSpec, cache: Path
) -> None:
    read: list[int] = []
    assert bytes_to_quantise(manifest, spec, made.digest, cache) == manifest.num_bytes
    with quantised_copy(manifest, spec, made.digest, cache, read.append) as first:
        assert sum(read) == manifest.num_bytes
        assert len(read) >= len(manifest.tensors)
        assert max(read) <= 256 << 10
    read.clear()
    assert bytes_to_quantise(manifest, spec, made.digest, cache) == 0
    stamps = {file: file.stat().st_ino for file in first.files}
    with quantised_copy(manifest, spec, made.digest, cache, read.append) as second:
        assert second == first
    assert read == []
    assert stamps == {file: file.stat().st_ino for file in second.files}


def test_another_content_and_another_scheme_have_other_copies(
    made: Made, versions: list[AdapterManifest], cache: Path
) -> None:
    expected = []
    for scheme in ("int8", "int4"):
        spec = made.spec(scheme)
        for version in versions[:2]:
            with copied(version, spec, cache):
                pass
        expected += names(spec, *versions[:2])
    assert folders(cache) == sorted(expected)
    assert len(set(expected)) == 4


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an expert, however many there are."""
    monkeypatch.setattr(manifest_module, "_CHUNK_BYTES", 1 << 16)  # of digests: 8 MB otherwise
    base = small_base(tmp_path / "base", moe_intermediate_size=1024, num_hidden_layers=4)
    adapter = write_random_adapter(tmp_path / "adapter", base, seed=1, max_experts=4)
    quantise_checkpoint(base, "int8", tmp_path / "quantised")
    spec = read_moe_spec(tmp_path / "quantised")
    manifest = read_manifest(adapter, spec)
    expert = 3 * 128 * 1024 * 2
    assert manifest.num_bytes >= 6 * expert
    tracemalloc.start()
    try:
        with copied(manifest, spec, tmp_path / "cache"):
            peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * expert


# Several at once.

RANK = """
import sys, time
from pathlib import Path
from sgl_esft.formats.manifest import read_manifest
from sgl_esft.formats.model_spec import read_moe_spec
from sgl_esft.quant.adapter_cache import quantised_copy
base, adapter, digest, cache, delay = sys.argv[1:]
spec = read_moe_spec(Path(base))
read = []
def on_read(num_bytes):
    read.append(num_bytes)
    if num_bytes:
        print("reads", flush=True)
        time.sleep(float(delay))
with quantised_copy(read_manifest(Path(adapter), spec), spec, digest, Path(cache), on_read) as copy:
    print(sum(read), len(read), copy.files[0].stat().st_ino, flush=True)
"""


def start_rank(made: Made, cache: Path, delay_s: float) -> subprocess.Popen[str]:
    argv = [str(made.root / "int8"), str(made.adapter), made.digest, str(cache), str(delay_s)]
    return subprocess.Popen([sys.executable, "-c", RANK, *argv], stdout=subprocess.PIPE, text=True)


def test_one_process_writes_and_the_others_use_it(
    made: Made, manifest: AdapterManifest, cache: Path
) -> None:
    ranks = [start_rank(made, cache, 0.02) for _ in range(3)]
    last = [rank.communicate(timeout=120)[0].splitlines()[-1].split() for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks)
    assert sorted(int(num_bytes) for num_bytes, _, _ in last) == [0, 0, manifest.num_bytes]
    assert len({inode for _, _, inode in last}) == 1
    assert folders(cache) == [made.name]


def test_what_a_killed_process_left_is_made_anew(
    made: Made, manifest: AdapterManifest, spec: MoeSpec, cache: Path
) -> None:
    rank = start_rank(made, cache, 30)
    assert rank.stdout is not None
    assert rank.stdout.readline() == "reads\n"
    assert folders(cache) == [f".{made.name}.partial"]
    rank.kill()
    rank.communicate()
    with copied(manifest, spec, cache):
        assert folders(cache) == [made.name]


def test_who_waits_is_told_and_may_stop(
    made: Made, manifest: AdapterManifest, spec: MoeSpec, cache: Path
) -> None:
    """By `on_read` of no bytes."""
    rank = start_rank(made, cache, 30)
    assert rank.stdout is not None
    rank.stdout.readline()
    told: list[int] = []

    def stop(num_bytes: int) -> None:
        told.append(num_bytes)
        if len(told) == 3:
            raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt), copied(manifest, spec, cache, stop):
            pytest.fail("made while another makes it")
    finally:
        rank.kill()
        rank.communicate()
    assert told == [0, 0, 0]


def test_threads_share_a_copy(
    made: Made, manifest: AdapterManifest, spec: MoeSpec, cache: Path
) -> None:
    """Locks are of open files, not of processes."""
    read: list[int] = []
    copies = []

    def rank() -> None:
        with copied(manifest, spec, cache, read.append) as copy:
            copies.append(copy)

    threads = [threading.Thread(target=rank) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(read) == manifest.num_bytes
    assert len(copies) == 4


# How much is kept.


@pytest.fixture
def one(manifest: AdapterManifest, spec: MoeSpec) -> int:
    return adapter_cache._copy_bytes(manifest, spec)


def put(cache: Path, manifest: AdapterManifest, spec: MoeSpec, max_bytes: int) -> None:
    with copied(manifest, spec, cache, max_bytes=max_bytes):
        pass
    time.sleep(0.02)  # between two times that a file system keeps apart


def test_the_copy_used_longest_ago_makes_room(
    versions: list[AdapterManifest], spec: MoeSpec, cache: Path, one: int
) -> None:
    a, b, c, d = versions
    for version in (a, b, a, c):
        put(cache, version, spec, 2 * one)
    assert folders(cache) == names(spec, a, c)
    put(cache, d, spec, 2 * one)
    assert folders(cache) == names(spec, c, d)
    assert sum(f.stat().st_size for f in cache.rglob("*") if f.is_file()) <= 2 * one


def test_a_copy_that_is_read_stays(
    versions: list[AdapterManifest], spec: MoeSpec, cache: Path, one: int
) -> None:
    a, b, c, d = versions
    with copied(a, spec, cache, max_bytes=2 * one) as copy:
        put(cache, b, spec, 2 * one)
        put(cache, c, spec, 2 * one)
        assert folders(cache) == names(spec, a, c)
        check_weights("a", copy)
        message = r"has no room beside .* read now.*: raise --quantised-adapters-bytes"
        with pytest.raises(QuantisedCopyError, match=message):
            put(cache, d, spec, one)
    put(cache, d, spec, one)
    assert folders(cache) == names(spec, d)


def test_nothing_of_anybody_elses_is_removed(
    versions: list[AdapterManifest], spec: MoeSpec, cache: Path, one: int
) -> None:
    """Somebody may name their home."""
    mine = [cache / name for name in (".ssh", "models", ".x.partial", "abc-int8", "aa-int8-1x")]
    for folder in mine:
        folder.mkdir(parents=True)
        (folder / "key").write_text("k" * one)
    (cache / "file").write_text("f" * one)
    for version in versions[:2]:
        put(cache, version, spec, one)
    expected = [*names(spec, versions[1]), "file", *(each.name for each in mine)]
    assert folders(cache) == sorted(expected)
    assert all((each / "key").exists() for each in mine)


def test_an_adapter_that_is_too_large(
    manifest: AdapterManifest, spec: MoeSpec, cache: Path, one: int
) -> None:
    message = "raise --quantised-adapters-bytes, or store the adapter quantised"
    with (
        pytest.raises(AdapterTooLargeError, match=message),
        quantised_copy(manifest, spec, "aa", cache, max_bytes=one - 1),
    ):
        pytest.fail("it is too large")
    assert not cache.exists()


# What goes wrong.


def fails(
    error: type[Exception],
    message: str,
    manifest: AdapterManifest,
    spec: MoeSpec,
    cache: Path,
    **options: Any,
) -> None:
    """And nothing is left of it."""
    with (
        pytest.raises(error, match=message),
        quantised_copy(manifest, spec, "aa", cache, **options),
    ):
        pytest.fail("it was made")
    assert not cache.exists() or folders(cache) == []


@each_scheme
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_an_adapter_that_is_not_finite(
    made: Made, tmp_path: Path, cache: Path, scheme: str, value: float
) -> None:
    spec = made.spec(scheme)
    adapter = tmp_path / "spoilt"
    shutil.copytree(made.adapter, adapter)
    tensors = load_file(adapter / "model.safetensors")
    name = sorted(name for name in tensors if name.endswith("up_proj.weight"))[-1]
    tensors[name][-1, -1] = value
    save_file(tensors, adapter / "model.safetensors", metadata={"format": "pt"})
    layer, expert = name.split(".")[2], name.split(".")[5]
    message = rf"adapter 'spoilt' has a NaN or an infinity in layer {layer}, expert {expert}, up"
    fails(AdapterNotFiniteError, message, read_manifest(adapter, spec), spec, cache)


@pytest.mark.parametrize("num_left", [0.5, 0.99])
def test_a_file_that_is_cut_short(
    made: Made, spec: MoeSpec, tmp_path: Path, cache: Path, num_left: float
) -> None:
    adapter = tmp_path / "a"
    shutil.copytree(made.adapter, adapter)
    manifest = read_manifest(adapter, spec)
    file = adapter / "model.safetensors"
    cut = int(file.stat().st_size * num_left)

    def on_read(num_bytes: int) -> None:
        os.truncate(file, cut)

    message = "model.safetensors was cut short since it was validated"
    fails(AdapterFormatError, message, manifest, spec, cache, on_read=on_read)
    fails(AdapterFormatError, "model.safetensors is damaged", manifest, spec, cache)


def test_a_file_that_changed(made: Made, spec: MoeSpec, tmp_path: Path, cache: Path) -> None:
    adapter = tmp_path / "a"
    shutil.copytree(made.adapter, adapter)
    manifest = read_manifest(adapter, spec)
    tensors = load_file(adapter / "model.safetensors")
    name = next(iter(tensors))
    tensors[name] = tensors[name].float()
    save_file(tensors, adapter / "model.safetensors", metadata={"format": "pt"})
    message = f"{name} changed since it was validated: it is now float32"
    fails(AdapterFormatError, message, manifest, spec, cache)
    (adapter / "model.safetensors").unlink()
    fails(AdapterFormatError, "cannot read model.safetensors", manifest, spec, cache)


def test_a_folder_that_is_overwritten_meanwhile(
    made: Made, spec: MoeSpec, tmp_path: Path, cache: Path
) -> None:
    """With weights that would be sound: the copy would have the name of what was there before."""
    adapter = tmp_path / "a"
    shutil.copytree(made.adapter, adapter)
    manifest = read_manifest(adapter, spec)
    digest = content_digest(adapter)
    file = adapter / "model.safetensors"

    def overwrite(num_bytes: int) -> None:
        with file.open("r+b") as stream:
            stream.seek(-2, os.SEEK_END)
            stream.write(b"\0\0")

    with (
        pytest.raises(AdapterFormatError, match="a changed while it was quantised: load it again"),
        quantised_copy(manifest, spec, digest, cache, overwrite),
    ):
        pytest.fail("it was made")
    assert folders(cache) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError, ValueError])
def test_who_reads_may_stop(
    manifest: AdapterManifest, spec: MoeSpec, cache: Path, error: type[Exception]
) -> None:
    left = iter(range(5))

    def stop(num_bytes: int) -> None:
        if next(left, None) is None:
            raise error("enough")

    fails(error, "enough", manifest, spec, cache, on_read=stop)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (errno.ENOSPC, "No space left on device. Name a folder"),
        (errno.EDQUOT, "Disk quota exceeded"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_a_disk_that_fills_up(
    manifest: AdapterManifest,
    spec: MoeSpec,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    message: str,
) -> None:
    """Simulated: there is no disk here to fill."""
    make, left = adapter_copy.raw_bytes, iter(range(7))

    def full(tensor: torch.Tensor) -> memoryview:
        if next(left, None) is None:
            raise OSError(code, os.strerror(code))
        return make(tensor)

    monkeypatch.setattr(adapter_copy, "raw_bytes", full)
    fails(QuantisedCopyError, message, manifest, spec, cache)


def test_a_file_that_may_not_grow(manifest: AdapterManifest, spec: MoeSpec, cache: Path) -> None:
    """The system's own refusal of a write."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        fails(QuantisedCopyError, "File too large", manifest, spec, cache)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that everybody can come to, as pytest's own are not."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder) / "cache"


@contextmanager
def nobody() -> Iterator[None]:
    """Root may write everywhere."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)


def test_a_folder_that_cannot_be_written(
    made: Made, manifest: AdapterManifest, spec: MoeSpec, public: Path
) -> None:
    """What is there can be read all the same."""
    with quantised_copy(manifest, spec, made.digest, public):
        pass
    public.chmod(0o555)
    message = r"cannot hold the adapter's quantised copy: Permission denied\. Name a folder"
    with nobody():
        with quantised_copy(manifest, spec, made.digest, public) as copy:
            check_weights("a", copy)
        with (
            pytest.raises(QuantisedCopyError, match=message),
            quantised_copy(manifest, spec, "aa", public),
        ):
            pytest.fail("it was written")
    public.chmod(0o755)


def test_copies_of_somebody_else_are_not_removed(
    made: Made, versions: list[AdapterManifest], spec: MoeSpec, public: Path, one: int
) -> None:
    put(public, versions[0], spec, one)
    (public / ".lock").unlink()
    public.chmod(0o777)
    with (
        nobody(),
        pytest.raises(QuantisedCopyError, match=r"has no room beside .* of others"),
        quantised_copy(versions[1], spec, "aa", public, max_bytes=one),
    ):
        pytest.fail("there is no room")
    assert folders(public) == names(spec, versions[0])


def test_a_file_in_the_place_of_the_folder(
    manifest: AdapterManifest, spec: MoeSpec, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("")
    message = f"{tmp_path / 'cache'} cannot hold the adapter's quantised copy: (Not a dir|File ex)"
    with (
        pytest.raises(QuantisedCopyError, match=message),
        quantised_copy(manifest, spec, "aa", tmp_path / "cache"),
    ):
        pytest.fail("it was written")


def truncate(copy: Path) -> None:
    os.truncate(copy / "model.safetensors", 5000)


def without_weights(copy: Path) -> None:
    (copy / "model.safetensors").unlink()


def without_config(copy: Path) -> None:
    (copy / "expert_cfg.json").unlink()


def unquantised(copy: Path) -> None:
    """As it cannot have been written; the name promises a scheme."""
    source = copy.parent.parent / "plain"
    for file in copy.iterdir():
        shutil.copyfile(source / file.name, file)


@pytest.mark.parametrize("spoil", [truncate, without_weights, without_config, unquantised])
def test_a_copy_that_was_spoilt_is_made_anew(
    made: Made, manifest: AdapterManifest, spec: MoeSpec, tmp_path: Path, spoil: Any
) -> None:
    shutil.copytree(made.adapter, tmp_path / "plain")
    cache = tmp_path / "cache"
    with copied(manifest, spec, cache) as copy:
        expected = tensors_of(copy)
    spoil(cache / made.name)
    with copied(manifest, spec, cache) as copy:
        assert tensors_of(copy) == expected
    assert folders(cache) == [made.name]


def test_only_what_needs_a_copy_has_one(
    made: Made, manifest: AdapterManifest, spec: MoeSpec, cache: Path
) -> None:
    plain = read_moe_spec(made.base)
    fails(InvariantError, "needs none", read_manifest(made.adapter, plain), plain, cache)
    with copied(manifest, spec, cache) as copy:
        pass
    fails_message = "needs none"
    with (
        pytest.raises(InvariantError, match=fails_message),
        quantised_copy(copy, spec, "aa", cache),
    ):
        pytest.fail("a copy of a copy")


@pytest.fixture(scope="module", autouse=True)
def _others_garbage_is_gone() -> Iterator[None]:
    """Collections look at this module's objects alone then: all that is imported takes long."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _no_descriptor_is_left() -> Iterator[None]:
    gc.collect()  # what another test left would be closed meanwhile
    before = len(list(Path("/proc/self/fd").iterdir()))
    yield
    assert len(list(Path("/proc/self/fd").iterdir())) == before
