"""The command line over quantised bases: merge, quantise --adapter, inspect, plan, and refusals.

Merged checkpoints are held against the other way round: merged first, and quantised then.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sgl_esft.errors import AdapterMismatchError, AdapterNotFiniteError, UnsupportedModelError
from sgl_esft.formats.adapter_shapes import AdapterShape
from sgl_esft.formats.expert_scheme import SCHEME_NAMES
from sgl_esft.formats.manifest import read_manifest
from sgl_esft.formats.model_spec import read_moe_spec
from sgl_esft.memory.model_sizes import ModelSizes, read_model_sizes
from sgl_esft.memory.plan import Device, expert_usage, plan_memory
from sgl_esft.offload.pack import pack_experts
from sgl_esft.offload.source import ExpertSource
from sgl_esft.quant import write
from sgl_esft.quant.scheme_settings import choose_scheme, settings_of
from sgl_esft.quant.write import quantise_checkpoint
from sgl_esft.support import TIER_SCHEMES
from sgl_esft.tools.cli import main
from sgl_esft.tools.extract import extract_adapter
from sgl_esft.tools.merge import merge_adapter
from sgl_esft_launch.fit import served_sizes
from tests.fast.quant.test_write import DEEPSEEK, WRITTEN, load, raw, read_config, small_base
from tests.support.adapter_factory import write_random_adapter

pytestmark = pytest.mark.usefixtures("one_thread")
each_scheme = pytest.mark.parametrize("scheme", SCHEME_NAMES)
V2_LITE = Path(__file__).parents[2] / "data" / "deepseek-v2-lite.json"
Capture = pytest.CaptureFixture[str]


def bytes_of(folder: Path) -> dict[str, tuple[str, bytes]]:
    return {name: (str(tensor.dtype), raw(tensor)) for name, tensor in load(folder).items()}


def in_scheme(base: Path, scheme: str) -> Path:
    """The base in the scheme, beside it; made once."""
    folder = base.with_name(f"{base.name}-{scheme}")
    if not folder.exists():
        quantise_checkpoint(base, scheme, folder)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_base(tmp_path_factory.mktemp("tools") / "base")


@pytest.fixture(scope="module")
def adapter(base: Path) -> Path:
    return write_random_adapter(base.parent / "adapter", base, seed=3, experts={1: [0, 2]})


# merge


@pytest.mark.parametrize(("architecture", "scheme"), WRITTEN)
def test_merging_over_a_quantised_base_is_quantising_the_merged(
    tmp_path: Path, architecture: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the byte, over several files."""
    monkeypatch.setattr(write, "FILE_BYTES", 400_000)
    base = small_base(tmp_path / "base", architecture)
    adapter = write_random_adapter(
        tmp_path / "adapter", base, seed=5, max_experts=3, num_shards=2, old_prefix=True
    )
    merge_adapter(base, adapter, tmp_path / "merged")
    expected = in_scheme(tmp_path / "merged", scheme)
    before = in_scheme(base, scheme)
    merge_adapter(before, adapter, tmp_path / "out")
    assert bytes_of(tmp_path / "out") == bytes_of(expected) != bytes_of(before)
    assert read_config(tmp_path / "out") == read_config(expected)
    names = sorted(file.name for file in before.iterdir())
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == names
    assert len([name for name in names if name.endswith(".safetensors")]) > 1


@each_scheme
def test_an_adapter_that_is_stored_quantised_is_merged_as_it_is(
    base: Path, adapter: Path, tmp_path: Path, scheme: str
) -> None:
    quantised = in_scheme(base, scheme)
    argv = ["quantise", str(quantised), "--adapter", str(adapter), "--out", str(tmp_path / "a")]
    assert main(argv) == 0
    merge_adapter(quantised, tmp_path / "a", tmp_path / "one")
    merge_adapter(quantised, adapter, tmp_path / "two")
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "two")


def test_a_merge_that_fails_leaves_nothing(base: Path, adapter: Path, tmp_path: Path) -> None:
    shutil.copytree(adapter, tmp_path / "a")
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    tensors[sorted(tensors)[-1]][0, 0] = float("nan")
    save_file(tensors, tmp_path / "a" / "model.safetensors")
    with pytest.raises(AdapterNotFiniteError):
        merge_adapter(in_scheme(base, "int8"), tmp_path / "a", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


# quantise --adapter


@each_scheme
def test_quantise_an_adapter(
    base: Path, adapter: Path, tmp_path: Path, scheme: str, capsys: Capture
) -> None:
    quantised, out = in_scheme(base, scheme), tmp_path / "out"
    argv = ["quantise", str(quantised), "--adapter", str(adapter), "--out", str(out)]
    assert main(argv) == 0
    printed, progress = capsys.readouterr()
    spec = read_moe_spec(quantised)
    manifest = read_manifest(out, spec)
    assert manifest.scheme == spec.scheme
    assert printed.startswith(f"wrote {manifest.num_bytes / 1e6:.2f} MB to {out}: the adapter's ")
    assert progress.splitlines()[-1] == "quantised 100 %: 0.39 MB of 0.39 MB"
    assert {file.name for file in out.iterdir()} == {"expert_cfg.json", "model.safetensors"}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("{base}", "--adapter", "{adapter}"), "the base is not quantised"),
        (("{int8}", "--adapter", "{stored}"), "the adapter is quantised as int8 already"),
        (("{fp8}", "--adapter", "{stored}"), "is int8 [256, 128]; of the base's experts"),
        (("{int8}", "--adapter", "{int8}"), "expert_cfg.json"),
        (("{int8}", "--adapter", "no such"), "does not exist"),
        (("{int8}", "--to", "int8"), "is quantised already: name an unquantised base"),
    ],
)
def test_what_cannot_be_quantised(
    base: Path, adapter: Path, tmp_path: Path, argv: tuple[str, ...], message: str, capsys: Capture
) -> None:
    stored = base.parent / "stored"
    places = {each: in_scheme(base, each) for each in ("int8", "fp8")}
    if not stored.exists():
        main(["quantise", str(places["int8"]), "--adapter", str(adapter), "--out", str(stored)])
        capsys.readouterr()
    told = [each.format(base=base, adapter=adapter, stored=stored, **places) for each in argv]
    assert main(["quantise", *told, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("argv", [[], ["--to", "int8", "--adapter", "a"]])
def test_one_of_the_two_is_quantised(argv: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["quantise", "base", "--out", "out", *argv])
    assert "--adapter" in capsys.readouterr().err


def test_there_is_no_room_for_a_quantised_adapter(
    base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    from sgl_esft.quant import tensor_file
    from tests.fast.quant.test_write import Usage

    monkeypatch.setattr(tensor_file.shutil, "disk_usage", lambda _: Usage(1, 1, 1000))
    argv = ["quantise", str(in_scheme(base, "int8")), "--adapter", str(adapter)]
    assert main([*argv, "--out", str(tmp_path / "out")]) == 2
    assert "0.00 MB are free" in capsys.readouterr().err


# inspect


@each_scheme
@pytest.mark.parametrize("with_base", [True, False])
def test_inspect_tells_the_scheme(
    base: Path, adapter: Path, tmp_path: Path, scheme: str, with_base: bool, capsys: Capture
) -> None:
    quantised, out = in_scheme(base, scheme), tmp_path / "out"
    main(["quantise", str(quantised), "--adapter", str(adapter), "--out", str(out)])
    capsys.readouterr()
    spec = read_moe_spec(quantised)
    assert spec.scheme is not None
    more = ["--base", str(quantised)] if with_base else []
    assert main(["inspect", str(out), *more]) == 0
    assert f"MB, quantised as {spec.scheme.label}\n" in capsys.readouterr().out
    assert main(["inspect", str(out), "--json", *more]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["scheme"] == spec.scheme.label
    assert report["dtype"] == read_manifest(out, spec).dtype
    assert report["num_bytes"] == 2 * spec.expert_bytes
    assert main(["inspect", str(adapter), "--json", *more]) == 0
    assert json.loads(capsys.readouterr().out)["scheme"] is None


@pytest.mark.parametrize(
    ("scheme", "change", "message"),
    [
        ("int8", lambda t, s: t.pop(s + "weight_scale"), "weight_scale"),
        ("int8", lambda t, s: t.pop(s + "weight"), "not the numbers that belong to it"),
        ("int4", lambda t, s: t.pop(s + "scales"), "scales"),
        ("fp8", lambda t, s: t.pop(s + "weight_scale_inv"), "weight_scale_inv"),
        ("fp8-tensor", lambda t, s: t.pop(s + "weight_scale"), "weight_scale"),
        (
            "int8",
            lambda t, s: t.update({s + "weight": t[s + "weight"].view(torch.uint8)}),
            "is uint8 [256, 128]; an expert's is a matrix of",
        ),
        (
            "int4",
            lambda t, s: t.update({s + "scales": t[s + "scales"].t().contiguous()}),
            "is bfloat16 [256, 1]",
        ),
    ],
)
def test_inspect_without_a_base_tells_what_is_missing(
    base: Path,
    adapter: Path,
    tmp_path: Path,
    scheme: str,
    change: Callable[[dict[str, torch.Tensor], str], object],
    message: str,
    capsys: Capture,
) -> None:
    """Of the gate projection, by which the scheme is told."""
    out = tmp_path / "out"
    argv = ["quantise", str(in_scheme(base, scheme)), "--adapter", str(adapter)]
    main([*argv, "--out", str(out)])
    tensors = load_file(out / "model.safetensors")
    change(tensors, "model.layers.1.mlp.experts.0.gate_proj.")
    save_file(tensors, out / "model.safetensors")
    capsys.readouterr()
    assert main(["inspect", str(out)]) == 2
    assert message in capsys.readouterr().err


# plan


@pytest.mark.parametrize(("architecture", "scheme"), WRITTEN)
def test_sizes_are_those_of_the_checkpoint(tmp_path: Path, architecture: str, scheme: str) -> None:
    base = small_base(tmp_path / "base", architecture)
    tensors = load(in_scheme(base, scheme))
    sizes = read_model_sizes(in_scheme(base, scheme))
    assert sizes.total_bytes == sum(tensor.nbytes for tensor in tensors.values())
    routed = {name: t.nbytes for name, t in tensors.items() if ".experts." in name}
    assert sizes.routed_bytes == sum(routed.values())
    scales = sum(size for name, size in routed.items() if "scale" in name)
    num_experts = len(sizes.spec.moe_layer_ids) * sizes.spec.num_experts
    assert sizes.scale_bytes * num_experts == scales
    assert (sum(sizes.slot_bytes) + sizes.scale_bytes) * num_experts == sizes.routed_bytes
    assert sizes.slot_bytes[0] == 2 * sizes.slot_bytes[1]
    assert sizes.trunk_bytes == read_model_sizes(base).trunk_bytes
    assert sizes.kv_bytes_per_token() == read_model_sizes(base).kv_bytes_per_token()


def v2_lite(scheme: str) -> ModelSizes:
    config = json.loads(V2_LITE.read_text())
    spec = read_model_sizes(V2_LITE).spec
    settings = settings_of(choose_scheme(scheme, spec, config))
    return ModelSizes.from_config({**config, "quantization_config": settings})


@pytest.mark.parametrize(
    ("scheme", "total", "routed", "slot", "scales"),
    [
        # 8,650,752 weights an expert, 2 * 1408 + 2048 rows, 363 blocks or 67,584 groups of 128.
        ("int8", 17_050_491_904, 14_427_226_112, (5_767_168, 2_883_584), 19_456),
        ("fp8", 17_021_631_488, 14_398_365_696, (5_767_168, 2_883_584), 4 * 528),
        ("fp8-tensor", 17_018_137_088, 14_394_871_296, (5_767_168, 2_883_584), 12),
        ("int4", 10_045_611_008, 7_422_345_216, (2_883_584, 1_441_792), 135_168),
    ],
)
def test_deepseek_v2_lite(
    scheme: str, total: int, routed: int, slot: tuple[int, int], scales: int
) -> None:
    sizes = v2_lite(scheme)
    assert (sizes.total_bytes, sizes.routed_bytes) == (total, routed)
    assert (sizes.slot_bytes, sizes.scale_bytes) == (slot, scales)


PAGE = 2 << 20
SHAPES = [AdapterShape("a", dict.fromkeys(range(1, 27), 3)), AdapterShape("b", {1: 5})]


@each_scheme
def test_scales_are_padded_and_counted(scheme: str) -> None:
    """Every slot has memory for them, whoever is there; what is needed are those of experts."""
    sizes = v2_lite(scheme)
    layers, slots = 26, 64 + 2 * 5
    usage = expert_usage(sizes, SHAPES, 5, PAGE)
    num_experts = layers * 64 + 26 * 3 + 5
    assert usage.used_bytes == num_experts * sizes.spec.expert_bytes
    pages, rest = divmod(usage.mapped_bytes - layers * slots * sizes.scale_bytes, PAGE)
    assert rest == 0
    weights = num_experts * sum(sizes.slot_bytes)
    assert weights <= pages * PAGE < weights * 1.02


@each_scheme
def test_a_plan(scheme: str) -> None:
    sizes, device = v2_lite(scheme), Device(24 << 30, 1.0, 0, PAGE)
    plan = plan_memory(sizes, SHAPES, device, [2], kv_bytes_per_token=31_104)
    (row,) = plan.rows
    slots = 26 * (64 + 2 * 5)
    assert row.padded.weight_bytes == sizes.trunk_bytes + slots * sizes.spec.expert_bytes
    usage = expert_usage(sizes, SHAPES, 5, PAGE)
    assert row.virtual.weight_bytes == sizes.trunk_bytes + usage.mapped_bytes
    assert row.virtual.fragmentation == usage.mapped_bytes / usage.used_bytes
    assert sizes.spec.scheme is not None
    model: Any = plan.as_json()["model"]
    assert model["scheme"] == sizes.spec.scheme.label
    assert next(iter(plan.as_table())).endswith(f"experts, quantised as {sizes.spec.scheme.label}")


def test_the_plan_command(base: Path, adapter: Path, capsys: Capture) -> None:
    quantised = in_scheme(base, "int8")
    argv = ["plan", "--model-config", str(quantised), "--adapters", str(adapter)]
    assert main([*argv, "--counts", "1", "--device-memory", "1GiB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["scheme"] == "int8"


def test_what_is_served_in_another_type(base: Path) -> None:
    """The trunk is cast, quantised experts are not."""
    whole = read_model_sizes(in_scheme(base, "int8"))
    cast = served_sizes(in_scheme(base, "int8"), ("--dtype", "float32"))
    assert cast is not None
    assert cast.trunk_bytes == 2 * whole.trunk_bytes
    assert cast.routed_bytes == whole.routed_bytes


# What was not shown.


def extract(folder: Path, out: Path) -> object:
    return extract_adapter(folder, folder, out)


def pack(folder: Path, out: Path) -> object:
    return pack_experts(folder, out)


def read_in_tiers(folder: Path, out: Path) -> object:
    return ExpertSource(folder)


def score(folder: Path, out: Path) -> object:
    from sgl_esft.tune.base import load_base

    return load_base(folder, "cpu")


def estimate(folder: Path, out: Path) -> object:
    from sgl_esft.tune.estimate import plan_tuning
    from sgl_esft.tune.run_folder import Settings

    return plan_tuning(folder, {1: (0,)}, Settings())


def tune(folder: Path, out: Path) -> object:
    from sgl_esft.tune.run_folder import Settings
    from sgl_esft.tune.trainer import tune as train

    config = out.with_name("expert_cfg.json")
    config.write_text('{"experts": {"1": [0]}}')
    return train(folder, config, config, out, Settings())


def evaluate(folder: Path, out: Path) -> object:
    from sgl_esft.zoo.model import load_model

    return load_model(folder)


EXPERT_BY_EXPERT = (pack, read_in_tiers)  # int8: tests/fast/offload/test_quantised_tiers.py


@each_scheme
@pytest.mark.parametrize(
    "use",
    [extract, *EXPERT_BY_EXPERT, score, estimate, tune, evaluate],
    ids=lambda u: u.__name__,
)
def test_who_takes_no_quantised_base(
    base: Path, tmp_path: Path, scheme: str, use: Callable[[Path, Path], object]
) -> None:
    if use in EXPERT_BY_EXPERT and scheme in TIER_SCHEMES:
        use(in_scheme(base, scheme), tmp_path / "out")
        return
    with pytest.raises(UnsupportedModelError, match=f"quantised .*{scheme}.*name the"):
        use(in_scheme(base, scheme), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "argv",
    [
        ("extract", "--base", "{0}", "--tuned", "{0}", "--out", "{1}/out"),
        ("pack", "{0}", "--out", "{1}/out"),
        ("offload", "advise", "{0}", "--memory", "1GiB"),
    ],
)
def test_commands_that_take_no_quantised_base(
    base: Path, tmp_path: Path, argv: tuple[str, ...], capsys: Capture
) -> None:
    assert main([each.format(in_scheme(base, "fp8"), tmp_path) for each in argv]) == 2
    assert "quantised" in capsys.readouterr().err


def test_an_adapter_of_another_scheme_is_not_merged(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    argv = ["quantise", str(in_scheme(base, "fp8")), "--adapter", str(adapter)]
    main([*argv, "--out", str(tmp_path / "a")])
    with pytest.raises(AdapterMismatchError):
        merge_adapter(in_scheme(base, "int8"), tmp_path / "a", tmp_path / "out")
    with pytest.raises(AdapterMismatchError):
        merge_adapter(base, tmp_path / "a", tmp_path / "out")


def test_the_architecture_is_the_bases(base: Path) -> None:
    assert read_moe_spec(in_scheme(base, "int8")).architecture == DEEPSEEK
