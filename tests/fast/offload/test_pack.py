"""`sgl-esft pack`: each expert in one aligned run; all or nothing; no number in it is trusted."""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sgl_esft.errors import ConfigError, UnsupportedModelError
from sgl_esft.formats.checkpoint import open_checkpoint
from sgl_esft.formats.model_spec import PROJS
from sgl_esft.offload import pack
from sgl_esft.offload.pack import ALIGNMENT, PACKED_NAME, PackedLayout, pack_experts, read_layout
from sgl_esft.offload.source import ExpertSource
from sgl_esft.tools import base_cli
from tests.fast.conftest import SMALL
from tests.fast.offload.test_source import as_bytes, copied, load
from tests.support.adapter_factory import write_random_base

Header = dict[str, Any]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base of two shards whose experts are no whole number of pages, and `packed` of it."""
    root = tmp_path_factory.mktemp("pack")
    write_random_base(root / "base", "DeepseekV2ForCausalLM", seed=1, num_shards=2, **SMALL)
    pack_experts(root / "base", root / "packed")
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    """One to be written to."""
    return copied(made, tmp_path / "copy")


def layout_of(root: Path) -> PackedLayout:
    return read_layout(root / "packed", open_checkpoint(root / "base"))


def test_every_expert_is_one_aligned_run(made: Path) -> None:
    layout, raw, tensors = layout_of(made), (made / "packed").read_bytes(), load(made / "base")
    spec = layout.spec
    starts = set()
    for layer in spec.moe_layer_ids:
        for expert in range(spec.num_experts):
            names = [spec.expert_tensor_name(layer, expert, proj) for proj in PROJS]
            run = b"".join(as_bytes(tensors[name]) for name in names)
            start = layout.start_of(layer, expert)
            assert start % ALIGNMENT == 0
            assert raw[start : start + len(run)] == run
            assert not any(raw[start + len(run) : start + layout.stride])
            starts.add(start)
    assert len(starts) == len(spec.moe_layer_ids) * spec.num_experts
    assert len(raw) == layout.num_bytes == max(starts) + layout.stride


def test_of_what_the_file_says_it_is(made: Path) -> None:
    header = header_of(made / "packed")
    assert (header["version"], header["dtype"], header["num_experts"]) == (1, "float32", 8)
    names = [entry["name"] for entry in header["base_files"]]
    assert names == sorted(file.name for file in (made / "base").glob("*.safetensors"))


def header_of(packed: Path) -> Header:
    raw = packed.read_bytes()
    found: Header = json.loads(raw[16 : 16 + int.from_bytes(raw[8:16], "little")])
    return found


def rewrite_header(packed: Path, edit: Callable[[Header], object]) -> None:
    raw = packed.read_bytes()
    end = 16 + int.from_bytes(raw[8:16], "little")
    header = header_of(packed)
    edit(header)
    text = json.dumps(header).encode()
    block = raw[:8] + len(text).to_bytes(8, "little") + text
    body = raw[pack.align_up(end) :]
    packed.write_bytes(block.ljust(pack.align_up(len(block)), b"\0") + body)


def test_rewriting_changes_nothing_by_itself(root: Path) -> None:
    rewrite_header(root / "packed", lambda header: None)
    layout_of(root)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("format", "other", "its format is 'other'"),
        ("version", 2, "its version is 2, not 1"),
        ("dtype", "bfloat16", "its dtype is 'bfloat16', not 'float32'"),
        ("hidden_size", 1 << 62, "its hidden_size is"),
        ("expert_intermediate_size", 0, "its expert_intermediate_size is 0, not 8"),
        ("moe_layer_ids", [1, 2], "its moe_layer_ids is"),
        ("num_experts", -1, "its num_experts is -1, not 8"),
        ("stride", 10**30, "its stride is"),
        ("base_files", [], r"its base_files is \[\]"),
        ("samples", None, "its samples is None"),
        ("more", {"x": "y" * 1000}, r"its more is .*\.\.\., not None"),
    ],
)
def test_a_header_that_says_another_thing(root: Path, key: str, value: Any, message: str) -> None:
    rewrite_header(root / "packed", lambda header: header.update({key: value}))
    with pytest.raises(ConfigError, match=f"packed does not fit the base: {message}") as caught:
        ExpertSource(root / "base", root / "packed")
    assert "sgl-esft pack" in str(caught.value), "the remedy"


def test_a_header_that_lacks_something(root: Path) -> None:
    rewrite_header(root / "packed", lambda header: header.pop("samples"))
    with pytest.raises(ConfigError, match="its samples is None"):
        layout_of(root)


def edited(packed: Path, at: int, new: bytes) -> None:
    with packed.open("r+b") as file:
        file.seek(at)
        file.write(new)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: p.write_bytes(b""), r"packed \(0 bytes\) is no file that"),
        (lambda p: edited(p, 0, b"X"), "is no file that"),
        (lambda p: os.truncate(p, 12), "a header of 0 bytes in 12|a header of"),
        (lambda p: edited(p, 8, b"\xff" * 8), "a header of 18446744073709551615 bytes"),
        (lambda p: edited(p, 8, bytes(8)), "a header of 0 bytes"),
        (lambda p: edited(p, 8, (17 << 20).to_bytes(8, "little")), "a header of 17825792 bytes"),
        (lambda p: edited(p, 16, b"["), "is not valid JSON"),
        (lambda p: os.truncate(p, p.stat().st_size - 1), "it is damaged"),
        (lambda p: os.truncate(p, p.stat().st_size + 1), "it is damaged"),
        (Path.unlink, "cannot read packed"),
        (lambda p: (p.unlink(), p.mkdir()), "is not a regular file"),
    ],
)
def test_a_damaged_file(root: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(root / "packed")
    with pytest.raises(ConfigError, match=message):
        ExpertSource(root / "base", root / "packed")


def other_bytes_of_one_expert(base: Path) -> None:
    """As merging an adapter does: equal headers, and only tuned experts differ."""
    shard = next(iter(sorted(base.glob("*.safetensors"))))
    tensors = load_file(shard)
    name = next(name for name in sorted(tensors) if "mlp.experts.5.gate_proj" in name)
    tensors[name] += 1
    before = shard.stat()
    save_file(tensors, shard, metadata={"format": "pt"})
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))


def another_tensor(base: Path) -> None:
    shard = next(iter(sorted(base.glob("*.safetensors"))))
    save_file({**load_file(shard), "extra": torch.zeros(1)}, shard, metadata={"format": "pt"})
    index = base / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["extra"] = shard.name
    index.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "key"), [(other_bytes_of_one_expert, "samples"), (another_tensor, "base_files")]
)
def test_what_was_packed_from_another_base(
    root: Path, change: Callable[[Path], None], key: str
) -> None:
    change(root / "base")
    with pytest.raises(ConfigError, match=f"its {key} is"):
        ExpertSource(root / "base", root / "packed")


def test_a_copy_of_the_base_is_the_same_base(root: Path) -> None:
    for shard in (root / "base").glob("*.safetensors"):
        os.utime(shard, (0, 0))
    ExpertSource(root / "base", root / "packed")


class Full:
    """A disk that has room for a few bytes."""

    def __init__(self, stream: Any, num_free: int, error: int) -> None:
        self._stream, self._num_free, self._error = stream, num_free, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __enter__(self) -> Full:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def write(self, data: bytes) -> int:
        self._num_free -= len(data)
        if self._num_free < 0:
            raise OSError(self._error, os.strerror(self._error))
        return int(self._stream.write(data))


@pytest.mark.parametrize("num_free", [0, 5000, 40_000])
@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (errno.ENOSPC, ConfigError),
        (errno.EDQUOT, ConfigError),
        (errno.EFBIG, ConfigError),
        (errno.EIO, OSError),
    ],
)
def test_a_disk_that_is_full_in_the_middle(
    root: Path,
    num_free: int,
    error: int,
    raised: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = Path.open
    monkeypatch.setattr(
        Path,
        "open",
        lambda path, mode="r", *rest: (
            Full(opened(path, mode), num_free, error) if mode == "xb" else opened(path, mode, *rest)
        ),
    )
    before = sorted(root.rglob("*"))
    with pytest.raises(raised) as caught:
        pack_experts(root / "base", root / "new")
    if raised is ConfigError:
        assert "needs 0.10 MB" in str(caught.value)
        assert os.strerror(error) in str(caught.value)
        assert "--out" in str(caught.value)
    assert sorted(root.rglob("*")) == before, "no file is left"
    monkeypatch.undo()
    pack_experts(root / "base", root / "new")


def test_too_little_room_is_told_before_anything_is_written(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = argparse.Namespace(free=10_000)
    monkeypatch.setattr(pack.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(ConfigError, match=r"needs 0\.10 MB, but 0\.01 MB are free"):
        pack_experts(root / "base", root / "new", lambda done, total: pytest.fail("it was written"))
    assert not (root / "new").exists()


def test_a_base_that_changes_meanwhile(root: Path) -> None:
    def touch(done: int, total: int) -> None:
        if done == total:
            other_bytes_of_one_expert(root / "base")

    with pytest.raises(ConfigError, match="changed while it was packed"):
        pack_experts(root / "base", root / "new", touch)
    assert not list(root.glob("*new*"))


def test_an_interrupt_leaves_nothing(root: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack_experts(root / "base", root / "new", interrupt)
    assert not list(root.glob("*new*"))
    assert not list(root.glob(".new*"))


def test_nothing_is_written_over(root: Path) -> None:
    before = (root / "packed").read_bytes()
    with pytest.raises(ConfigError, match="exists: name another --out"):
        pack_experts(root / "base", root / "packed")
    assert (root / "packed").read_bytes() == before
    (root / ".new.partial").write_bytes(b"another run's")
    with pytest.raises(ConfigError, match="another run is writing"):
        pack_experts(root / "base", root / "new")
    assert (root / ".new.partial").read_bytes() == b"another run's"


def test_no_base(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError):
        pack_experts(tmp_path / "nothing", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    base_cli.configure_pack(parser)
    return base_cli.run_pack(parser.parse_args(argv))


def test_the_command(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(root / "base"), "--out", str(root / "deep/new")) == 0
    printed = capsys.readouterr()
    assert f"to {root / 'deep/new'}" in printed.out
    assert "wrote 24 experts of 3 layers (0.10 MB)" in printed.out
    lines = printed.err.splitlines()
    assert len(lines) == 10
    assert lines[-1] == "packed 100 %: 24 of 24 experts"
    assert (root / "deep/new").read_bytes() == (root / "packed").read_bytes()


def test_the_command_writes_beside_the_base(root: Path) -> None:
    assert run(str(root / "base")) == 0
    assert ExpertSource(root / "base").packed == root / "base" / PACKED_NAME


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_one_line_is_rewritten(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    run(str(root / "base"))
    text = terminal.getvalue()
    assert text.count("\r") == 24
    assert text.endswith("\rpacked 100 %: 24 of 24 experts\n")
    assert text.count("\n") == 1


def test_an_error_begins_a_line_of_its_own(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    real = base_cli.pack_experts

    def broken(base: Path, out: Path, on_progress: pack.OnProgress) -> PackedLayout:
        real(base, out, lambda done, total: on_progress(done, 2 * total))
        raise ConfigError("x")

    monkeypatch.setattr(base_cli, "pack_experts", broken)
    with pytest.raises(ConfigError):
        run(str(root / "base"))
    assert terminal.getvalue().endswith("packed  50 %: 24 of 48 experts\n")
