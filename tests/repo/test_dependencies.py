"""Our pins against SGLang's own metadata, and no CUDA package installed."""

from __future__ import annotations

import importlib.metadata
import sys
import tomllib
from collections.abc import Iterable

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts import closure
from scripts.closure import walk
from scripts.pin import BUILD_ROOTS, DEV_ROOTS, ENGINE_ROOTS, RAY_ROOTS, TRAIN_ROOTS
from scripts.requirements_files import (
    CPU_FILES,
    FOLDER,
    PinError,
    is_cuda_distribution,
    parse_pins,
    read_held,
    read_left_out,
    read_pins,
)
from tests.repo.test_imports_dag import SOURCES, roots_imported
from tests.repo.tree import PACKAGES

PINS = read_pins(*CPU_FILES)
LEFT_OUT = read_left_out()
HELD = read_held()
SGLANG = importlib.metadata.requires("sglang") or []

# Imported, and no dependency of pyproject.toml: what depends on the device, and our own C++.
OF_THE_DEVICE = {"sglang", "torch", "triton"}
# Imported when a flag asks for them, from an extra of the same name.
OPTIONAL = {"ray"}
OWN = {*PACKAGES.values(), "sgl_vmm", "sgl_reroute"}
DISTRIBUTIONS = {"prometheus_client": "prometheus-client", "zmq": "pyzmq"}


def unmet(requirements: Iterable[str], pins: dict[str, str], left_out: set[str]) -> list[str]:
    """Requirements, of those that hold here without extras, neither pinned to fit nor left out."""
    found = []
    for requirement in map(Requirement, requirements):
        name = canonicalize_name(requirement.name)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        if name in left_out:
            continue
        if name not in pins or not requirement.specifier.contains(pins[name], prereleases=True):
            found.append(f"{requirement} (our pin: {pins.get(name, 'none')})")
    return found


def refused_pins(requirements: Iterable[str], pins: dict[str, str]) -> list[str]:
    """Requirements that hold here and do not accept the pin that there is."""
    return [
        text.partition(" (our pin")[0]
        for text in unmet(requirements, pins, set())
        if canonicalize_name(Requirement(text.partition(" (our pin")[0]).name) in pins
    ]


def stale(requirements: Iterable[str], left_out: set[str]) -> set[str]:
    """Names left out that nothing asks for, on any machine."""
    return left_out - {canonicalize_name(Requirement(text).name) for text in requirements}


def test_sglang_is_the_pinned_version() -> None:
    assert importlib.metadata.version("sglang") == PINS["sglang"]


def test_every_requirement_of_sglang_is_pinned_or_left_out() -> None:
    assert unmet(SGLANG, PINS, {*LEFT_OUT, *HELD}) == []


def test_held_entries_are_pinned_needed_and_reasoned() -> None:
    """Of a pin that SGLang accepts there is nothing to say; a reason names what it asks for."""
    asked = {canonicalize_name(text.partition("=")[0]): text for text in refused_pins(SGLANG, PINS)}
    assert set(HELD) == {name for name in asked if name not in LEFT_OUT}
    for name, reason in HELD.items():
        assert asked[name].partition("==")[2] in reason
        assert PINS[name].partition("+")[0] in reason


def test_left_out_entries_are_asked_for_not_pinned_and_reasoned() -> None:
    assert stale(SGLANG, set(LEFT_OUT)) == set()
    assert set(LEFT_OUT) & set(PINS) == set()
    assert [name for name, reason in LEFT_OUT.items() if len(reason.split()) < 4] == []


def test_what_is_installed_is_what_is_pinned() -> None:
    installed = {name: importlib.metadata.version(name) for name in PINS}
    assert installed == PINS


def test_pins_are_closed_under_their_own_requirements() -> None:
    engine = walk(ENGINE_ROOTS, set(LEFT_OUT), set(HELD))
    assert engine.problems == []
    assert set(engine.extras_of) == set(PINS)


@pytest.mark.parametrize(
    ("file", "roots", "above"),
    [
        ("build.txt", BUILD_ROOTS, ()),
        ("dev.txt", DEV_ROOTS, ("build.txt",)),
        ("ray.txt", RAY_ROOTS, ()),
        ("train.txt", TRAIN_ROOTS, ()),
    ],
)
def test_further_pins_are_closed_and_apart(
    file: str, roots: list[str], above: tuple[str, ...]
) -> None:
    pins = read_pins(file)
    found = walk(roots, set(LEFT_OUT))
    assert found.problems == []
    assert set(found.extras_of) - set(PINS) - set(read_pins(*above)) == set(pins)
    assert {name: importlib.metadata.version(name) for name in pins} == pins


def test_no_cuda_package_is_installed_and_torch_is_a_cpu_build() -> None:
    names = {distribution.name for distribution in importlib.metadata.distributions()}
    assert [name for name in names if is_cuda_distribution(name)] == []
    assert torch.version.cuda is None
    assert PINS["torch"].endswith("+cpu")


def test_extras_and_own_dependencies_are_pinned() -> None:
    project = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())
    assert unmet(project["project"]["dependencies"], PINS, set()) == []
    extras = project["tool"]["setuptools"]["dynamic"]["optional-dependencies"]
    assert sorted(extras) == ["cpu", "cuda", "dev", "npu", "ray", "train"]
    for extra in extras.values():
        assert all((FOLDER.parent / path).is_file() for path in extra["file"])


def test_what_our_code_imports_is_declared() -> None:
    project = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())["project"]
    roots = {root for module, source in SOURCES.items() for root in roots_imported(source, module)}
    foreign = roots - OWN - set(sys.stdlib_module_names) - {""}
    assert foreign >= OF_THE_DEVICE | OPTIONAL  # the lists are not stale
    wanted = {DISTRIBUTIONS.get(root, root) for root in foreign - OF_THE_DEVICE - OPTIONAL}
    assert sorted(wanted) == project["dependencies"]


def test_checker_finds_missing_and_misfitting_pins() -> None:
    wanted = ["present==1.0", "old>=2", "absent", "cuda-thing", "other; python_version < '3'"]
    pins = {"present": "1.0", "old": "1.9"}
    found = unmet(wanted, pins, {"cuda-thing"})
    assert [text.split()[0] for text in found] == ["old>=2", "absent"]
    assert stale(["Some_Name[cu13]==1"], {"some-name", "gone"}) == {"gone"}
    for name in ("nvidia-cublas-cu13", "NVIDIA_nccl", "cuda-python", "flashinfer_python"):
        assert is_cuda_distribution(name)
    assert not is_cuda_distribution("torch")


def test_walk_reports_what_is_missing() -> None:
    problems = walk(["sglang"], set(LEFT_OUT) - {"timm"}, set(HELD)).problems
    assert len(problems) == 1
    assert "timm" in problems[0]


def test_a_version_is_held_against_sglang_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closure, "ENGINE", "somebody")
    (problem,) = walk(["sglang"], set(LEFT_OUT), set(HELD)).problems
    assert problem.startswith("sglang needs torch==")


@pytest.mark.parametrize("line", ["name", "name>=1", "name==1,<2"])
def test_loose_pins_are_refused(line: str) -> None:
    with pytest.raises(PinError):
        parse_pins([line])


def test_pins_are_parsed_by_canonical_name() -> None:
    assert parse_pins(["# a comment", "", "Some_Name==1.2  # why"]) == {"some-name": "1.2"}
