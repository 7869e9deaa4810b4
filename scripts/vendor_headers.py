"""The vendors' public headers, to compile our declarations against; nothing is installed.

requirements/vendor-headers.txt -> [vendor_headers] -> build/vendor-wheels -> build/vendor-headers
In:  pinned wheels (46 MB), once.  Out: folders for -DCUDA_INCLUDE_DIR and -DACL_INCLUDE_DIR.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "requirements" / "vendor-headers.txt"
WHEELS = ROOT / "build" / "vendor-wheels"
HEADERS = ROOT / "build" / "vendor-headers"
STAMP = HEADERS / "pins.txt"  # written last: what the folder was made from

CUDA_INCLUDE_DIR = HEADERS / "cuda"  # has cuda.h
ACL_INCLUDE_DIR = HEADERS / "ascend"  # has acl/acl_rt.h

# Where headers lie in a wheel -> where they go.
FOLDERS = {
    "nvidia/cu13/include/": CUDA_INCLUDE_DIR,
    "torch_npu/include/acl/": ACL_INCLUDE_DIR / "acl",
}


class DownloadError(RuntimeError):
    """pip could not get a wheel. Policy: give pip an index that has the pins, or go without."""


def fetch() -> Path:
    """The folder of headers, made unless it is there already."""
    if STAMP.is_file() and STAMP.read_text() == PINS.read_text():
        return HEADERS
    download()
    shutil.rmtree(HEADERS, ignore_errors=True)
    for wheel in sorted(WHEELS.glob("*.whl")):
        unpack(wheel)
    STAMP.write_text(PINS.read_text())
    return HEADERS


def download() -> None:
    """Put exactly the pinned wheels into WHEELS."""
    shutil.rmtree(WHEELS, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
    command += ["--only-binary", ":all:", "--dest", str(WHEELS), "--requirement", str(PINS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DownloadError(f"the wheels of {PINS.name} cannot be downloaded: {done.stderr}")


def unpack(wheel: Path) -> None:
    """Copy a wheel's headers, and nothing else of it, below HEADERS."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            folder = next((folder for folder in FOLDERS if name.startswith(folder)), None)
            if folder is None or not name.endswith((".h", ".hpp")):
                continue
            target = FOLDERS[folder] / name.removeprefix(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(name))


if __name__ == "__main__":
    print(fetch())
