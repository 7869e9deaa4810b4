"""Command line of the zoo: `train` makes it, `evaluate` measures it, `prompts` shows it.

`score` and `tune` are the two steps of ESFT that need a trainer, for examples of your own.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from sgl_esft import zoo
from sgl_esft.errors import EsftError
from sgl_esft.tools.select import SCORE_KINDS
from sgl_esft.zoo.taskset import TASKS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status."""
    options = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except (EsftError, OSError) as error:
        print(f"sgl_esft.zoo: error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sgl_esft.zoo", description=zoo.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    train = commands.add_parser("train", help="train the base and all adapters")
    train.set_defaults(run=_train)
    train.add_argument("--model", choices=list(zoo.MODELS), default="demo", help="which one")
    train.add_argument("--out", type=Path, required=True, help="folder to write")
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    train.add_argument("--keep-base", action="store_true", help="make only the adapters again")

    evaluate = commands.add_parser("evaluate", help="exact match of base, merged and woven")
    evaluate.set_defaults(run=_evaluate)
    evaluate.add_argument(
        "--checkpoints",
        type=Path,
        default=zoo.base_path().parent,
        help="a folder that `train` wrote (default: the committed one)",
    )
    evaluate.add_argument(
        "--tasks", nargs="+", choices=zoo.tasks(), help="default: all that have an adapter there"
    )
    evaluate.add_argument("--examples", type=int, default=100, help="held-out prompts per task")
    evaluate.add_argument("--url", help="a running woven server; without it one is started")
    evaluate.add_argument(
        "--merged",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="also serve each merged model (default: unless --url is given)",
    )
    evaluate.add_argument("--json", type=Path, help="write the rows to this file as well")

    prompts = commands.add_parser("prompts", help="print held-out prompts and right answers")
    prompts.set_defaults(run=_prompts)
    prompts.add_argument("--count", type=int, default=5)
    _add_own_task(commands)
    return parser


def _add_own_task(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    score = commands.add_parser("score", help="score the experts on your own examples")
    score.set_defaults(run=_score)
    score.add_argument("--kind", choices=SCORE_KINDS, default="gate")
    tune = commands.add_parser("tune", help="train the chosen experts on your own examples")
    tune.set_defaults(run=_tune)
    tune.add_argument("--experts", type=Path, required=True, metavar="FILE", help="expert_cfg.json")
    tune.add_argument("--steps", type=int, default=100, help="default: %(default)s")
    for command, out in ((score, "JSON file"), (tune, "checkpoint folder")):
        command.add_argument(
            "--examples",
            type=Path,
            required=True,
            metavar="FILE",
            help='lines of {"prompt": "cat -> ", "answer": "cats"}',
        )
        command.add_argument("--out", type=Path, required=True, help=f"{out} to make")
        command.add_argument(
            "--base", type=Path, default=zoo.base_path(), help="default: the demo's"
        )


def _train(options: argparse.Namespace) -> int:
    from sgl_esft.zoo.train import PLANS, train_zoo

    plan = PLANS[options.model]
    train_zoo(plan, options.out, options.seed, options.threads, options.keep_base, _report)
    return 0


def _evaluate(options: argparse.Namespace) -> int:
    from sgl_esft.zoo.evaluate import evaluate, format_table
    from sgl_esft.zoo.serving import ServerError

    folder = options.checkpoints / "adapters"
    there = [name for name in zoo.tasks() if (folder / name).is_dir()]
    adapters = {name: folder / name for name in options.tasks or there}
    merged = options.url is None if options.merged is None else options.merged
    try:
        rows = evaluate(
            options.checkpoints / "base", adapters, options.examples, options.url, merged, _report
        )
    except ServerError as error:
        print(error, file=sys.stderr)
        return 1
    print(format_table(rows, options.examples))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


def _score(options: argparse.Namespace) -> int:
    from sgl_esft.zoo.own_task import score

    count = score(options.base, options.examples, options.kind, options.out)
    print(f"scored the experts on {count} examples, wrote {options.out}")
    return 0


def _tune(options: argparse.Namespace) -> int:
    from sgl_esft.zoo.own_task import tune

    tune(options.base, options.examples, options.experts, options.steps, options.out, _report)
    print(f"trained {options.steps} steps, wrote the checkpoint to {options.out}")
    return 0


def _prompts(options: argparse.Namespace) -> int:
    for name in zoo.tasks():
        print(f"{name}: {TASKS[name].summary}")
        for example in zoo.held_out(name, options.count):
            print(f"  {example.prompt}{example.answer}")
    return 0


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
