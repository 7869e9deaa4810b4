"""csrc's own declarations of the vendors' functions, compiled against the vendors' headers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from scripts.vendor_headers import ACL_INCLUDE_DIR, CUDA_INCLUDE_DIR, fetch
from tests.fast.csrc.csrc_build import CSRC

INCLUDE_DIRS = {"cuda": CUDA_INCLUDE_DIR, "acl": ACL_INCLUDE_DIR}

# What a careless edit of cuda_abi.h or acl_abi.h could look like: vendor, right, wrong.
MISTAKES = [
    ("cuda", "cuMemAddressFree = Result(DevicePtr address, std::size_t num_bytes)",
     "cuMemAddressFree = Result(DevicePtr address)"),
    ("cuda", "cuInit = Result(unsigned int flags)", "cuInit = Result(unsigned long flags)"),
    ("cuda", "MemHandle handle, HandleType type", "HandleType type, MemHandle handle"),
    ("cuda", "  LocationType type;\n  int id;", "  int id;\n  LocationType type;"),
    ("cuda", "std::uint8_t reserved[4]", "std::uint8_t reserved[8]"),
    ("cuda", "kErrorOutOfMemory = 2", "kErrorOutOfMemory = 3"),
    ("cuda", "cuCtxPushCurrent_v2 = Result(Context context)",
     "cuCtxPushCurrent_v2 = Result(Context* context)"),
    ("cuda", "Result(DevicePtr destination, const void* source, std::size_t num_bytes)",
     "Result(const void* source, DevicePtr destination, std::size_t num_bytes)"),
    ("cuda", "using Stream = void*;", "using Stream = DevicePtr;"),
    ("cuda", "kAccessReadWrite = 3", "kAccessReadWrite = 2"),
    ("acl", "aclrtReleaseMemAddress = Error(void* address)",
     "aclrtReleaseMemAddress = Error(void* address, std::size_t num_bytes)"),
    ("acl", "std::uint32_t id", "std::uint64_t id"),
    ("acl", "  MemAttr mem_attr;\n  MemLocation location;",
     "  MemLocation location;\n  MemAttr mem_attr;"),
    ("acl", "kErrorRtDeviceOom = 207018", "kErrorRtDeviceOom = 207019"),
    ("acl", "kHbmMemHuge = 4", "kHbmMemHuge = 3"),
    ("acl", "kMemcpyDeviceToDevice = 3", "kMemcpyDeviceToDevice = 4"),
    ("acl", "std::size_t destination_bytes, const void* source", "const void* source"),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _headers() -> None:
    fetch()


def compile_check(vendor: str, before: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Compile one check; headers in `before` win over those of csrc."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or "g++"
    own = [f"-I{folder}" for folder in (before, CSRC) if folder]
    source = CSRC / "checks" / f"{vendor}_abi_check.cpp"
    command = [compiler, "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", *own]
    command += ["-isystem", str(INCLUDE_DIRS[vendor]), str(source)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("vendor", INCLUDE_DIRS)
def test_our_declarations_are_the_vendors(vendor: str) -> None:
    done = compile_check(vendor)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("vendor", "right", "wrong"), MISTAKES)
def test_a_wrong_declaration_does_not_compile(
    vendor: str, right: str, wrong: str, tmp_path: Path
) -> None:
    text = (CSRC / "vmm" / f"{vendor}_abi.h").read_text()
    assert text.count(right) == 1
    (tmp_path / "vmm").mkdir()
    (tmp_path / "vmm" / f"{vendor}_abi.h").write_text(text.replace(right, wrong))
    done = compile_check(vendor, before=tmp_path)
    assert done.returncode != 0
    assert "static assertion failed" in done.stderr


@pytest.mark.parametrize("vendor", INCLUDE_DIRS)
def test_every_declared_function_is_checked(vendor: str) -> None:
    declared = re.findall(r"^using (\w+) = (?:Result|Error)\(", read(f"vmm/{vendor}_abi.h"), re.M)
    checked = re.findall(r"^SAME_FUNCTION\((\w+)\);", read(f"checks/{vendor}_abi_check.cpp"), re.M)
    assert len(declared) >= 12
    assert sorted(declared) == sorted(checked)


def read(path: str) -> str:
    return (CSRC / path).read_text()
