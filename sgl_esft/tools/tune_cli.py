"""`sgl-esft score` and `tune`: their flags, and what they print.

command line -> [run_score, run_tune] -> sgl_esft.tune, imported when it is asked for
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

from sgl_esft.errors import ConfigError
from sgl_esft.formats.adapter_config import read_expert_config
from sgl_esft.tune import estimate
from sgl_esft.tune.run_folder import Settings, training_folder

_EXIT_OK: Final = 0
_INTERRUPTED: Final = 130
_DATA_HELP: Final = 'JSONL: {"messages": [...]} or {"prompt": ..., "answer": ...} a line'


def configure_score(parser: argparse.ArgumentParser) -> None:
    """Flags of `score`."""
    _add_inputs(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON to make")
    parser.add_argument(
        "--samples", type=int, default=512, help="examples to read, spread; default: %(default)s"
    )
    parser.add_argument(
        "--max-length", type=int, default=4096, help="tokens of one; default: %(default)s"
    )


def configure_tune(parser: argparse.ArgumentParser) -> None:
    """Flags of `tune`: its inputs, and one for each of `Settings`."""
    _add_inputs(parser, needs_data=False)
    parser.add_argument(
        "--experts", type=Path, required=True, metavar="FILE", help="expert_cfg.json of select"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="adapter folder to make")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    for name, kind, text in (
        ("epochs", float, "passes over the data"),
        ("learning-rate", float, "its peak"),
        ("batch-size", int, "rows at a time"),
        ("accumulate", int, "batches of one step"),
        ("max-length", int, "tokens of a row; longer ones are cut"),
        ("seed", int, "of the order of examples"),
        ("save-steps", int, "steps between checkpoints"),
    ):
        default = getattr(Settings, name.replace("-", "_"))
        parser.add_argument(
            f"--{name}", type=kind, default=default, metavar="N", help=f"{text}; default: {default}"
        )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="say what it would need, of config files alone; with --data for all of its tokens",
    )
    parser.add_argument(
        "--tflops", type=float, default=100.0, metavar="N", help="of --plan; default: %(default)s"
    )
    parser.add_argument(
        "--recompute", action="store_true", help="activations, for less memory and more time"
    )


def _add_inputs(parser: argparse.ArgumentParser, *, needs_data: bool = True) -> None:
    parser.add_argument("--base", type=Path, required=True, metavar="DIR", help="base checkpoint")
    parser.add_argument("--data", type=Path, required=needs_data, metavar="FILE", help=_DATA_HELP)
    parser.add_argument("--device", help="cpu, cuda, cuda:1; default: cuda if there is one")


def run_score(arguments: argparse.Namespace) -> int:
    """Score, and say what was written."""
    _quiet()
    from sgl_esft.tune.base import pick_device
    from sgl_esft.tune.score import Sampling, score

    for flag in ("samples", "max_length"):
        if getattr(arguments, flag) < 1:
            raise ConfigError(f"--{flag.replace('_', '-')} is less than 1.")
    sampling = Sampling(arguments.samples, arguments.max_length, max(4096, arguments.max_length))
    device = pick_device(arguments.device)
    count = score(arguments.base, arguments.data, arguments.out, sampling, device, _report)
    print(f"scored the experts on {count} examples, wrote {arguments.out}")
    return _EXIT_OK


def run_tune(arguments: argparse.Namespace) -> int:
    """Train, and say what was written, or how to go on."""
    settings = Settings(**{name: getattr(arguments, name) for name in Settings.__annotations__})
    if arguments.plan:
        return _print_plan(arguments, settings)
    for flag, what in (("data", "a JSONL file of examples"), ("out", "the adapter folder to make")):
        if getattr(arguments, flag) is None:
            raise ConfigError(f"--{flag} is missing: name {what}.")
    _quiet()
    from sgl_esft.tune.base import pick_device
    from sgl_esft.tune.trainer import tune

    try:
        manifest = tune(
            arguments.base,
            arguments.data,
            arguments.experts,
            arguments.out,
            settings,
            resume=arguments.resume,
            device=pick_device(arguments.device),
            report=_report,
        )
    except KeyboardInterrupt:
        _report(f"stopped; --resume goes on from {training_folder(arguments.out)}")
        return _INTERRUPTED
    print(
        f"trained {manifest.num_experts} experts of {len(manifest.experts)} layers, "
        f"wrote {manifest.num_bytes / 1e6:,.1f} MB to {arguments.out}"
    )
    return _EXIT_OK


def _print_plan(arguments: argparse.Namespace, settings: Settings) -> int:
    if not arguments.tflops > 0:
        raise ConfigError(f"--tflops is {arguments.tflops}: give more than 0.")
    experts = read_expert_config(arguments.experts)
    data = _count(arguments.base, arguments.data, settings) if arguments.data else None
    plan = estimate.plan_tuning(arguments.base, experts, settings, data)
    for line in estimate.lines(plan, settings, arguments.tflops):
        print(line)
    return _EXIT_OK


def _count(base: Path, data: Path, settings: Settings) -> estimate.DataSize:
    """By the base's tokenizer, as the training would. Raises ConfigError."""
    if not base.is_dir():
        raise ConfigError(
            f"--data is counted by the base's tokenizer, and --base {base} is no folder that has "
            "one: name the checkpoint's, or leave --data out."
        )
    _quiet()
    from sgl_esft.tune.base import load_encoder, load_generation
    from sgl_esft.tune.examples import read_examples
    from sgl_esft.tune.tokens import rows_to_learn

    encoder, _ = load_encoder(base, load_generation(base))
    rows = rows_to_learn(encoder, read_examples(data), settings.max_length, _report)
    return estimate.DataSize.of([len(row.ids) for row in rows], settings.batch_size)


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _quiet() -> None:
    """Hugging Face's warnings speak of its own flags; what matters here is an error or a report."""
    from transformers.utils import logging

    logging.set_verbosity_error()
