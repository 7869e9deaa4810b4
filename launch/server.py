"""From a command line to a server that has ended, with or without the elastic runtime.

    launch_server -> flags -> plan_launch -> prepare_environment -> serve (SGLang's own server)

Takes every SGLang flag besides its own. Without --model-path it serves the
demo zoo. Adapters are checked against the base before anything is started.
With --elastic, launch/elastic.py takes over from here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from sgl_esft.errors import EsftError
from sgl_esft.health import ending
from sgl_esft.tools.versions import describe_versions
from sgl_esft_launch import access, arguments, console, fit, flags, plan


def begin_child() -> None:
    """What a process that `multiprocessing` has started from the launcher does first."""
    ending.leave_to_front()


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until stopped. Returns the exit status; 2 for a launch that cannot work."""
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        build_whole_parser().print_help()
        return 0
    console.begin(argv)
    if "--elastic" in argv and "--version" not in argv:
        return _main_elastic(argv)
    try:
        if "--version" in argv:
            print(describe_versions())
            return 0
        parsed, sglang_argv = flags.parse(argv)
        arguments.check_known(sglang_argv, build_whole_parser())
        launch = plan.plan_launch(parsed, sglang_argv)
        fit.check(launch)
        _warn(launch)
    except EsftError as error:
        return console.refuse(error)
    from sgl_esft_launch import serve

    return serve.serve(launch)


def _main_elastic(argv: Sequence[str]) -> int:
    """As `main`; the elastic package is imported by none but an elastic server."""
    from sgl_elastic.errors import ElasticError
    from sgl_esft_launch import elastic, elastic_fit

    try:
        planned = elastic.plan_elastic(argv)
        elastic_fit.check(planned)
        _warn(planned.launch)
    except (EsftError, ElasticError) as error:
        return console.refuse(error, elastic.PROGRAM)
    from sgl_esft_launch import elastic_serve

    return elastic_serve.serve(planned)


def _warn(launch: plan.LaunchPlan) -> None:
    """Of what looks like a mistake, and may be none."""
    ring = launch.access.policy.keys
    if ring.is_restricted:
        for line in access.unknown_adapters(ring, plan.known_adapters(launch)):
            console.warn(line)


def build_whole_parser() -> argparse.ArgumentParser:
    """All flags, the elastic ones included. Imports neither SGLang nor torch."""
    from sgl_elastic.options import add_flags

    parser = flags.build_parser()
    add_flags(parser)
    return parser
