"""`python -m sgl_esft.launch_server`: serve a base model and its ESFT adapters.

    command line -> [launch_server] -> launch/server.py

The name by which SGLang's users start a server. Imports late: nothing of this package depends on
the launcher. Children of `multiprocessing` import this file too, as `__mp_main__`.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until stopped. Returns the exit status; 2 for a launch that cannot work."""
    from sgl_esft_launch import server

    return server.main(argv)


def _begin_child() -> None:
    from sgl_esft_launch import server

    server.begin_child()


if __name__ == "__mp_main__":
    _begin_child()

if __name__ == "__main__":
    from sgl_esft.health import ending

    ending.leave_after(main)
