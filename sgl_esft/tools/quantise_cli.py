"""`sgl-esft quantise`: a base with its routed experts in fewer bits, as SGLang reads them.

cli.py -> [configure_quantise, run_quantise] -> quant/write.py -> checkpoint; progress on stderr
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final, TextIO

from sgl_esft.byte_size import gigabytes
from sgl_esft.formats.expert_scheme import SCHEME_NAMES

_EXIT_OK: Final = 0
_STEP_PERCENT: Final = 10  # between two lines of a log

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
    progress = _Progress(sys.stderr)
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


class _Progress:
    """One line that is rewritten on a terminal; else a line every `_STEP_PERCENT`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._step = 1 if self._is_terminal else _STEP_PERCENT
        self._next_percent = self._step
        self._is_line_open = False

    def show(self, num_done: int, num_all: int) -> None:
        """Called after each tensor; most calls print nothing."""
        percent = 100 * num_done // num_all
        if percent < self._next_percent:
            return
        self._next_percent = percent - percent % self._step + self._step
        text = f"quantised {percent:3} %: {gigabytes(num_done)} of {gigabytes(num_all)}"
        self._stream.write(f"\r{text}" if self._is_terminal else f"{text}\n")
        self._stream.flush()
        self._is_line_open = self._is_terminal

    def end(self) -> None:
        """What is printed next, an error perhaps, begins a line of its own."""
        if self._is_line_open:
            self._stream.write("\n")
            self._stream.flush()
            self._is_line_open = False
