"""Completion of `sgl-esft` in a shell: a script made from the parsers, which starts nothing itself.

    sgl-esft completion -> [main]: parsers of tools and launcher -> [script] -> bash, or zsh by its
                                                                                bashcompinit

Commands, flags and choices are offered; for every other value the shell offers files.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from sgl_esft.errors import ConfigError
from sgl_esft.tools import cli
from sgl_esft_launch import arguments, server

_HEADS: Final = {
    "bash": "",
    # A second compinit would forget what other programs have defined in this shell.
    "zsh": (
        "typeset -f compdef > /dev/null || { autoload -U +X compinit && compinit -i; }\n"
        "autoload -U +X bashcompinit && bashcompinit\n"
    ),
}
_SCRIPT: Final = """\
# {shell} completion of {program}, made by `{program} completion {shell}`
{head}{function}() {{
    local word prev= offer= at={program} cur="${{COMP_WORDS[@]:$COMP_CWORD:1}}"
    COMPREPLY=()
    for word in "${{COMP_WORDS[@]:1:$((COMP_CWORD - 1))}}"; do
        case "$at $word" in
            {commands}) at="$at $word" ;;
        esac
        prev=$word
    done
    case "$at $prev" in
        {values}
        *) case "$at|$cur" in
            {words}
        esac ;;
    esac
    COMPREPLY=($(compgen -W "$offer" -- "$cur"))
}}
complete -o default -F {function} {program}
"""


@dataclass(frozen=True)
class _Command:
    """What may follow one command; `path` begins with the program's name."""

    path: str
    flags: tuple[str, ...]
    words: tuple[str, ...]  # its subcommands, or choices of what it is given
    values: dict[str, tuple[str, ...]]  # flag that takes a value -> its choices, () = anything


def script(
    shell: str,
    parser: argparse.ArgumentParser,
    launcher: argparse.ArgumentParser,
    engine_flags: Iterable[str],
) -> str:
    """For `shell`, one of `cli.SHELLS`. `serve` takes the launcher's flags and the engine's."""
    found = {command.path: command for command in _commands(parser, parser.prog)}
    (serve,) = _commands(launcher, f"{parser.prog} serve")
    flags = tuple(dict.fromkeys([*serve.flags, *sorted(engine_flags)]))
    found[serve.path] = replace(serve, flags=flags)
    return _SCRIPT.format(
        shell=shell,
        head=_HEADS[shell],
        program=parser.prog,
        function="_" + parser.prog.replace("-", "_"),
        commands=" | ".join(shlex.quote(path) for path in found if path != parser.prog),
        values="\n        ".join(line for each in found.values() for line in _values(each)),
        words="\n            ".join(line for each in found.values() for line in _words(each)),
    )


def _commands(parser: argparse.ArgumentParser, path: str) -> Iterator[_Command]:
    flags: list[str] = []
    words: list[str] = []
    values: dict[str, tuple[str, ...]] = {}
    for action in parser._actions:
        choices = tuple(map(str, action.choices or ()))
        flags += action.option_strings
        if not action.option_strings:
            words += choices
        elif action.nargs != 0:
            values.update(dict.fromkeys(action.option_strings, choices))
    yield _Command(path, tuple(flags), tuple(words), values)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, sub in action.choices.items():
                yield from _commands(sub, f"{path} {name}")


def _values(command: _Command) -> Iterator[str]:
    for flag, choices in command.values.items():
        then = f"offer={shlex.quote(' '.join(choices))}" if choices else "return"
        yield f"{shlex.quote(f'{command.path} {flag}')}) {then} ;;"


def _words(command: _Command) -> Iterator[str]:
    """With a dash flags, without one what is no flag."""
    yield f"{shlex.quote(f'{command.path}|-')}*) offer={shlex.quote(' '.join(command.flags))} ;;"
    if command.words:
        yield f"{shlex.quote(f'{command.path}|')}*) offer={shlex.quote(' '.join(command.words))} ;;"


def main(shell: str) -> int:
    """Print it. Returns the exit status."""
    try:
        engine_flags = arguments.sglang_flags()
    except ConfigError:  # not installed: the tools do without
        engine_flags = frozenset()
    launcher = server.build_whole_parser()
    print(script(shell, cli.build_parser(), launcher, engine_flags), end="")
    return cli.EXIT_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
