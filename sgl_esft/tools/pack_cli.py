"""`sgl-esft pack`: a base's experts in one aligned file, which a server reads without a copy.

cli.py -> [configure_pack, run_pack] -> offload/pack.py -> packed file; how far it is, on stderr
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final, TextIO

from sgl_esft.byte_size import gigabytes
from sgl_esft.offload.pack import PACKED_NAME, pack_experts

_EXIT_OK: Final = 0
_STEP_PERCENT: Final = 10  # between two lines of a log


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
    progress = _Progress(sys.stderr)
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


class _Progress:
    """One line that is rewritten on a terminal; else a line every `_STEP_PERCENT`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._step = 1 if self._is_terminal else _STEP_PERCENT
        self._next_percent = self._step
        self._is_line_open = False

    def show(self, num_done: int, num_all: int) -> None:
        """Called after each expert; most calls print nothing."""
        percent = 100 * num_done // num_all
        if percent < self._next_percent:
            return
        self._next_percent = percent - percent % self._step + self._step
        text = f"packed {percent:3} %: {num_done:,} of {num_all:,} experts"
        self._stream.write(f"\r{text}" if self._is_terminal else f"{text}\n")
        self._stream.flush()
        self._is_line_open = self._is_terminal

    def end(self) -> None:
        """What is printed next, an error perhaps, begins a line of its own."""
        if self._is_line_open:
            self._stream.write("\n")
            self._stream.flush()
            self._is_line_open = False
