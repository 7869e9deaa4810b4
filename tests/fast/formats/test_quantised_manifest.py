"""Adapters over quantised bases: which fit, where their tensors are, and how each misfit is named.

Real folders: bases by `sgl-esft quantise`, adapters quantised by it, and changes of their tensors.
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

from sgl_esft.errors import (
    AdapterFormatError,
    AdapterMismatchError,
    AdapterNotFiniteError,
    UnsupportedModelError,
)
from sgl_esft.formats.checkpoint import open_checkpoint
from sgl_esft.formats.expert_scheme import SCHEME_NAMES, SchemeName
from sgl_esft.formats.finite import check_weights
from sgl_esft.formats.manifest import AdapterManifest, read_manifest
from sgl_esft.formats.model_spec import MoeSpec, read_moe_spec, refuse_quantised
from sgl_esft.quant.adapter_copy import quantise_adapter
from sgl_esft.quant.write import quantise_checkpoint
from tests.fast.quant.test_write import small_base
from tests.support.adapter_factory import BAD_ADAPTERS, corrupt, write_random_adapter

Tensors = dict[str, torch.Tensor]
each_scheme = pytest.mark.parametrize("scheme", SCHEME_NAMES)
EXPERTS = {1: (1, 3), 2: (0, 2)}
STEM = "model.layers.1.mlp.experts.3.up_proj."


class Made:
    """Folders that no test may change: base, plain, and by scheme the base and the adapter."""

    def __init__(self, root: Path) -> None:
        self.base = small_base(root / "base", num_hidden_layers=3)
        self.plain = write_random_adapter(root / "plain", self.base, seed=2, experts=EXPERTS)
        self.bases: dict[str, Path] = {}
        self.adapters: dict[str, Path] = {}
        for scheme in SCHEME_NAMES:
            self.bases[scheme] = root / f"base-{scheme}"
            quantise_checkpoint(self.base, scheme, self.bases[scheme])
            self.adapters[scheme] = root / f"adapter-{scheme}"
            spec = self.spec(scheme)
            quantise_adapter(read_manifest(self.plain, spec), spec, self.adapters[scheme])

    def spec(self, scheme: str | None) -> MoeSpec:
        return read_moe_spec(self.base if scheme is None else self.bases[scheme])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("made"))


def tensors_of(folder: Path) -> Tensors:
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


def changed(folder: Path, out: Path, change: Callable[[Tensors], object]) -> Path:
    """A copy of the folder with other tensors."""
    shutil.copytree(folder, out)
    tensors = tensors_of(out)
    change(tensors)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


@each_scheme
def test_the_spec_of_a_quantised_base(made: Made, scheme: str) -> None:
    spec, plain = made.spec(scheme), made.spec(None)
    assert spec.scheme is not None
    assert spec.scheme.name == scheme
    assert spec.dtype == plain.dtype == "bfloat16"
    tensors = tensors_of(made.bases[scheme])
    one = {n: t for n, t in tensors.items() if n.startswith("model.layers.1.mlp.experts.0.")}
    assert spec.expert_bytes == sum(tensor.nbytes for tensor in one.values())
    assert {
        spec.expert_part_name((1, 0, proj), part): (part.dtype, part.shape, part.num_bytes)
        for proj in ("gate", "up", "down")
        for part in spec.expert_parts(proj)
    } == {
        name: (str(t.dtype).removeprefix("torch."), tuple(t.shape), t.nbytes)
        for name, t in one.items()
    }


@each_scheme
def test_an_unquantised_adapter_fits_both(made: Made, scheme: str) -> None:
    over, plain = (read_manifest(made.plain, made.spec(s)) for s in (scheme, None))
    assert over == plain
    assert (over.scheme, over.scales, over.dtype) == (None, {}, "bfloat16")
    assert all(each.dtype == "bfloat16" for each in over.tensors.values())


@each_scheme
def test_an_adapter_in_the_bases_scheme(made: Made, scheme: str) -> None:
    spec = made.spec(scheme)
    manifest = read_manifest(made.adapters[scheme], spec)
    assert manifest.scheme == spec.scheme
    assert manifest.experts == EXPERTS
    assert manifest.tensors.keys() == manifest.scales.keys()
    assert manifest.tensors.keys() == read_manifest(made.plain, spec).tensors.keys()
    tensors = tensors_of(made.adapters[scheme])
    assert manifest.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    numbers = {"int8": "int8", "int4": "int32"}.get(scheme, "float8_e4m3fn")
    assert manifest.dtype == numbers
    for locations, dtypes in ((manifest.tensors, {numbers}), (manifest.scales, SCALE_DTYPES)):
        for location in locations.values():
            tensor = tensors.pop(location.name)
            assert location.shape == tuple(tensor.shape)
            assert f"torch.{location.dtype}" == str(tensor.dtype)
            assert location.dtype in dtypes
    assert not tensors
    assert {each.name for each in manifest.scales.values()}.isdisjoint(
        each.name for each in manifest.tensors.values()
    )
    check_weights("a", manifest)


SCALE_DTYPES = {"float32", "bfloat16"}


def test_the_old_prefix(made: Made, tmp_path: Path) -> None:
    def shorten(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    adapter = changed(made.adapters["int8"], tmp_path / "a", shorten)
    manifest = read_manifest(adapter, made.spec("int8"))
    assert manifest.scheme is not None
    assert all(each.name.startswith("layers.") for each in manifest.scales.values())


def test_scales_may_be_in_another_file(made: Made, tmp_path: Path) -> None:
    shutil.copytree(made.adapters["int4"], tmp_path / "a")
    tensors = tensors_of(tmp_path / "a")
    scales = {name: tensors.pop(name) for name in list(tensors) if name.endswith("scales")}
    save_file(tensors, tmp_path / "a" / "model.safetensors")
    save_file(scales, tmp_path / "a" / "scales.safetensors")
    manifest = read_manifest(tmp_path / "a", made.spec("int4"))
    assert [file.name for file in manifest.files] == ["model.safetensors", "scales.safetensors"]
    check_weights("a", manifest)


@each_scheme
def test_an_adapter_in_another_scheme(made: Made, scheme: str) -> None:
    """Every pair, and each over an unquantised base: the tensor, and both that it is and is not."""
    spec = made.spec(scheme)
    assert spec.scheme is not None
    for other in set(SCHEME_NAMES) - {scheme}:
        with pytest.raises(AdapterMismatchError) as caught:
            read_manifest(made.adapters[other], spec)
        assert f"quantised as {spec.scheme.label}" in str(caught.value)
        assert "tensor model.layers.1.mlp.experts." in str(caught.value)
        assert "Save the adapter as bfloat16, or quantise that" in str(caught.value)
        assert str(made.base.parent) not in str(caught.value), "a client may read the message"
    with pytest.raises(AdapterMismatchError, match=r"Save the adapter as bfloat16\.$") as caught:
        read_manifest(made.adapters[scheme], made.spec(None))
    assert "tensor model.layers.1.mlp.experts." in str(caught.value)


def put(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name] = make(tensors[name]).contiguous()

    return change


def drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def rename(name: str, other: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({other: tensors.pop(name)})


def add(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: torch.ones(1)})


@pytest.mark.parametrize(
    ("scheme", "change", "error", "message"),
    [
        (
            "int8",
            drop(STEM + "weight_scale"),
            AdapterFormatError,
            rf"1 of 24 tensors are missing, the first is {STEM}weight_scale\. Every .* 6 tensors",
        ),
        ("int8", drop(STEM + "weight"), AdapterFormatError, f"the first is {STEM}weight"),
        ("int4", drop(STEM + "scales"), AdapterFormatError, f"the first is {STEM}scales"),
        ("int4", drop(STEM + "qweight"), AdapterFormatError, f"the first is {STEM}qweight"),
        (
            "int8",
            put(STEM + "weight_scale", lambda t: t[:-1]),
            AdapterMismatchError,
            rf"{STEM}weight_scale is float32 \[255, 1\]; .* int8, it is float32 \[256, 1\]",
        ),
        (
            "int8",
            put(STEM + "weight_scale", lambda t: t[:, 0]),
            AdapterMismatchError,
            r"is float32 \[256\]; .* it is float32 \[256, 1\]",
        ),
        (
            "fp8",
            put(STEM + "weight_scale_inv", lambda t: t.repeat(2, 1)),
            AdapterMismatchError,
            r"is float32 \[4, 1\]; .* it is float32 \[2, 1\]",
        ),
        (
            "fp8-tensor",
            put(STEM + "weight_scale", lambda t: t.reshape(1)),
            AdapterMismatchError,
            r"is float32 \[1\]; .* it is float32 \[\]",
        ),
        (
            "int4",
            put(STEM + "scales", lambda t: t.repeat(2, 1)),  # groups of 64
            AdapterMismatchError,
            r"is bfloat16 \[2, 256\]; .* int4-128-bfloat16, it is bfloat16 \[1, 256\]",
        ),
        (
            "int4",
            put(STEM + "scales", lambda t: t.half()),
            AdapterMismatchError,
            r"is float16 .* quantised as int4-128-bfloat16, it is bfloat16",
        ),
        (
            "int8",
            put(STEM + "weight_scale", lambda t: t.bfloat16()),
            AdapterMismatchError,
            "is bfloat16 .* quantised as int8, it is float32",
        ),
        (
            "int8",
            put(STEM + "weight", lambda t: t.bfloat16()),  # the rest is quantised
            AdapterMismatchError,
            f"{STEM}weight is bfloat16 .* quantised as int8, it is int8",
        ),
        (
            "int8",
            put(STEM + "weight", lambda t: t.view(torch.uint8)),
            AdapterMismatchError,
            "is uint8 ",
        ),
        (
            "int8",
            add(STEM + "weight_scale_inv"),
            AdapterMismatchError,
            f"{STEM}weight_scale_inv in model.safetensors is of a quantised adapter; .* quantised "
            "as int8, there are only weight and weight_scale",
        ),
        ("int4", add(STEM + "qzeros"), AdapterMismatchError, "there are only qweight and scales"),
        ("int4", add(STEM + "weight"), AdapterMismatchError, "there are only qweight and scales"),
        ("int8", add(STEM + "bias"), AdapterFormatError, "is of no expert that expert_cfg.json"),
        (
            "int8",
            add("model.layers.1.mlp.experts.2.up_proj.weight_scale"),
            AdapterFormatError,
            "is of no expert that expert_cfg.json lists",
        ),
        (
            "int8",
            rename(STEM + "weight_scale", STEM.removeprefix("model.") + "weight_scale"),
            AdapterFormatError,
            "tensor names mix two styles",
        ),
    ],
)
def test_a_quantised_adapter_that_is_not_whole(
    made: Made,
    tmp_path: Path,
    scheme: str,
    change: Callable[[Tensors], object],
    error: type[Exception],
    message: str,
) -> None:
    adapter = changed(made.adapters[scheme], tmp_path / "a", change)
    with pytest.raises(error, match=message) as caught:
        read_manifest(adapter, made.spec(scheme))
    assert type(caught.value) is error


def test_an_unquantised_adapter_with_a_scale(made: Made, tmp_path: Path) -> None:
    adapter = changed(made.plain, tmp_path / "a", add(STEM + "weight_scale"))
    with pytest.raises(
        AdapterMismatchError, match=r"weight_scale is float32 \[1\]; .* it is float32"
    ):
        read_manifest(adapter, made.spec("int8"))
    with pytest.raises(AdapterMismatchError, match=r"weight_scale .* not quantised, there are"):
        read_manifest(adapter, made.spec(None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_an_unquantised_adapter_of_another_type(
    made: Made, tmp_path: Path, dtype: torch.dtype
) -> None:
    def cast(tensors: Tensors) -> None:
        tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()})

    adapter = changed(made.plain, tmp_path / "a", cast)
    with pytest.raises(AdapterMismatchError, match=r"checkpoint's is bfloat16\. Save"):
        read_manifest(adapter, made.spec("int8"))


def test_a_tensor_twice(made: Made, tmp_path: Path) -> None:
    adapter = tmp_path / "a"
    shutil.copytree(made.adapters["int8"], adapter)
    save_file({STEM + "weight_scale": torch.ones(256, 1)}, adapter / "more.safetensors")
    message = f"{STEM}weight_scale is in model.safetensors and again in more.safetensors"
    with pytest.raises(AdapterFormatError, match=message):
        read_manifest(adapter, made.spec("int8"))


@pytest.mark.parametrize("kind", BAD_ADAPTERS)
def test_bad_adapters_are_bad_over_a_quantised_base(made: Made, tmp_path: Path, kind: str) -> None:
    adapter = tmp_path / "a"
    shutil.copytree(made.plain, adapter)
    error = corrupt(adapter, kind)
    with pytest.raises(error) as caught:
        read_manifest(adapter, made.spec("fp8"))
    assert type(caught.value) is error
    assert BAD_ADAPTERS[kind].message in str(caught.value)


@pytest.mark.parametrize(
    ("scheme", "suffix"),
    [
        ("int8", "weight_scale"),
        ("fp8", "weight"),
        ("fp8", "weight_scale_inv"),
        ("fp8-tensor", "weight_scale"),
        ("int4", "scales"),
    ],
)
def test_quantised_weights_that_are_not_finite(
    made: Made, tmp_path: Path, scheme: str, suffix: str
) -> None:
    """Scales, and float8's one value that is none."""

    def spoil(tensors: Tensors) -> None:
        tensor = tensors[STEM + suffix]
        tensor.view(-1)[-1] = float("nan")

    adapter = changed(made.adapters[scheme], tmp_path / "a", spoil)
    manifest = read_manifest(adapter, made.spec(scheme))
    with pytest.raises(AdapterNotFiniteError, match="layer 1, expert 3, up projection"):
        check_weights("a", manifest)


def test_a_tensor_that_changed_is_told(made: Made, tmp_path: Path) -> None:
    adapter = tmp_path / "a"
    shutil.copytree(made.adapters["int8"], adapter)
    manifest = read_manifest(adapter, made.spec("int8"))
    tensors = tensors_of(adapter)
    tensors[STEM + "weight_scale"] = torch.ones(2)
    save_file(tensors, adapter / "model.safetensors")
    message = rf"{STEM}weight_scale changed since it was validated: it is now float32 \[2\]"
    with pytest.raises(AdapterFormatError, match=message):
        check_weights("a", manifest)


# The base itself.


@each_scheme
def test_a_quantised_checkpoint_is_opened_by_who_says_so(made: Made, scheme: str) -> None:
    folder = made.bases[scheme]
    checkpoint = open_checkpoint(folder, may_be_quantised=True)
    assert checkpoint.tensors.keys() == tensors_of(folder).keys()
    label = made.spec(scheme).scheme
    assert label is not None
    message = f"has its routed experts quantised as {label.label}, and is needed unquantised"
    with pytest.raises(UnsupportedModelError, match=message):
        open_checkpoint(folder)
    assert open_checkpoint(made.base, may_be_quantised=True) == open_checkpoint(made.base)


@pytest.mark.parametrize(
    ("scheme", "change", "message"),
    [
        ("int8", drop(STEM + "weight_scale"), f"has no tensor {STEM}weight_scale"),
        (
            "int8",
            put(STEM + "weight_scale", lambda t: t.bfloat16()),
            rf"{STEM}weight_scale as bfloat16 \[256, 1\], but its config.json says float32",
        ),
        (
            "int4",
            put(STEM + "scales", lambda t: t.repeat(2, 1)),
            r"scales as bfloat16 \[2, 256\], but its config.json says bfloat16 \[1, 256\]",
        ),
        ("fp8", put(STEM + "weight", lambda t: t.float()), "as float32"),
    ],
)
def test_a_quantised_checkpoint_that_is_not_whole(
    made: Made, tmp_path: Path, scheme: str, change: Callable[[Tensors], object], message: str
) -> None:
    base = tmp_path / "base"
    shutil.copytree(made.bases[scheme], base)
    file = next(base.glob("*.safetensors"))
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=message):
        open_checkpoint(base, may_be_quantised=True)


@pytest.mark.parametrize(("scheme", "block"), [("fp8", 128), ("int4", 128)])
def test_widths_that_blocks_do_not_divide(
    made: Made, tmp_path: Path, scheme: SchemeName, block: int
) -> None:
    config = json.loads((made.bases[scheme] / "config.json").read_text())
    config["moe_intermediate_size"] = 192
    message = f"in blocks of {block}, of which their widths, 128 and 192, are no multiples"
    with pytest.raises(UnsupportedModelError, match=message):
        MoeSpec.from_config(config)


def test_what_was_not_shown_is_refused(made: Made) -> None:
    refuse_quantised(made.spec(None), "anything")
    message = "--elastic cannot be used with a quantised base, whose routed experts are in int8"
    with pytest.raises(UnsupportedModelError, match=message):
        refuse_quantised(made.spec("int8"), "--elastic")


def test_a_manifest_of_old_has_no_scales(made: Made) -> None:
    options: dict[str, Any] = {"experts": {}, "tensors": {}, "num_bytes": 0, "num_moe_layers": 1}
    found = AdapterManifest(path=made.plain, dtype="", **options)
    assert (found.scheme, found.scales) == (None, {})
