"""`sgl-esft`: tools for ESFT adapters, and for the memory that serving them takes.

    command line -> [main] -> one function of adapter_report, merge, extract, select or a *_cli

Needs neither SGLang nor a GPU, but for `serve`, which becomes the launcher. A subcommand is one
function that adds its parser and one that runs it; `_COMMANDS` lists them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from sgl_esft.errors import ConfigError, EsftError
from sgl_esft.formats.adapter_config import write_expert_config
from sgl_esft.tools import (
    adapters_cli,
    base_cli,
    memory_cli,
    offload_cli,
    tune_cli,
)
from sgl_esft.tools.adapter_report import inspect_adapter
from sgl_esft.tools.extract import extract_adapter
from sgl_esft.tools.merge import merge_adapter
from sgl_esft.tools.select import SCORE_KINDS, read_scores, select_experts
from sgl_esft.tools.versions import describe_versions

EXIT_OK: Final = 0
EXIT_SYSTEM: Final = 1
EXIT_USER: Final = 2

_BASE_HELP: Final = "base checkpoint"
_OUT_HELP: Final = "folder to make (missing or empty)"
LAUNCHER: Final = "sgl_esft.launch_server"
COMPLETION: Final = "sgl_esft_launch.completion"
SHELLS: Final = ("bash", "zsh")
INSTALL_ENGINE: Final = "pip install --no-deps sglang==0.5.23 torchvision==0.28.0"


@dataclass(frozen=True)
class Subcommand:
    """One subcommand: `configure` adds its arguments, `run` does it and returns the exit code."""

    name: str
    summary: str
    description: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Returns 0, 2 for an error of the caller, 1 for one of the system."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["serve"]:
        return _serve(argv[1:])
    try:
        arguments = build_parser().parse_args(argv)
        run: Callable[[argparse.Namespace], int] = arguments.run
        status = run(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # as of `| head`: the reader has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except EsftError as error:
        return _fail(str(error), EXIT_USER)
    except OSError as error:
        return _fail(str(error), EXIT_SYSTEM)


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; also what the documentation's command list is checked against."""
    parser = argparse.ArgumentParser(
        prog="sgl-esft",
        description="Tools for ESFT adapters, which replace whole routed experts of an MoE model.",
        epilog="`sgl-esft COMMAND --help` explains one command.",
    )
    parser.add_argument(
        "--version", action=_ShowVersions, nargs=0, help="show versions and device, and exit"
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    commands.add_parser(
        "serve",
        help="start a server, without flags the demo's",
        description=f"The same as `python -m {LAUNCHER}`, and takes its flags.",
    )
    for command in _COMMANDS:
        sub = commands.add_parser(
            command.name, help=command.summary, description=command.description
        )
        command.configure(sub)
        sub.set_defaults(run=command.run)
    return parser


class _ShowVersions(argparse.Action):
    """Looks the versions up when they are asked for: that may import torch."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(describe_versions())
        parser.exit()


def _serve(flags: Sequence[str]) -> int:
    """Become the launcher. Not by a call: what SGLang spawns imports the main module again."""
    missing = [name for name in ("torch", "sglang") if find_spec(name) is None]
    if not missing:
        os.execv(sys.executable, [sys.executable, "-m", LAUNCHER, *flags])
    return _fail(
        f"serve needs {' and '.join(missing)}, not installed in {sys.prefix}: on a CPU, install "
        f"`sgl-esft[cpu]`, then `{INSTALL_ENGINE}` (docs/quickstart.md).",
        EXIT_USER,
    )


def _fail(message: str, code: int) -> int:
    print(f"sgl-esft: error: {message}", file=sys.stderr)
    return code


def _configure_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("adapter", metavar="DIR", help="adapter folder")
    parser.add_argument("--base", type=Path, metavar="DIR", help="checkpoint it must fit")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _run_inspect(arguments: argparse.Namespace) -> int:
    report = inspect_adapter(arguments.adapter, arguments.base)
    if arguments.json:
        print(json.dumps(report.as_json()))
    else:
        print("\n".join(report.as_table()))
    return EXIT_OK


def _add_folders(parser: argparse.ArgumentParser, **helps: str) -> None:
    for name, text in helps.items():
        parser.add_argument(f"--{name}", type=Path, required=True, metavar="DIR", help=text)


def _configure_merge(parser: argparse.ArgumentParser) -> None:
    _add_folders(parser, base=_BASE_HELP, adapter="adapter folder", out=_OUT_HELP)


def _run_merge(arguments: argparse.Namespace) -> int:
    merge_adapter(arguments.base, arguments.adapter, arguments.out)
    print(f"wrote the merged checkpoint to {arguments.out}")
    return EXIT_OK


def _configure_extract(parser: argparse.ArgumentParser) -> None:
    _add_folders(parser, base=_BASE_HELP, tuned="the checkpoint after fine-tuning", out=_OUT_HELP)
    parser.add_argument(
        "--layers", type=_layer_list, metavar="1,2,...", help="compare only these layers' experts"
    )


def _run_extract(arguments: argparse.Namespace) -> int:
    manifest = extract_adapter(
        arguments.base, arguments.tuned, arguments.out, layers=arguments.layers
    )
    print(
        f"wrote {manifest.num_experts} experts of {len(manifest.experts)} layers "
        f"({manifest.num_bytes / 1e6:,.1f} MB) to {arguments.out}"
    )
    return EXIT_OK


def _layer_list(text: str) -> list[int]:
    try:
        return [int(layer) for layer in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list such as 1,2,3") from error


def _configure_select(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--scores", type=Path, required=True, metavar="FILE", help="JSON of expert scores"
    )
    parser.add_argument(
        "--kind", choices=SCORE_KINDS, required=True, help="token selection ratio or gate score"
    )
    parser.add_argument(
        "--threshold", type=float, required=True, metavar="P", help="e.g. 0.2 token, 0.1 gate"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="expert_cfg.json to make"
    )


def _run_select(arguments: argparse.Namespace) -> int:
    scores = read_scores(arguments.scores, arguments.kind)
    experts = select_experts(scores, arguments.threshold)
    if arguments.out.exists():
        raise ConfigError(f"{arguments.out} exists: name another --out, or remove it.")
    write_expert_config(arguments.out, experts)
    count = sum(map(len, experts.values()))
    print(f"chose {count} experts of {len(experts)} layers, wrote {arguments.out}")
    return EXIT_OK


def _configure_completion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="the shell that is to read it")


def _run_completion(arguments: argparse.Namespace) -> int:
    """Become what knows the launcher's flags too: nothing here may import it."""
    os.execv(sys.executable, [sys.executable, "-m", COMPLETION, arguments.shell])


_COMMANDS: Final = (
    Subcommand(
        "inspect",
        "show what an adapter replaces",
        "Validate an adapter and show its experts, size and sparsity. With --base it must fit "
        "that model exactly; without, it is only checked against itself.",
        _configure_inspect,
        _run_inspect,
    ),
    Subcommand(
        "merge",
        "write a base checkpoint with an adapter's experts in it",
        "Write the merged Hugging Face checkpoint, shard by shard, all or nothing.",
        _configure_merge,
        _run_merge,
    ),
    Subcommand(
        "extract",
        "make an adapter from a fine-tuned checkpoint",
        "Write the experts that differ between two checkpoints as an adapter. Refuses if "
        "anything but routed experts differs.",
        _configure_extract,
        _run_extract,
    ),
    Subcommand(
        "score",
        "score the experts of a base on examples",
        "Read examples with the base and write each expert's gate and token score, for select.",
        tune_cli.configure_score,
        tune_cli.run_score,
    ),
    Subcommand(
        "select",
        "choose the experts to tune from their scores",
        "Take experts in falling score until their sum reaches the threshold, and write "
        "expert_cfg.json.",
        _configure_select,
        _run_select,
    ),
    Subcommand(
        "tune",
        "train the chosen experts on examples, and write the adapter",
        "Fine-tune the experts of expert_cfg.json and nothing else, by Hugging Face's Trainer. "
        "Only answers are learned. Checkpoints lie in OUT.training until the adapter is written.",
        tune_cli.configure_tune,
        tune_cli.run_tune,
    ),
    Subcommand(
        "memory",
        "show the experts' memory of a running server",
        "Ask a server for its memory report: pages, slots and fragmentation of every device.",
        memory_cli.configure_memory,
        memory_cli.run_memory,
    ),
    Subcommand(
        "adapters",
        "list, load, replace, pin and unload the adapters of a running server",
        "Show a server's adapters, or change one and wait until that is done. A star marks an "
        "adapter whose folder has changed since it was loaded: replace takes it in.",
        adapters_cli.configure,
        adapters_cli.run,
    ),
    Subcommand(
        "plan",
        "compute how many adapters fit, and the KV cache they leave",
        "Lay a base model and adapters out in memory, without weights or an accelerator: merged, "
        "padded and virtual. Sizes are numbers with a unit: 64GB is 10^9, 64GiB 2^30 bytes each.",
        memory_cli.configure_plan,
        memory_cli.run_plan,
    ),
    Subcommand(
        "pack",
        "write a base's experts into one aligned file, for experts in tiers",
        "Copy every routed expert, aligned and in one piece, into a file that a server with "
        "--expert-cache reads straight into place. All or nothing, with progress.",
        base_cli.configure_pack,
        base_cli.run_pack,
    ),
    Subcommand(
        "quantise",
        "write a base, or an adapter, with its routed experts in int8, fp8 or int4",
        "Write a checkpoint whose routed experts have fewer bits, and all else as it is. With "
        "--adapter, write an adapter in the scheme of such a base. All or nothing, with progress.",
        base_cli.configure_quantise,
        base_cli.run_quantise,
    ),
    Subcommand(
        "offload",
        "simulate caches and policies on a trace, or have them proposed",
        "What --expert-cache would do: replay a trace of --record-routing, or measure this "
        "machine and propose flags.",
        offload_cli.configure,
        offload_cli.run,
    ),
    Subcommand(
        "completion",
        "print a script by which a shell completes commands and flags",
        "For bash: source <(sgl-esft completion bash), here or in ~/.bashrc; the same with zsh.",
        _configure_completion,
        _run_completion,
    ),
)

if __name__ == "__main__":
    sys.exit(main())
