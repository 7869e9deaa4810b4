"""scripts/gpu_bundle.py: what of a wheel travels, the size it may have, and its pins."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from scripts import gpu_bundle
from scripts.requirements_files import read_pins

# SGLang pins them itself, and requirements/cpu.txt may be for another SGLang.
SGLANGS_OWN = {"sglang", "transformers", "openai"}


def wheel_of(folder: Path, name: str, *members: str) -> Path:
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member in members:
            archive.writestr(member, member)
    return path


def files_in(folder: Path) -> set[str]:
    return {str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file()}


def test_of_the_operators_only_hoppers_travel(tmp_path: Path) -> None:
    wheel = wheel_of(
        tmp_path,
        "sglang_kernel",
        "sgl_kernel/__init__.py",
        "sgl_kernel/flash_ops.abi3.so",
        "sgl_kernel/sm100/common_ops.abi3.so",
        "sgl_kernel/sm90/common_ops.abi3.so",
        "sglang_kernel-0.4.5.dist-info/METADATA",
        "triton_kernels/matmul.py",
    )
    gpu_bundle.take_apart(wheel, tmp_path / "site")
    assert files_in(tmp_path / "site") == {
        "sgl_kernel/__init__.py",
        "sgl_kernel/sm90/common_ops.abi3.so",
        "sglang_kernel-0.4.5.dist-info/METADATA",
    }


def test_a_wheels_data_lands_where_it_is_imported(tmp_path: Path) -> None:
    members = ("a-1.0.data/purelib/a.py", "a-1.0.data/scripts/a", "a/b.py")
    gpu_bundle.take_apart(wheel_of(tmp_path, "a", *members), tmp_path / "site")
    assert files_in(tmp_path / "site") == {"a.py", "a/b.py"}


def test_too_large_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bundle.tar.xz").write_bytes(bytes(3 << 20))
    assert gpu_bundle.check_size(tmp_path) == 3 << 20
    with pytest.raises(gpu_bundle.BundleError, match=r"holds 3\.0 MiB, above 2"):
        gpu_bundle.check_size(tmp_path, 2 << 20)


def test_pins_are_those_that_the_suite_runs_on() -> None:
    bundle, ours = read_pins("gpu-bundle.txt"), read_pins("cpu.txt", "engine.txt")
    other = {name for name in bundle.keys() & ours.keys() if bundle[name] != ours[name]}
    assert other <= SGLANGS_OWN


def test_what_the_machine_has_is_not_carried() -> None:
    there = {
        line.split("==")[0]
        for line in (gpu_bundle.FOLDER / "gpu-machine.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    assert not there & set(read_pins("gpu-bundle.txt"))
    assert gpu_bundle.read_pins_of_machine()["torch"] == "2.11.0"


def test_sources_are_those_that_bench_gpu_reads_and_no_weights() -> None:
    found = {str(each.relative_to(gpu_bundle.ROOT)) for each in gpu_bundle.sources()}
    wanted = {"bench/gpu/run.py", "csrc/bindings.cpp", "tests/fast/kernels/cases.py"}
    wanted |= {"tests/data/deepseek-v2-lite.json", "pyproject.toml", "launch/server.py"}
    assert wanted <= found
    assert not [name for name in found if name.endswith((".safetensors", ".so"))]
