"""`sgl-esft quantise` writes checkpoints: what is in them, what SGLang makes of it, and failures.

That adapters can be quantised at load rests on `test_adapters_apart_are_the_merged_checkpoint`.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tracemalloc
import weakref
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sgl_esft.errors import ConfigError, UnsupportedModelError
from sgl_esft.formats.checkpoint import all_experts, open_checkpoint
from sgl_esft.formats.expert_scheme import SCHEME_NAMES, ExpertPart, read_scheme
from sgl_esft.formats.manifest import read_manifest
from sgl_esft.formats.model_spec import PROJS, MoeSpec, read_moe_spec
from sgl_esft.formats.safetensors_header import read_header
from sgl_esft.quant import tensor_file, write
from sgl_esft.quant.rounding import Parts, quantise, quantise_expert
from sgl_esft.quant.scheme_settings import choose_scheme
from sgl_esft.quant.write import quantise_checkpoint
from sgl_esft.tools.merge import merge_adapter
from tests.support.adapter_factory import (
    SERVED_ARCHITECTURES,
    write_random_adapter,
    write_random_base,
)
from tests.support.processes import run_module

pytestmark = pytest.mark.usefixtures("one_thread")

Tensors = dict[str, torch.Tensor]
DEEPSEEK = "DeepseekV2ForCausalLM"
V3 = "DeepseekV3ForCausalLM"
NUM_EXPERTS = 4
MIXTRAL = "MixtralForCausalLM"
EXPERTS = {DEEPSEEK: "n_routed_experts", V3: "n_routed_experts", MIXTRAL: "num_local_experts"}
WIDTHS = {MIXTRAL: "intermediate_size"}
NOT_WRITTEN = {(V3, "int4"), (MIXTRAL, "int8"), (MIXTRAL, "int4")}
WRITTEN = [
    (architecture, scheme)
    for architecture in (*SERVED_ARCHITECTURES, V3)
    for scheme in SCHEME_NAMES
    if (architecture, scheme) not in NOT_WRITTEN
]
# Linear layers of SGLang's models, by architecture: models/*.py.
ATTENTION = ("self_attn.qkv_proj", "self_attn.o_proj")
MLP = ("mlp.gate_up_proj", "mlp.down_proj")
SHARED = ("mlp.shared_experts.gate_up_proj", "mlp.shared_experts.down_proj")
MLA = ("self_attn.kv_b_proj", "self_attn.o_proj", *MLP, *SHARED)
LINEARS = {
    "DeepseekV2ForCausalLM": ("self_attn.q_proj", "self_attn.kv_a_proj_with_mqa", *MLA),
    "DeepseekV3ForCausalLM": ("self_attn.fused_qkv_a_proj_with_mqa", "self_attn.q_b_proj", *MLA),
    "Qwen3MoeForCausalLM": (*ATTENTION, "mlp.gate"),
    "Qwen2MoeForCausalLM": (
        *ATTENTION,
        "mlp.gate",
        "mlp.shared_expert.gate_up_proj",
        "mlp.shared_expert.down_proj",
        "mlp.shared_expert_gate",
    ),
    "MixtralForCausalLM": (*ATTENTION, "block_sparse_moe.gate"),
}
each_scheme = pytest.mark.parametrize("scheme", SCHEME_NAMES)


def small_base(folder: Path, architecture: str = DEEPSEEK, **options: Any) -> Path:
    """Four experts of 256 a layer, over 128 hidden: every scheme takes them."""
    sizes = {
        EXPERTS.get(architecture, "num_experts"): NUM_EXPERTS,
        WIDTHS.get(architecture, "moe_intermediate_size"): 256,
        "num_hidden_layers": 2,
        "dtype": "bfloat16",
    }
    return write_random_base(folder, architecture, seed=1, **{**sizes, **options})


def load(folder: Path) -> Tensors:
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.flatten().view(torch.uint8).numpy())


def read_config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ARCHITECTURE/base, of two files, and ARCHITECTURE/SCHEME."""
    root = tmp_path_factory.mktemp("quant")
    for architecture in (*SERVED_ARCHITECTURES, V3):
        small_base(root / architecture / "base", architecture, num_shards=2)
    for architecture, scheme in WRITTEN:
        folder = root / architecture
        quantise_checkpoint(folder / "base", scheme, folder / scheme)
    return root


def expert_parts(tensors: Tensors, spec: MoeSpec, scheme_name: str) -> dict[str, torch.Tensor]:
    """Each routed expert quantised by itself, under its checkpoint's names."""
    scheme = choose_scheme(scheme_name, spec, {})
    found: dict[str, torch.Tensor] = {}
    for layer, experts in all_experts(spec).items():
        for expert in experts:
            names = {proj: spec.expert_tensor_name(layer, expert, proj) for proj in PROJS}
            parts = quantise_expert({p: tensors[n] for p, n in names.items()}, scheme)
            for proj, name in names.items():
                stem = name.removesuffix("weight")
                found |= {stem + suffix: tensor for suffix, tensor in parts[proj].items()}
    return found


@pytest.mark.parametrize(("architecture", "scheme"), WRITTEN)
def test_experts_are_quantised_and_nothing_else(made: Path, architecture: str, scheme: str) -> None:
    base, spec = load(made / architecture / "base"), read_moe_spec(made / architecture / "base")
    expected = {name: tensor for name, tensor in base.items() if ".experts." not in name}
    assert len(expected) < len(base)
    expected |= expert_parts(base, spec, scheme)
    seen = load(made / architecture / scheme)
    assert seen.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (seen[name].dtype, seen[name].shape) == (tensor.dtype, tensor.shape), name
        assert raw(seen[name]) == raw(tensor), name


@pytest.mark.parametrize(("architecture", "scheme"), WRITTEN)
def test_config_and_companions(made: Path, architecture: str, scheme: str) -> None:
    base, folder = made / architecture / "base", made / architecture / scheme
    config = read_config(folder)
    assert read_scheme(config) == choose_scheme(scheme, read_moe_spec(base), {})
    del config["quantization_config"]
    assert config == read_config(base)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (folder / name).read_bytes() == (base / name).read_bytes()
    assert not list(made.rglob(".*")), "no partial folder is left"


@each_scheme
def test_files_and_their_index(
    made: Path, tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small files: each within its limit, its tensors in aligned places, all in the index."""
    monkeypatch.setattr(write, "FILE_BYTES", 200_000)
    base, out = made / DEEPSEEK / "base", tmp_path / "out"
    quantise_checkpoint(base, scheme, out)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    headers = [read_header(file) for file in sorted(out.glob("*.safetensors"))]
    names = [header.path.name for header in headers]
    assert len(names) > 4
    assert names == [
        f"model-{i:05}-of-{len(names):05}.safetensors" for i in range(1, len(names) + 1)
    ]
    held = {name: header.path.name for header in headers for name in header.tensors}
    assert index["weight_map"] == held
    sizes = [sum(info.num_bytes for info in header.tensors.values()) for header in headers]
    assert max(sizes) <= 200_000
    assert sum(sizes) == index["metadata"]["total_size"]
    for header in headers:
        for info in header.tensors.values():
            assert info.start % getattr(torch, info.dtype).itemsize == 0
    same = load(made / DEEPSEEK / scheme)
    assert {n: raw(t) for n, t in load(out).items()} == {n: raw(t) for n, t in same.items()}


@pytest.mark.parametrize("scheme", ["int8", "fp8-tensor"])
def test_odd_sizes_are_aligned(tmp_path: Path, scheme: str) -> None:
    """Projections of 126 bytes before scales of four: torch would refuse to map those in place."""
    base = small_base(tmp_path / "base", hidden_size=18, moe_intermediate_size=7)
    quantise_checkpoint(base, scheme, tmp_path / "out")
    for file in (tmp_path / "out").glob("*.safetensors"):
        for name, info in read_header(file).tensors.items():
            assert info.start % getattr(torch, info.dtype).itemsize == 0, name
    seen, spec = load(tmp_path / "out"), read_moe_spec(base)
    for name, tensor in expert_parts(load(base), spec, scheme).items():
        assert raw(seen[name]) == raw(tensor), name


def test_a_tensor_may_be_larger_than_a_file(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "FILE_BYTES", 1)
    quantise_checkpoint(made / DEEPSEEK / "base", "int8", tmp_path / "out")
    assert len(load(tmp_path / "out")) == len(load(made / DEEPSEEK / "int8"))


@pytest.mark.parametrize(("architecture", "scheme"), WRITTEN)
def test_adapters_apart_are_the_merged_checkpoint(
    made: Path, tmp_path: Path, architecture: str, scheme: str
) -> None:
    """Every expert's bytes, whoever's it is; so a rank may quantise an adapter as it loads it."""
    base = made / architecture / "base"
    adapter = write_random_adapter(tmp_path / "adapter", base, seed=5, max_experts=3)
    merge_adapter(base, adapter, tmp_path / "merged")
    quantise_checkpoint(tmp_path / "merged", scheme, tmp_path / "out")
    apart, spec = load(made / architecture / scheme), read_moe_spec(base)
    own, before = load(adapter), dict(apart)
    how = read_scheme(read_config(made / architecture / scheme))
    assert how is not None
    for layer, experts in read_manifest(adapter, spec).experts.items():
        for expert in experts:
            names = {proj: spec.expert_tensor_name(layer, expert, proj) for proj in PROJS}
            parts = quantise_expert({p: own[n] for p, n in names.items()}, how)
            for proj, name in names.items():
                stem = name.removesuffix("weight")
                apart |= {stem + suffix: tensor for suffix, tensor in parts[proj].items()}
    seen = load(tmp_path / "out")
    assert seen.keys() == apart.keys() == before.keys()
    assert [name for name in seen if raw(seen[name]) != raw(apart[name])] == []
    assert [name for name in seen if raw(seen[name]) != raw(before[name])]


def test_sizes(made: Path, tmp_path: Path) -> None:
    found = {
        name: quantise_checkpoint(made / DEEPSEEK / "base", name, tmp_path / name)
        for name in SCHEME_NAMES
    }
    base = sum(t.nbytes for t in load(made / DEEPSEEK / "base").values())
    experts = NUM_EXPERTS * 3 * 128 * 256
    assert {each.base_bytes for each in found.values()} == {base}
    trunk = base - 2 * experts
    scales = NUM_EXPERTS * 4 * (2 * 256 + 128)
    assert found["int8"].num_bytes == trunk + experts + scales
    assert found["fp8-tensor"].num_bytes == trunk + experts + NUM_EXPERTS * 3 * 4
    assert found["int4"].num_bytes == trunk + experts // 2 + 2 * experts // 128
    for name, each in found.items():
        assert each.num_bytes == sum(t.nbytes for t in load(tmp_path / name).values())


# What SGLang makes of them.

PLAIN_SGLANG = {
    "SGLANG_PLATFORM": "",
    "ESFT_PLATFORM": "native",  # not the CPU platform, which replaces its MoE layer's forward
    "TRITON_INTERPRET": "1",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(scope="module")
def read(made: Path) -> dict[str, dict[str, Any]]:
    """What sglang_reads.py found, in a process of its own: ARCHITECTURE/SCHEME -> report."""
    folders = [str(made / architecture / scheme) for architecture, scheme in WRITTEN]
    found = run_module("tests.fast.quant.sglang_reads", *folders, **PLAIN_SGLANG)
    return {f"{Path(k).parent.name}/{Path(k).name}": report for k, report in found.items()}


METHODS = {
    "int8": ("W8A8Int8Config", "W8A8Int8MoEMethod"),
    "fp8": ("Fp8Config", "Fp8MoEMethod"),
    "fp8-tensor": ("Fp8Config", "Fp8MoEMethod"),
    "int4": ("MoeWNA16Config", "MoeWNA16Method"),
}


@pytest.mark.parametrize(("architecture", "scheme"), WRITTEN)
def test_sglang_reads_the_config(read: dict[str, Any], architecture: str, scheme: str) -> None:
    report = read[f"{architecture}/{scheme}"]
    assert (report["config"], report["experts"]) == METHODS[scheme]
    assert report["class"] == architecture, "not one for quantised models, which has no FusedMoE"
    assert set(report["linears"]) == set(LINEARS[architecture])
    assert set(report["linears"].values()) == {"UnquantizedLinearMethod"}
    assert set(report["others"]) <= {"NoneType", "Fp8KVCacheMethod"}


@pytest.mark.parametrize(("architecture", "scheme"), WRITTEN)
def test_sglang_loads_the_values(read: dict[str, Any], architecture: str, scheme: str) -> None:
    """Through its loader and its dequantisers, without a bit of difference."""
    assert read[f"{architecture}/{scheme}"]["functions"] == ["equal"]


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_sglangs_kernel_multiplies_with_the_values(read: dict[str, Any], scheme: str) -> None:
    """Not fp8's: Triton's interpreter knows no float8."""
    assert read[f"{DEEPSEEK}/{scheme}"]["kernel"] == "equal"


@pytest.mark.parametrize("architecture", [*SERVED_ARCHITECTURES, V3])
def test_sglang_rounds_nothing_again(read: dict[str, Any], architecture: str) -> None:
    assert read[f"{architecture}/fp8-tensor"]["rounded again"] == "equal"


# How it is written, and what goes wrong.


@each_scheme
def test_memory(tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One projection at a time, with its partner: never more, however many there are."""
    base = small_base(tmp_path / "base", moe_intermediate_size=512, num_hidden_layers=4)
    largest = 128 * 512 * 2
    loaded: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    load_one = write._load

    def spied(*arguments: Any) -> torch.Tensor:
        tensor = load_one(*arguments)
        assert tensor.nbytes <= largest
        loaded.append(weakref.ref(tensor))
        alive.append(sum(each() is not None for each in loaded))
        return tensor

    monkeypatch.setattr(write, "_load", spied)
    tracemalloc.start()
    try:
        quantise_checkpoint(base, scheme, tmp_path / "out")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert max(alive) == (2 if scheme == "fp8-tensor" else 1)
    assert peak < 6 * largest < sum(t.nbytes for t in load(base).values()) / 5
    assert len(loaded) >= 3 * 3 * NUM_EXPERTS


def test_progress(made: Path, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    base = made / DEEPSEEK / "base"
    written = quantise_checkpoint(base, "int8", tmp_path / "out", lambda *c: calls.append(c))
    done = [num_done for num_done, _ in calls]
    assert done == sorted(set(done))
    assert len(done) == len(load(base))
    assert done[-1] == written.num_bytes
    assert {num_all for _, num_all in calls} == {written.num_bytes}


def test_what_comes_along(tmp_path: Path) -> None:
    base = small_base(tmp_path / "base")
    for name in ("generation_config.json", "modeling.py"):
        (base / name).write_text("{}")
    for name in ("pytorch_model.bin", "experts.esftpack", ".hidden", "x.safetensors.index.json"):
        (base / name).write_text("{}")
    (base / "folder").mkdir()
    quantise_checkpoint(base, "int8", tmp_path / "out")
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        "modeling.py",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_matrices_behind_the_last_layer_are_in_no_ignore_list(tmp_path: Path) -> None:
    """DeepSeek-V3's next-token layer holds an embedding, which SGLang must not take for linear."""
    base = small_base(tmp_path / "base", V3)
    tensors = load(base) | {"model.layers.2.embed_tokens.weight": torch.zeros(4, 4)}
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    quantise_checkpoint(base, "int8", tmp_path / "out")
    ignored = read_config(tmp_path / "out")["quantization_config"]["ignore"]
    assert "self_attn.fused_qkv_a_proj_with_mqa" in ignored
    assert "embed_tokens" not in ignored


Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(("architecture", "scheme"), sorted(NOT_WRITTEN))
def test_models_that_sglang_cannot_weave_in_a_scheme(
    made: Path, tmp_path: Path, architecture: str, scheme: str
) -> None:
    base = made / architecture / "base"
    assert_refused(base, scheme, tmp_path / "out", UnsupportedModelError, "Choose ")


def assert_refused(
    base: Path, scheme: str, out: Path, error: type[Exception], message: str
) -> None:
    """And nothing is left: neither the folder nor part of it."""
    before = sorted(out.parent.iterdir())
    with pytest.raises(error, match=message):
        quantise_checkpoint(base, scheme, out)
    assert sorted(out.parent.iterdir()) == before


def test_no_room(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told before anything is written."""
    monkeypatch.setattr(tensor_file.shutil, "disk_usage", lambda _: Usage(1, 1, 1000))
    monkeypatch.setattr(write, "new_folder", None)
    message = r"out needs .* MB, but 0.00 MB are free in .*Name an --out with more room"
    base = made / DEEPSEEK / "base"
    assert_refused(base, "int8", tmp_path / "out", ConfigError, message)
    with pytest.raises(ConfigError, match="are free"):
        quantise_checkpoint(base, "int8", tmp_path / "none" / "yet" / "out")


@pytest.mark.parametrize(
    ("code", "raised", "message"),
    [
        (errno.ENOSPC, ConfigError, "out needs .*, but the system says: No space left"),
        (errno.EDQUOT, ConfigError, "the system says: Disk quota exceeded"),
        (errno.EFBIG, ConfigError, "the system says: File too large"),
        (errno.EIO, OSError, "Input/output error"),
    ],
)
@pytest.mark.parametrize("num_before", [0, 5])
def test_a_disk_that_fills_up(
    made: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    raised: type[Exception],
    message: str,
    num_before: int,
) -> None:
    copy, left = write.copy_to, iter(range(num_before))

    def full(*arguments: Any) -> None:
        if next(left, None) is None:
            raise OSError(code, os.strerror(code))
        copy(*arguments)

    monkeypatch.setattr(write, "copy_to", full)
    assert_refused(made / DEEPSEEK / "base", "int8", tmp_path / "out", raised, message)


def test_what_is_interrupted_leaves_nothing(made: Path, tmp_path: Path) -> None:
    def stop(num_done: int, num_all: int) -> None:
        if num_done > num_all // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantise_checkpoint(made / DEEPSEEK / "base", "int8", tmp_path / "out", stop)
    assert list(tmp_path.iterdir()) == []


@each_scheme
def test_a_base_that_is_quantised_already(made: Path, tmp_path: Path, scheme: str) -> None:
    base = made / DEEPSEEK / scheme
    message = f"{scheme} is quantised already: name an unquantised base"
    assert_refused(base, "int8", tmp_path / "out", UnsupportedModelError, message)


def spoilt(base: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load(base)
    change(tensors)
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})


def configured(base: Path, **entries: object) -> None:
    (base / "config.json").write_text(json.dumps({**read_config(base), **entries}))


def put_nan(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors[name][0].fill_(float("nan"))  # type: ignore[return-value]


UP = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "scheme", "error", "message"),
    [
        (lambda b: None, "int2", ConfigError, "no scheme 'int2'"),
        (lambda b: None, "", ConfigError, "no scheme ''"),
        (
            lambda b: configured(b, quantization_config={"quant_method": "awq"}),
            "int8",
            UnsupportedModelError,
            "quant_method 'awq'",
        ),
        (
            lambda b: (b / "hf_quant_config.json").write_text("{}"),
            "int8",
            UnsupportedModelError,
            "hf_quant_config.json",
        ),
        (lambda b: configured(b, q_lora_rank=8), "int4", UnsupportedModelError, "q_lora_rank 8"),
        (lambda b: spoilt(b, put_nan(UP)), "int4", UnsupportedModelError, f"{UP} has a NaN"),
        (lambda b: spoilt(b, put_nan(UP)), "fp8-tensor", UnsupportedModelError, "has a NaN"),
        (lambda b: spoilt(b, lambda t: t.pop(UP)), "fp8", UnsupportedModelError, f"no tensor {UP}"),
        (lambda b: (b / "config.json").unlink(), "int8", UnsupportedModelError, "config.json"),
        (lambda b: (b / "config.json").write_text("["), "int8", UnsupportedModelError, "not valid"),
        (
            lambda b: os.truncate(b / "model.safetensors", 5000),
            "int8",
            UnsupportedModelError,
            "is damaged",
        ),
        (shutil.rmtree, "int8", UnsupportedModelError, "config.json"),
    ],
)
def test_bases_and_schemes_that_cannot_be(
    tmp_path: Path,
    change: Callable[[Path], object],
    scheme: str,
    error: type[Exception],
    message: str,
) -> None:
    base = small_base(tmp_path / "base")
    change(base)
    (tmp_path / "there").mkdir()
    assert_refused(base, scheme, tmp_path / "there" / "out", error, message)


@pytest.mark.parametrize("scheme", ["fp8", "int4"])
def test_a_width_that_no_group_divides(tmp_path: Path, scheme: str) -> None:
    base = small_base(tmp_path / "base", moe_intermediate_size=80)
    message = f"{scheme} needs both widths of an expert .* they are 128 and 80"
    assert_refused(base, scheme, tmp_path / "out", UnsupportedModelError, message)
    quantise_checkpoint(base, "int8", tmp_path / "out")


def test_a_folder_that_is_not_empty(made: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    message = "exists and is not an empty folder"
    base = made / DEEPSEEK / "base"
    assert_refused(base, "int8", tmp_path / "out", ConfigError, message)
    assert (tmp_path / "out" / "mine").exists()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@each_scheme
def test_bases_of_other_types(tmp_path: Path, dtype: str, scheme: str) -> None:
    base = small_base(tmp_path / "base", dtype=dtype)
    quantise_checkpoint(base, scheme, tmp_path / "out")
    seen, before = load(tmp_path / "out"), load(base)
    how = read_scheme(read_config(tmp_path / "out"))
    assert how is not None
    parts: Parts = {
        part.suffix: seen[UP.removesuffix("weight") + part.suffix] for part in how.parts((256, 128))
    }
    partner = before[UP.replace("up_proj", "gate_proj")] if how.partner("up") else None
    expected = quantise(before[UP], how, partner)
    assert {k: raw(v) for k, v in parts.items()} == {k: raw(v) for k, v in expected.items()}
    assert parts[list(parts)[1]].dtype == getattr(torch, dtype if scheme == "int4" else "float32")


def test_every_expert_is_still_there(made: Path) -> None:
    """`open_checkpoint` of the base finds what the quantised one is made of."""
    base = open_checkpoint(made / DEEPSEEK / "base")
    stems = {name.removesuffix("weight") for name in base.tensors if ".experts." in name}
    for scheme in SCHEME_NAMES:
        names = {name.rpartition(".")[0] + "." for name in load(made / DEEPSEEK / scheme)}
        assert stems <= names


@pytest.fixture(autouse=True)
def _nothing_is_left_of_a_trace() -> Iterator[None]:
    yield
    assert not tracemalloc.is_tracing()


def test_what_can_be_read_straight_comes_first() -> None:
    """Experts' numbers are multiples of a page, their scales are not."""
    parts = {
        "scale": ExpertPart("scale", "float32", (3, 1)),
        "odd": ExpertPart("odd", "int8", (5, 1)),
        "gate": ExpertPart("weight", "int8", (64, 64)),
        "wide": ExpertPart("wide", "float32", (32, 64)),
    }
    header, places = tensor_file.file_header(parts)
    assert sorted(places, key=places.__getitem__) == ["wide", "gate", "scale", "odd"]
    assert len(header) % 4096 == places["wide"] % 4096 == places["gate"] % 4096 == 0
