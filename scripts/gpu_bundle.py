"""What a GPU machine without network needs beside its own packages, in one file: `make gpu-bundle`.

    requirements/gpu-bundle.txt -> pip download (Python 3.12) -> wheels, less what no server here
    imports -> site/ ---+
    our sources -> src/ +-> build/gpu-bundle/bundle.tar.xz, manifest.json, lent_hour.sh

The machine is that of requirements/gpu-machine.txt. Its torch is older than SGLang's pin, so the
compiled operators are of the newest sglang-kernel that loads into it, and the manifest says what
that leaves unproved. Fails above `LIMIT_BYTES`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from scripts.requirements_files import FOLDER, read_pins

ROOT = FOLDER.parent
OUT = ROOT / "build" / "gpu-bundle"
ARCHIVE, MANIFEST, START = "bundle.tar.xz", "manifest.json", "lent_hour.sh"
LIMIT_BYTES = 60 << 20
PRESET = 2  # of xz: a third of the time of 6, for a twentieth more bytes
PYTHON_VERSION = "3.12"
PLATFORMS = (
    "manylinux1_x86_64",
    "manylinux2014_x86_64",
    *(f"manylinux_2_{minor}_x86_64" for minor in (5, 17, 24, 26, 27, 28, 31, 34, 35, 39)),
)
# Of these wheels' files only what begins so, or nothing that holds one of these.
ONLY = {"sglang-kernel": ("sgl_kernel/", "sglang_kernel-")}
NOT = {
    # Operators of other devices and of attention backends that bench.gpu does not choose.
    "sglang-kernel": ("flash_ops", "flashmla_ops", "infllm_ops", "/sm100/", "/testing/"),
    # Pictures, and servers in Rust that are only started when they are asked for.
    "sglang": (
        "multimodal_gen/",
        *(f"/_{n}.cpython" for n in ("server", "bench", "multimodal", "grpc")),
    ),
    "pycountry": ("/locales/",),
    "mistral-common": ("/data/",),  # its models' vocabularies
    "zstandard": ("/_cffi.cpython",),  # the backend of other Pythons than CPython
}
# Of this project: what bench.gpu imports, compiles or reads.
SOURCES = (
    *("bench", "csrc", "kernels", "launch", "sgl_esft", "sgl_elastic"),
    *("tests/__init__.py", "tests/data", "tests/fast/kernels", "tests/support"),
    *("pyproject.toml", "LICENSE"),
)
NOT_SOURCES = ("bench/results/", "sgl_esft/zoo/checkpoints/", "sgl_esft/zoo/deep/")
UNPROVED = (
    "that it computes what SGLang computes on its own pins: they were not compared",
    "SGLang {sglang} asks for torch 2.14.1 and sglang-kernel 0.4.10; with torch 2.11 it runs on "
    "sglang-kernel {kernel}, the newest that loads there",
    "SGLang compiles some kernels when they are first used, with the machine's nvcc: those that "
    "DeepSeek-V2-Lite's shape needs were, on an H100; the others were not",
    "FlashInfer and FA3 are left out: attention must be Triton's, sampling torch's",
)


class BundleError(Exception):
    """It cannot be made, or is too large; the message has the name and the remedy."""


def download(folder: Path) -> None:
    """The wheels of requirements/gpu-bundle.txt for the machine, into `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", PYTHON_VERSION, "--implementation", "cp"]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    command += ["--dest", str(folder), "--requirement", str(FOLDER / "gpu-bundle.txt")]
    if subprocess.run(command, check=False).returncode:
        raise BundleError("a wheel of requirements/gpu-bundle.txt could not be had; see above")


def name_of(wheel: Path) -> str:
    """The distribution's, as it is pinned."""
    return wheel.name.split("-")[0].replace("_", "-").replace(".", "-").lower()


def is_carried(distribution: str, member: str) -> bool:
    """Whether a wheel's file is needed."""
    only = ONLY.get(distribution)
    if only and not member.startswith(only):
        return False
    return not any(part in f"/{member}" for part in NOT.get(distribution, ()))


def take_apart(wheel: Path, site: Path) -> None:
    """A wheel's files as if it were installed. Raises BundleError for one that needs more."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            parts = PurePosixPath(member).parts
            if parts[0].endswith(".data"):
                # Scripts are not needed; what belongs into the site folder goes there.
                if parts[1] not in ("purelib", "platlib") or member.endswith("/"):
                    continue
                target = site.joinpath(*parts[2:])
            elif member.endswith("/") or not is_carried(name_of(wheel), member):
                continue
            else:
                target = site / member
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(member))


def sources() -> Iterator[Path]:
    """Files of this project that travel, as git knows them."""
    listed = _git("ls-files", "-z", "--cached", "--others", "--exclude-standard", *SOURCES)
    for name in filter(None, listed.split("\0")):
        if not name.startswith(NOT_SOURCES) and (ROOT / name).is_file():
            yield ROOT / name


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


def commit() -> str:
    """As results name it."""
    changes = _git("status", "--porcelain", "--", *SOURCES).strip()
    return _git("rev-parse", "HEAD").strip() + ("+changes" if changes else "")


def describe(site: Path) -> dict[str, Any]:
    """What a result says of the bundle it was made with."""
    pins = read_pins("gpu-bundle.txt")
    versions = {"sglang": pins["sglang"], "kernel": pins["sglang-kernel"]}
    operators = site / "sgl_kernel" / "sm90" / "common_ops.abi3.so"
    return {
        "commit": commit(),
        "python": PYTHON_VERSION,
        "torch": read_pins_of_machine()["torch"],
        "sglang": pins["sglang"],
        "sglang_kernel": pins["sglang-kernel"],
        "operators_sha256": hashlib.sha256(operators.read_bytes()).hexdigest(),
        "unproved": [text.format(**versions) for text in UNPROVED],
        "packages": pins,
    }


def read_pins_of_machine() -> dict[str, str]:
    """The lines of requirements/gpu-machine.txt that name a version."""
    lines = (FOLDER / "gpu-machine.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def pack(folders: Iterable[tuple[Path, str]], files: Iterable[Path], archive: Path) -> None:
    """One archive of `folders` (path, name inside) and of this project's `files`, below src/."""
    with lzma.open(archive, "wb", preset=PRESET) as out, tarfile.open(fileobj=out, mode="w") as tar:
        for folder, name in folders:
            tar.add(folder, name, filter=_plain)
        for file in files:
            tar.add(file, f"src/{file.relative_to(ROOT)}", filter=_plain)


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """The same bytes whoever makes it, whenever."""
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


def check_size(folder: Path, limit_bytes: int = LIMIT_BYTES) -> int:
    """Bytes of a bundle. Raises BundleError above the limit."""
    size = sum(file.stat().st_size for file in folder.iterdir())
    if size > limit_bytes:
        raise BundleError(
            f"{folder} holds {size / (1 << 20):.1f} MiB, above {limit_bytes / (1 << 20):.0f}: "
            "leave more of the wheels out (NOT in scripts/gpu_bundle.py)"
        )
    return size


def make(out: Path, wheels: Path | None = None) -> int:
    """The bundle in `out`, from `wheels` where they are already there. Returns its bytes."""
    with tempfile.TemporaryDirectory() as work:
        downloaded, site = wheels or Path(work) / "wheels", Path(work) / "site"
        if wheels is None:
            download(downloaded)
        for wheel in sorted(downloaded.glob("*.whl")):
            take_apart(wheel, site)
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        pack([(site, "site")], sources(), out / ARCHIVE)
        (out / MANIFEST).write_text(json.dumps(describe(site), indent=2) + "\n")
    shutil.copy(ROOT / "bench" / "gpu" / START, out / START)
    return check_size(out)


def main() -> None:
    """Make it and say how large it is."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--wheels", type=Path, help="a folder that holds the wheels already")
    options = parser.parse_args()
    try:
        size = make(options.out, options.wheels)
    except BundleError as error:
        sys.exit(f"gpu-bundle: {error}")
    print(f"{options.out}: {size / (1 << 20):.1f} MiB")


if __name__ == "__main__":
    main()
