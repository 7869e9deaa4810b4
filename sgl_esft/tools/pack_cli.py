"""`sgl-esft pack`: a base's experts in one aligned file, which a server reads without a copy.

cli.py -> [configure_pack, run_pack] -> offload/pack.py -> packed file; how far it is, on stderr
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

from sgl_esft.byte_size import gigabytes
from sgl_esft.offload.pack import PACKED_NAME, pack_experts
from sgl_esft.tools.progress_line import ProgressLine

_EXIT_OK: Final = 0


def configure_pack(parser: argparse.ArgumentParser) -> None:
    """Arguments of `sgl-esft pack`."""
    parser.add_argument("base", type=Path, metavar="BASE", help="base checkpoint")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"file to make; default: {PACKED_NAME} in BASE, where a server finds it",
    )


def run_pack(arguments: argparse.Namespace) -> int:
    """Pack, show how far it is, and say what was written."""
    base: Path = arguments.base
    out: Path = arguments.out or base / PACKED_NAME
    progress = ProgressLine(
        sys.stderr, "packed", lambda done, every: f"{done:,} of {every:,} experts"
    )
    try:
        layout = pack_experts(base, out, progress.show)
    finally:
        progress.end()
    spec = layout.spec
    print(
        f"wrote {len(spec.moe_layer_ids) * spec.num_experts:,} experts of "
        f"{len(spec.moe_layer_ids)} layers ({gigabytes(layout.num_bytes)}) to {out}"
    )
    return _EXIT_OK
