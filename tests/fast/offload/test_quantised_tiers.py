"""Experts in int8 in tiers: their scales come with them, from files, copies and packed files.

What a row must hold is said by `lay_out`, over tensors that safetensors itself has read; layers of
SGLang's own are in tests/fast/layer/test_tiered_int8.py.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sgl_esft.errors import (
    AdapterFormatError,
    AdapterNotFiniteError,
    ConfigError,
    ExpertReadError,
    InvariantError,
    QuantisedCopyError,
    UnsupportedModelError,
)
from sgl_esft.formats.manifest import read_manifest
from sgl_esft.formats.model_spec import PROJS, MoeSpec, Proj, read_moe_spec
from sgl_esft.formats.safetensors_header import read_header
from sgl_esft.offload import source as source_module
from sgl_esft.offload.pack import ALIGNMENT, open_base, pack_experts, read_layout
from sgl_esft.offload.reader import ExpertReader
from sgl_esft.offload.source import ByteRange, ExpertPlace, ExpertSource
from sgl_esft.offload.stored_adapter import Copies, StoredAdapter, find_stored
from sgl_esft.platform.moe import FAILED
from sgl_esft.quant.adapter_copy import quantise_adapter, quantised_bytes
from sgl_esft.quant.rounding import Parts
from sgl_esft.quant.write import quantise_checkpoint
from sgl_esft.tools.cli import main
from sgl_esft.weave.quantised_experts import lay_out
from tests.fast.offload.test_reader import Spy, io_error, nothing, page_aligned, short, written_over
from tests.fast.offload.test_source import copied, load
from tests.fast.offload.tiers import open_rank
from tests.support.adapter_factory import write_random_adapter, write_random_base

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, HIDDEN, NUM_EXPERTS = 96, 128, 8
WHOLE = range(WIDTH)
HALVES = [range(WIDTH // 2), range(WIDTH // 2, WIDTH)]
EXPERTS = {1: (0, 2), 2: (1,)}
NUM_PARTS = 4  # numbers of three projections at once, then each one's scales

Rows = tuple[torch.Tensor, ...]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bf16/base and bf16/math, their int8 forms, and the base packed. Not to be written to."""
    root = tmp_path_factory.mktemp("int8")
    sizes: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "moe_intermediate_size": WIDTH,
        "n_routed_experts": NUM_EXPERTS,
        "num_hidden_layers": 3,
        "intermediate_size": 64,
        "vocab_size": 300,
        "dtype": "bfloat16",
    }
    base = write_random_base(root / "bf16", "DeepseekV2ForCausalLM", seed=1, **sizes)
    quantise_checkpoint(base, "int8", root / "base")
    write_random_adapter(root / "math", base, seed=2, experts=EXPERTS)
    spec = read_moe_spec(root / "base")
    quantise_adapter(read_manifest(root / "math", spec), spec, root / "stored")
    pack_experts(root / "base", root / "packed")
    return root


@pytest.fixture
def spec(root: Path) -> MoeSpec:
    return read_moe_spec(root / "base")


def copies_in(folder: Path, max_bytes: int | None = None) -> Copies:
    return Copies(folder / "copies", max_bytes)


def registered(root: Path, tmp_path: Path, kind: str) -> tuple[ExpertSource, str | None, Path]:
    """A source, whose expert to ask it for, and the folder of that expert's tensors."""
    if kind == "packed":
        return ExpertSource(root / "base", root / "packed"), None, root / "base"
    source = ExpertSource(root / "base")
    if kind == "base":
        return source, None, root / "base"
    folder = root / ("math" if kind == "copied" else "stored")
    manifest = read_manifest(folder, source.spec)
    stored = find_stored(manifest, source.spec, copies_in(tmp_path))
    source.register("math", stored.manifest)
    return source, "math", root / "stored"


def rows_for(width: range, shift: int = 0) -> Rows:
    """In memory that holds nobody's numbers, and scales that would pass for some."""
    numbers = [(2 * len(width), HIDDEN), (HIDDEN, len(width))]
    w13, w2 = (page_aligned(shape, torch.int8, shift) for shape in numbers)
    scales = (page_aligned((n, 1), torch.float32, shift) for n in (2 * len(width), HIDDEN))
    return w13, w2, *scales


def wanted_rows(
    folder: Path, place: ExpertPlace, spec: MoeSpec, width: range, is_up_first: bool = False
) -> Rows:
    tensors = load(folder)
    order: tuple[Proj, ...] = ("up", "gate", "down") if is_up_first else PROJS
    parts: dict[Proj, Parts] = {}
    for name, proj in zip(PROJS, order, strict=True):
        key = place.layer_id, place.expert_id, proj
        names = {p.suffix: spec.expert_part_name(key, p) for p in spec.expert_parts(proj)}
        parts[name] = {suffix: tensors[tensor] for suffix, tensor in names.items()}
    assert spec.scheme is not None
    return lay_out(parts, spec.scheme, width).tensors


def are_equal(found: Rows, wanted: Rows) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


# Places and rows


@pytest.mark.parametrize("kind", ["base", "packed", "stored", "copied", "cached"])
@pytest.mark.parametrize("is_up_first", [False, True])
@pytest.mark.parametrize("width", [WHOLE, *HALVES], ids=["whole", "left", "right"])
def test_rows_are_the_tensors_with_their_scales(
    root: Path,
    tmp_path: Path,
    kind: str,
    is_up_first: bool,
    width: range,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if kind == "cached":
        monkeypatch.setattr(source_module, "_leave_page_cache", lambda fd: False)
    kind = kind.replace("cached", "base")
    source, owner, folder = registered(root, tmp_path, kind)
    reader, rows = ExpertReader(width, is_up_first, torch.int8), rows_for(width)
    for layer, experts in EXPERTS.items():
        for expert in experts:  # each in the row of the last
            place = source.place(owner, layer, expert)
            reader.read(place, *rows)
            assert are_equal(rows, wanted_rows(folder, place, source.spec, width, is_up_first))


def test_numbers_of_a_packed_file_go_straight_into_their_rows(root: Path) -> None:
    calls: list[list[int]] = []

    def preadv(fd: int, buffers: list[Any], offset: int) -> int:
        calls.append([np.frombuffer(buffer, np.uint8).ctypes.data for buffer in buffers])
        return os.preadv(fd, buffers, offset)

    rows = rows_for(WHOLE)
    place = ExpertSource(root / "base", root / "packed").place(None, 1, 3)
    ExpertReader(WHOLE, False, torch.int8, os_preadv=preadv).read(place, *rows)
    half = rows[0].data_ptr() + rows[0].nbytes // 2
    assert calls[0] == [rows[0].data_ptr(), half, rows[1].data_ptr()], "in one read"
    assert len(calls) == NUM_PARTS


@pytest.mark.parametrize(
    "spoil",
    [
        lambda rows: rows[:2],
        lambda rows: (*rows[:3], rows[3].bfloat16()),
        lambda rows: (*rows[:2], rows[3], rows[2]),
        lambda rows: (rows[0].float(), *rows[1:]),
    ],
    ids=["none", "type", "swapped", "numbers"],
)
def test_rows_that_do_not_fit(root: Path, spoil: Callable[[Rows], Rows]) -> None:
    spy = Spy()
    reader = ExpertReader(WHOLE, False, torch.int8, os_preadv=spy)
    with pytest.raises(InvariantError, match=r"rows .* expert of int8 \[96, 128\]"):
        reader.read(ExpertSource(root / "base").place(None, 1, 0), *spoil(rows_for(WHOLE)))
    assert spy.calls == []


def test_scales_of_an_expert_without_any(root: Path) -> None:
    reader = ExpertReader(WHOLE, False, torch.bfloat16)
    rows = tuple(row.bfloat16() if row.dtype is torch.int8 else row for row in rows_for(WHOLE))
    with pytest.raises(InvariantError, match=r"rows .* expert of bfloat16"):
        reader.read(ExpertSource(root / "bf16").place(None, 1, 0), *rows)


# Faults


@pytest.mark.parametrize("number", range(1, NUM_PARTS + 1))
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (io_error, r"cannot be read at byte \d+: Input/output error"),
        (short, r"gave \d+ of \d+ bytes at byte \d+"),
        (nothing, r"gave 0 of \d+ bytes at byte \d+"),
    ],
)
def test_a_fault_at_numbers_or_scales(
    root: Path, spec: MoeSpec, fault: Callable[..., int], reason: str, number: int
) -> None:
    """No scale of the row's last tenant is left, and the next read is right."""
    source, rows = ExpertSource(root / "base"), rows_for(WHOLE)
    spy = Spy({NUM_PARTS + number: fault})
    reader = ExpertReader(WHOLE, False, torch.int8, os_preadv=spy)
    reader.read(source.place(None, 1, 0), *rows)
    place = source.place(None, 1, 1)
    with pytest.raises(ExpertReadError, match=r"^model\S*\.safetensors " + reason) as caught:
        reader.read(place, *rows)
    assert caught.value.http_status == 503
    assert len(spy.calls) == NUM_PARTS + number
    assert reader.counts.num_experts == 1
    assert bool(rows[3].isnan().all())
    assert number > 2 or bool(rows[2].isnan().all())
    reader.read(place, *rows)
    assert are_equal(rows, wanted_rows(root / "base", place, spec, WHOLE))


def test_a_file_that_changes_while_scales_are_read(root: Path, tmp_path: Path) -> None:
    copy = copied(root, tmp_path / "copy")
    place = ExpertSource(copy / "base").place(None, 2, 2)
    file = file_in(copy / "base")

    def read_and_change(fd: int, buffers: list[Any], offset: int) -> int:
        num_read = os.preadv(fd, buffers, offset)
        written_over(file)
        return num_read

    spy = Spy({NUM_PARTS: read_and_change})
    reader = ExpertReader(WHOLE, False, torch.int8, os_preadv=spy)
    with pytest.raises(ExpertReadError, match="changed while it was served"):
        reader.read(place, *rows_for(WHOLE))


def file_in(folder: Path) -> Path:
    (file,) = folder.glob("*.safetensors")
    return file


def put_value(file: Path, part: ByteRange, index: int, value: float) -> None:
    with file.open("r+b") as stream:
        stream.seek(part.start + index * 4)
        stream.write(torch.tensor([value]).numpy().tobytes())


@pytest.mark.parametrize("proj", PROJS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("folder", "owner", "error"),
    [
        ("base", None, ExpertReadError),
        ("stored", "math", AdapterNotFiniteError),
    ],
)
def test_a_scale_that_is_no_number(
    root: Path,
    tmp_path: Path,
    proj: Proj,
    value: float,
    folder: str,
    owner: str | None,
    error: type[Exception],
) -> None:
    """The base's too: with all experts in memory the server would not start."""
    copy = copied(root, tmp_path / "copy")
    source = registered(copy, tmp_path, folder)[0]
    scales = source.place(owner, 1, 2).scales
    assert scales is not None
    put_value(file_in(copy / folder), scales[PROJS.index(proj)], 5, value)
    source = registered(copy, tmp_path, folder)[0]
    reader = ExpertReader(WHOLE, False, torch.int8)
    with pytest.raises(error, match=f"layer 1, expert 2, {proj} projection"):
        reader.read(source.place(owner, 1, 2), *rows_for(WHOLE))


def without_a_scale(file: Path) -> str:
    """Remove one; its name."""
    tensors = load_file(file)
    gone = str(next(n for n in tensors if n.endswith("experts.2.up_proj.weight_scale")))
    del tensors[gone]
    save_file(tensors, file, metadata={"format": "pt"})
    return gone


def test_a_scale_that_is_missing(root: Path, tmp_path: Path) -> None:
    copy = copied(root, tmp_path / "copy")
    gone = without_a_scale(file_in(copy / "base"))
    with pytest.raises(UnsupportedModelError, match=gone):
        ExpertSource(copy / "base")
    source = ExpertSource(root / "base")
    manifest = read_manifest(copy / "stored", source.spec)
    gone = without_a_scale(file_in(copy / "stored"))
    with pytest.raises(AdapterFormatError, match=f"{gone} changed.* gone"):
        source.register("math", manifest)
    with pytest.raises(InvariantError, match="has no expert"):
        source.place("math", 1, 2)


# Packed files


def test_a_packed_expert_is_numbers_and_then_scales(root: Path, spec: MoeSpec) -> None:
    layout = read_layout(root / "packed", open_base(root / "base", "pack"))
    tensors, raw = load(root / "base"), (root / "packed").read_bytes()
    assert layout.stride % ALIGNMENT == 0
    assert layout.stride >= spec.expert_bytes == 3 * WIDTH * HIDDEN + 4 * (2 * WIDTH + HIDDEN)
    for layer in spec.moe_layer_ids:
        for expert in range(NUM_EXPERTS):
            names = [
                spec.expert_part_name((layer, expert, proj), spec.expert_parts(proj)[number])
                for number in range(2)
                for proj in PROJS
            ]
            run = b"".join(tensors[name].numpy().tobytes() for name in names)
            start = layout.start_of(layer, expert)
            assert raw[start : start + len(run)] == run


def test_what_was_packed_from_a_base_with_other_scales(root: Path, tmp_path: Path) -> None:
    """Numbers alone do not tell an expert from one that is twice as large."""
    copy = copied(root, tmp_path / "copy")
    file = file_in(copy / "base")
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("experts.3.gate_proj.weight_scale"))
    with file.open("r+b") as stream:  # nothing else of the file changes
        stream.seek(read_header(file).tensors[name].start)
        stream.write((2 * tensors[name]).numpy().tobytes())
    with pytest.raises(ConfigError, match="does not fit the base: its samples"):
        ExpertSource(copy / "base", copy / "packed")


def test_a_packed_base_that_is_not_quantised_is_another(root: Path, tmp_path: Path) -> None:
    pack_experts(root / "bf16", tmp_path / "packed")
    with pytest.raises(ConfigError, match="its scheme is None, not 'int8'"):
        ExpertSource(root / "base", tmp_path / "packed")


@pytest.mark.parametrize("scheme", ["fp8-tensor", "int4"])
def test_other_schemes_are_refused(root: Path, tmp_path: Path, scheme: str) -> None:
    quantise_checkpoint(root / "bf16", scheme, tmp_path / scheme)
    words = f"quantised base, whose routed experts are in {scheme}.*, or one in int8"
    with pytest.raises(UnsupportedModelError, match=f"--expert-cache .*{words}"):
        ExpertSource(tmp_path / scheme)
    with pytest.raises(UnsupportedModelError, match=f"pack .*{words}"):
        pack_experts(tmp_path / scheme, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


# Adapters


def test_an_adapter_in_another_scheme_than_the_base_is_no_place(root: Path, spec: MoeSpec) -> None:
    source = ExpertSource(root / "base")
    with pytest.raises(InvariantError, match="not quantised as the base"):
        source.register("math", read_manifest(root / "math", spec))


def test_an_unquantised_adapter_is_served_from_its_copy(
    root: Path, tmp_path: Path, spec: MoeSpec
) -> None:
    sizes: list[int] = []
    read: list[int] = []
    manifest = read_manifest(root / "math", spec)
    stored = find_stored(manifest, spec, copies_in(tmp_path), sizes.append, read.append)
    assert sizes == [manifest.num_bytes] == [sum(read)]
    assert stored.manifest.path == root / "math"
    assert stored.manifest.scheme == spec.scheme
    assert {file.parents[1] for file in stored.manifest.files} == {tmp_path / "copies"}
    again = find_stored(manifest, spec, copies_in(tmp_path), sizes.append)
    assert sizes[1:] == [0]
    assert again.manifest == stored.manifest
    own = read_manifest(root / "stored", spec)
    assert find_stored(own, spec, copies_in(tmp_path), sizes.append).manifest is own
    assert sizes[2:] == [0]


def test_a_copy_stays_while_its_adapter_is_served(
    root: Path, tmp_path: Path, spec: MoeSpec
) -> None:
    """Another's has no room beside it, until it is unloaded."""
    write_random_adapter(tmp_path / "law", root / "bf16", seed=3, experts=EXPERTS)
    math, law = (read_manifest(folder, spec) for folder in (root / "math", tmp_path / "law"))
    room = copies_in(tmp_path, quantised_bytes(law, spec) + (64 << 10) + 1000)
    source = ExpertSource(root / "base")
    held: list[StoredAdapter] = [find_stored(math, spec, room)]
    source.register("math", held[0].manifest)
    with pytest.raises(QuantisedCopyError, match="that are read now"):
        find_stored(law, spec, room)
    held.clear()
    find_stored(law, spec, room)
    assert len([folder for folder in room.folder.iterdir() if folder.is_dir()]) == 1
    # Who is being read is read to its end.
    ExpertReader(WHOLE, False, torch.int8).read(source.place("math", 1, 2), *rows_for(WHOLE))


# A rank


def _step(spec: MoeSpec, num_tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn((num_tokens, spec.hidden_size), generator=random).bfloat16()
    chosen = [torch.randperm(spec.num_experts, generator=random)[:2] for _ in range(num_tokens)]
    return hidden, torch.stack(chosen).to(torch.int32)


@pytest.mark.parametrize("num_rows", [2, 3, 8])
@pytest.mark.parametrize("policy", ["stream", "lfu"])
def test_every_bit_is_as_with_all_experts_in_memory(root: Path, policy: str, num_rows: int) -> None:
    with open_rank(root / "base", num_rows, policy, loads_per_layer=2.0) as rank:
        for step in range(9):
            rank.tier.begin(None)
            for layer in range(len(rank.w13)):
                hidden, ids = _step(rank.spec, (1, 4, 40)[step % 3], 100 * step + layer)
                found = rank.tiered(layer, hidden, ids)
                assert torch.equal(found, rank.whole(layer, hidden, ids))
                assert not found.isnan().any()


def test_a_scale_that_cannot_be_read_is_no_answer_and_the_next_one_is_right(root: Path) -> None:
    broken: list[int] = []

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        if any(offset <= start < offset + len(buffers[0]) for start in broken):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.preadv(fd, buffers, offset)

    with open_rank(root / "base", 2, os_preadv=preadv) as rank:
        scales = rank.source.place(None, rank.tier.layers[0].layer_id, 3).scales
        assert scales is not None
        broken.append(scales[1].start)
        hidden, ids = _step(rank.spec, 16, 5)
        rank.tier.begin(None)
        rows = dict(rank.tier.arrivals(0, list(range(NUM_EXPERTS))))
        failed = {slot for slot, row in rows.items() if row == FAILED}
        assert 3 in failed
        assert len(failed) < NUM_EXPERTS
        rank.tier.begin(None)
        lost = torch.isin(ids, torch.tensor(sorted(failed), dtype=ids.dtype)).any(dim=1)
        assert bool(lost.any())
        found = rank.tiered(0, hidden, ids)
        assert torch.equal(found.isnan().any(dim=1), lost)
        assert str(rank.tier.failure).startswith("ExpertReadError: model")
        broken.clear()
        rank.tier.begin(None)
        assert torch.equal(rank.tiered(0, hidden, ids), rank.whole(0, hidden, ids))


# Sizes


def test_advice_is_for_experts_with_their_scales(
    root: Path, spec: MoeSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["offload", "advise", str(root / "base"), "--memory", "1GiB", "--seconds", "0.05"]
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["machine"]["read_bytes"] == spec.expert_bytes
    num_layers = len(spec.moe_layer_ids)
    for row in found["rows"]:
        assert row["num_bytes"] == row["num_rows"] * num_layers * spec.expert_bytes
