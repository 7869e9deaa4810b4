"""The two subcommands that write a base anew: `sgl-esft pack` and `sgl-esft quantise`.

cli.py -> [run_pack]     -> offload/pack.py -> packed file, which a server reads without a copy
       -> [run_quantise] -> quant/write.py  -> checkpoint with its routed experts in fewer bits
                         -> quant/adapter_copy.py -> with --adapter: an adapter, as its base is
How far they are is said on stderr, by [ProgressLine].
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, TextIO

from sgl_esft.byte_size import gigabytes
from sgl_esft.formats.adapter_paths import resolve_adapter_path
from sgl_esft.formats.expert_scheme import SCHEME_NAMES
from sgl_esft.formats.manifest import read_manifest
from sgl_esft.formats.model_spec import read_moe_spec
from sgl_esft.offload.pack import PACKED_NAME, pack_experts

_EXIT_OK: Final = 0
_STEP_PERCENT: Final = 10  # between two lines of a log
# What SGLang must be told besides, where a scheme does not follow from the checkpoint alone.
_FLAGS: Final = {"int4": "--quantization moe_wna16"}

Words = Callable[[int, int], str]  # (done, all) -> what is said of them, behind the percentage


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


def configure_quantise(parser: argparse.ArgumentParser) -> None:
    """Arguments of `sgl-esft quantise`."""
    parser.add_argument(
        "base",
        type=Path,
        metavar="BASE",
        help="base checkpoint: unquantised with --to, quantised with --adapter",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--to",
        choices=SCHEME_NAMES,
        help="int8: a scale a row; fp8: a scale a 128x128 block; fp8-tensor: one scale; int4: a "
        "scale for up to 128 values",
    )
    what.add_argument(
        "--adapter",
        type=Path,
        metavar="DIR",
        help="quantise this adapter instead, as BASE is: to be served without a copy",
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
    progress = ProgressLine(
        sys.stderr, "quantised", lambda done, every: f"{gigabytes(done)} of {gigabytes(every)}"
    )
    if arguments.adapter is not None:
        return _quantise_adapter(arguments, progress)
    # Here, so that no other command waits for torch.
    from sgl_esft.quant.write import quantise_checkpoint

    out: Path = arguments.out
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


def _quantise_adapter(arguments: argparse.Namespace, progress: ProgressLine) -> int:
    from sgl_esft.quant.adapter_copy import quantise_adapter

    spec = read_moe_spec(arguments.base)
    manifest = read_manifest(resolve_adapter_path(str(arguments.adapter), None), spec)
    num_read = 0

    def on_read(num_bytes: int) -> None:
        nonlocal num_read
        num_read += num_bytes
        progress.show(num_read, manifest.num_bytes)

    try:
        written = quantise_adapter(manifest, spec, arguments.out, on_read)
    finally:
        progress.end()
    print(
        f"wrote {gigabytes(written.num_bytes)} to {arguments.out}: the adapter's "
        f"{gigabytes(manifest.num_bytes)} quantised as the base's experts are"
    )
    return _EXIT_OK


class ProgressLine:
    """One line that is rewritten on a terminal; else a line every `_STEP_PERCENT`."""

    def __init__(self, stream: TextIO, verb: str, words: Words) -> None:
        """verb: what is done, in front of the percentage, such as `packed`."""
        self._stream = stream
        self._verb = verb
        self._words = words
        self._is_terminal = stream.isatty()
        self._step = 1 if self._is_terminal else _STEP_PERCENT
        self._next_percent = self._step
        self._is_line_open = False

    def show(self, num_done: int, num_all: int) -> None:
        """Called after each piece of work; most calls print nothing."""
        percent = 100 * num_done // num_all
        if percent < self._next_percent:
            return
        self._next_percent = percent - percent % self._step + self._step
        text = f"{self._verb} {percent:3} %: {self._words(num_done, num_all)}"
        self._stream.write(f"\r{text}" if self._is_terminal else f"{text}\n")
        self._stream.flush()
        self._is_line_open = self._is_terminal

    def end(self) -> None:
        """What is printed next, an error perhaps, begins a line of its own."""
        if self._is_line_open:
            self._stream.write("\n")
            self._stream.flush()
            self._is_line_open = False
