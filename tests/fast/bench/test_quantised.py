"""Benches of quantised experts: what is compared, what is written, what is counted.

Servers' answers and memory are made here; checkpoints, layers and processes are real.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bench.common.record import spread
from bench.common.scaled_model import PUBLISHED
from bench.finemoe import large_memory, large_model
from bench.finemoe.large_model import LargeShape
from bench.quantised import decode, large, large_checkpoint, zoo_quality
from bench.quantised.zoo_quality import Answer, Asked
from bench.report.quantised_tables import TABLES
from sgl_esft.formats.manifest import read_manifest
from sgl_esft.formats.model_spec import MoeSpec, read_moe_spec
from sgl_esft.platform.quantised_moe import Int8Experts
from sgl_esft.quant.adapter_copy import quantise_adapter
from sgl_esft.quant.scheme_settings import choose_scheme
from sgl_esft.quant.write import quantise_checkpoint
from sgl_esft.zoo.taskset import Example
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = replace(large.QUICK_SHAPE, num_layers=2, num_experts=6, expert_width=64, dense_width=64)
MIB = 1 << 20


def answer(tokens: Sequence[int], gaps: Sequence[float], text: str = "") -> Answer:
    return Answer(text or "".join(map(chr, tokens)), tuple(tokens), tuple(gaps))


YES = answer([65, 66], [3.0, 3.0])


# ---- answers ----


def test_a_difference_is_as_clear_as_to_whom_it_is_clearer() -> None:
    other = answer([65, 67], [0.1, 0.2])
    assert zoo_quality.gap_of_difference(YES, other) == 3.0
    assert zoo_quality.gap_of_difference(answer([65, 66], [9.0, 0.05]), other) == 0.2
    assert zoo_quality.gap_of_difference(YES, answer([65], [9.0])) == float("inf")


def test_ties_and_clear_differences_are_counted_apart() -> None:
    tie, far = answer([65, 67], [5.0, 0.2]), answer([65, 68], [5.0, 0.3])
    close = answer([65, 66], [5.0, 0.1])
    found = zoo_quality.compared([close, close, close, YES], [tie, far, close, YES])
    assert found == {"same": 0.5, "differ": 2, "clear": 1, "largest_gap": 0.3}
    assert zoo_quality.compared([YES], [YES])["largest_gap"] == 0


def asked(woven: Answer, merged: Answer) -> Asked:
    base = answer([70], [1.0])
    return Asked(base={"a": [base, YES]}, woven={"a": [woven, YES]}, merged={"a": [merged, YES]})


def test_a_scheme_has_a_row_a_task_beside_bf16() -> None:
    examples = {"a": [Example("1+1=", "AC"), Example("1+2=", "AB")]}
    tie = answer([65, 67], [3.0, 0.1])
    bf16 = asked(YES, YES)
    (row,) = zoo_quality.rows_of("int8", examples, asked(tie, answer([65, 66], [3.0, 0.2])), bf16)
    assert row == {
        "scheme": "int8",
        "task": "a",
        "base": 0.5,
        "merged": 0.5,
        "woven": 1.0,
        "same": 0.5,
        "differ": 1,
        "clear": 0,
        "largest_gap": 0.2,
        "as_bf16": 0.5,
    }
    assert zoo_quality.clear_differences([row]) == []
    (said,) = zoo_quality.clear_differences([{**row, "clear": 1}])
    assert said.startswith("int8, a: 1 of 1 answers that differ are no ties")


# ---- checkpoints ----


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


def assert_same(one: Path, other: Path) -> None:
    ours, theirs = tensors_of(one), tensors_of(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        assert torch.equal(tensor.view(torch.uint8), theirs[name].view(torch.uint8)), name


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_a_checkpoint_is_what_quantise_makes_of_the_one_in_bfloat16(
    scheme: str, tmp_path: Path
) -> None:
    config = tmp_path / "some.json"
    config.write_text(json.dumps({"experts": {"1": [0, 4]}, "shared_experts": False}))
    plain, made, ours = (tmp_path / name for name in ("plain", "made", "ours"))
    large_model.write_base(TINY, plain)
    quantise_checkpoint(plain, scheme, made)
    large_checkpoint.write_base(TINY, scheme, ours)
    assert_same(made, ours)
    assert json.loads((made / "config.json").read_text()) == json.loads(
        (ours / "config.json").read_text()
    )
    weight_map = json.loads((ours / "model.safetensors.index.json").read_text())["weight_map"]
    assert weight_map.keys() == tensors_of(ours).keys()
    spec = read_moe_spec(ours)
    assert large_checkpoint.checkpoint_bytes(TINY, spec) == sum(
        tensor.nbytes for tensor in tensors_of(ours).values()
    )
    large_model.write_adapter(config, plain, TINY, tmp_path / "adapter")
    quantise_adapter(read_manifest(tmp_path / "adapter", spec), spec, tmp_path / "made_adapter")
    large_checkpoint.write_adapter(config, ours, TINY, tmp_path / "our_adapter")
    assert_same(tmp_path / "made_adapter", tmp_path / "our_adapter")
    assert read_manifest(tmp_path / "our_adapter", spec).scheme == spec.scheme


def test_what_is_on_the_disk_stays_and_another_shape_is_refused(tmp_path: Path) -> None:
    large_checkpoint.write_base(TINY, "int8", tmp_path)
    times = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    (tmp_path / "layer-01.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").unlink()
    large_checkpoint.write_base(TINY, "int8", tmp_path)
    kept = tmp_path / "layer-00.safetensors"
    assert kept.stat().st_mtime_ns == times[kept]
    assert (tmp_path / "layer-01.safetensors").exists()
    with pytest.raises(SystemExit, match="another shape"):
        large_checkpoint.write_base(replace(TINY, seed=1), "int8", tmp_path)


def spec_of(shape: LargeShape, scheme: str) -> MoeSpec:
    """Without a checkpoint."""
    said = json.loads(large_model.config_of(shape).to_json_string(use_diff=False))
    spec = MoeSpec.from_config(said)
    return replace(spec, scheme=choose_scheme(scheme, spec, said))


@pytest.mark.parametrize(
    ("system", "gigabytes"), [("int8", 29.2), ("int8-tiers", 19.5), ("int4", 17.5)]
)
def test_what_v2_lite_needs_is_told_before_it_is_started(system: str, gigabytes: float) -> None:
    plan = large.Plan(LargeShape(), 20_000_000_000, PUBLISHED)
    found = large.SYSTEMS[system]
    spec = spec_of(plan.shape, found.scheme)
    assert large.needed_bytes(plan, found, spec) / 1e9 == pytest.approx(gigabytes, abs=0.15)
    if found.scheme == "int8":
        assert large_checkpoint.checkpoint_bytes(plan.shape, spec) == pytest.approx(
            17.05e9, rel=1e-3
        )
        assert large.adapter_bytes(plan, spec) == pytest.approx(4.88e9, rel=1e-3)
    with pytest.raises(SystemExit, match="leaves nothing"):
        replace(plan, memory_bytes=5_000_000_000).cache_bytes(spec)


# ---- memory ----


HOLD = """
import mmap, sys
mine = bytearray(b"x") * {mine}
with open({path!r}, "rb") as file:
    pages = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
sum(pages[i] for i in range(0, len(pages), 4096))
print("ready", flush=True)
sys.stdin.read()
"""


def test_processes_memory_is_counted_with_and_without_mapped_files(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"y" * (48 * MIB))
    code = HOLD.format(mine=32 * MIB, path=str(file))
    before = large_memory.held_by_children()
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        with large_memory.MemoryWatch(period_s=0.01) as watch:
            wait_until(lambda: watch.peak.total > 0, 60.0)
        now = large_memory.held_by_children()
        child.stdin.close()
    own, total = now.own - before.own, now.total - before.total
    assert 32 * MIB <= own < 48 * MIB
    assert 80 * MIB <= total < 112 * MIB
    assert watch.peak.total >= 80 * MIB
    assert watch.serving.total == 0, "nobody said that it serves"


# ---- layers ----


def test_a_layers_times_are_paired_and_int8_computes_what_bf16_does() -> None:
    plan = decode.DecodePlan(TINY, layer_rounds=2, batch_sizes=(1, 3))
    rows = decode.layer_rows(plan)
    assert [row["num_tokens"] for row in rows] == [1, 3]
    assert all(row["speed"]["wall"]["runs"] == 2 for row in rows)
    assert all(row["seconds"][name]["min"] > 0 for row in rows for name in ("bf16", "int8"))


@pytest.mark.parametrize("part", ["w13_scale", "w2_scale", "w13"])
def test_an_int8_layer_with_another_experts_part_is_refused(part: str) -> None:
    experts = decode.make_experts(TINY)
    int8 = experts["int8"]
    assert isinstance(int8, Int8Experts)
    call = next(decode.inputs(TINY, 2))
    decode.check_close(experts, call)
    tensor = getattr(int8, part)
    wrong = tensor.roll(1, 0) if part == "w13" else tensor * 1.1
    with pytest.raises(ValueError, match="of its norm away"):
        decode.check_close({**experts, "int8": replace(int8, **{part: wrong})}, call)


# ---- tables ----


def of_the_zoo(folder: Path) -> None:
    examples = {"a": [Example("1+1=", "AB"), Example("1+2=", "AB")]}
    bf16 = asked(YES, YES)
    rows = [
        row
        for scheme in ("bf16", "int8")
        for row in zoo_quality.rows_of(scheme, examples, bf16, bf16)
    ]
    rows[1] |= {"differ": 1, "clear": 0, "largest_gap": 0.125}
    zoo_quality.write(rows, ("bf16", "int8"), 2, folder)


def of_a_large_model(folder: Path) -> None:
    plan = large.Plan(LargeShape(), 20_000_000_000, PUBLISHED)
    held = large_memory.Held(18_000_000_000, 17_000_000_000)
    served = large.Served(99.0, held, held, 3_000_000_000, 20, 5, 0)
    rows = [
        large.row_of(name, plan, spec_of(plan.shape, system.scheme), found)
        for (name, system), found in zip(large.SYSTEMS.items(), (None, served, served), strict=True)
    ]
    large.write(plan, rows, True, folder)


def of_decoding(folder: Path) -> None:
    plan = decode.DecodePlan(TINY, layer_rounds=2, batch_sizes=(1,))
    seconds = {"bf16": spread([0.2, 0.2]), "int8": spread([0.1, 0.1])}
    served = {"tpot_s": seconds, "speed": spread([2.0, 2.0])}
    decode.write(plan, decode.layer_rows(plan), served, folder)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantised")
    for make in (of_the_zoo, of_a_large_model, of_decoding):
        make(folder)
    return folder


def table_of(results: Path, name: str) -> str:
    found = json.loads((results / f"{name}.json").read_text())
    return TABLES[name][1]({**found, "command": "python -m bench.quantised.large"})


def test_every_result_has_a_table(results: Path) -> None:
    assert {path.stem for path in results.glob("*.json")} == set(TABLES)


@pytest.mark.parametrize("name", TABLES)
def test_a_table_reads_what_its_bench_writes(results: Path, name: str) -> None:
    lines = [
        line.strip("| ").split(" | ")
        for line in table_of(results, name).splitlines()
        if line.startswith("| ")
    ]
    header, rows = lines[0], lines[2:]
    assert rows
    assert {len(row) for row in rows} == {len(header)}
    for column, words in enumerate(header):
        assert {row[column] for row in rows} != {"-"}, words


def test_tables_say_what_the_figures_mean(results: Path) -> None:
    zoo = table_of(results, "quantised_zoo")
    assert "| int8 | a | 50.0 | 100.0 | 100.0 | 100.0 | 100.0 |" in zoo
    assert "Of 4 answers (2 a row) 1 differ between woven and merged, 0 of them clearly" in zoo
    assert "were within 0.25 (at most 0.125)" in zoo
    text = table_of(results, "quantised_large")
    assert "| int8 | 17.1 | 4.9 | - | needs about 29.2 | - | - | - | - |" in text
    assert "| int8-tiers | 17.1 | 4.9 | 14.4 | 18.0 | 17.0 | 18.0 | 3.0 | 5 |" in text
    assert "The goal is a peak below 20.0." in text
    assert "| a served token, 2 layers | 2.000 (2.000 to 2.000) | - |" in table_of(
        results, "quantised_decode"
    )


def test_a_run_without_differences_says_no_more(results: Path) -> None:
    found: dict[str, Any] = json.loads((results / "quantised_zoo.json").read_text())
    rows = [{**row, "differ": 0, "largest_gap": 0.0} for row in found["rows"]]
    said = TABLES["quantised_zoo"][1](
        {**found, "rows": rows, "command": "python -m bench.quantised.zoo_quality"}
    )
    assert "0 differ between woven and merged. " in said
    assert "clearly" not in said
