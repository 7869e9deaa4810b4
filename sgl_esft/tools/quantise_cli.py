"""`sgl-esft quantise`: a base with its routed experts in fewer bits, as SGLang reads them.

cli.py -> [configure_quantise, run_quantise] -> quant/write.py -> checkpoint; progress on stderr
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

from sgl_esft.byte_size import gigabytes
from sgl_esft.formats.expert_scheme import SCHEME_NAMES
from sgl_esft.tools.progress_line import ProgressLine

_EXIT_OK: Final = 0

# What SGLang must be told besides, where a scheme does not follow from the checkpoint alone.
_FLAGS: Final = {"int4": "--quantization moe_wna16"}


def configure_quantise(parser: argparse.ArgumentParser) -> None:
    """Arguments of `sgl-esft quantise`."""
    parser.add_argument("base", type=Path, metavar="BASE", help="base checkpoint, unquantised")
    parser.add_argument(
        "--to",
        choices=SCHEME_NAMES,
        required=True,
        help="int8: a scale a row; fp8: a scale a 128x128 block; fp8-tensor: one scale; int4: a "
        "scale for up to 128 values",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder to make (missing or empty)",
    )


def run_quantise(arguments: argparse.Namespace) -> int:
    """Quantise, show how far it is, and say what was written."""
    # Here, so that no other command waits for torch.
    from sgl_esft.quant.write import quantise_checkpoint

    out: Path = arguments.out
    progress = ProgressLine(
        sys.stderr, "quantised", lambda done, every: f"{gigabytes(done)} of {gigabytes(every)}"
    )
    try:
        written = quantise_checkpoint(arguments.base, arguments.to, out, progress.show)
    finally:
        progress.end()
    print(
        f"wrote {gigabytes(written.num_bytes)} to {out}: the base's {gigabytes(written.base_bytes)}"
        f" with its routed experts in {written.scheme.name}"
    )
    if written.scheme.name in _FLAGS:
        print(f"serve it with {_FLAGS[written.scheme.name]}")
    return _EXIT_OK
