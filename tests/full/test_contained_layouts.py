"""What one request does to an engine stays with it, where an engine is more than one rank.

The requests of server/test_contained.py, to two ranks that share the experts, to two that attend to
requests of their own, and to an elastic server.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from unittest.mock import ANY

import pytest

from tests.server.test_contained import NOT_FINITE, OVERFLOWS, UNFIT_ENDS, ended_by, started
from tests.support.poison_plugin import UNFIT
from tests.support.servers import DP2_EP2, TP2_EP2, Server

pytestmark = pytest.mark.server

ELASTIC = ("--elastic", "--max-devices", "2", "--dp-size", "2", "--device-memory", "64MiB")
LAYOUTS = {"tp2-ep2": TP2_EP2, "dp2-ep2": DP2_EP2, "elastic": ELASTIC}


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def server(layout: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from started(tmp_path_factory.mktemp(layout), *LAYOUTS[layout])


@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_taken_in(server: Server, stream: bool) -> None:
    assert UNFIT_ENDS in ended_by(server, {"input_ids": UNFIT, "stream": stream})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_logits_that_are_not_finite(
    server: Server, layout: str, temperature: float, stream: bool
) -> None:
    body: dict[str, Any] = {"text": "engine -> ", "adapter": OVERFLOWS, "stream": stream}
    parameters = {"temperature": temperature, "max_new_tokens": 8}
    before = len(server.log_path.read_text())
    message = ended_by(server, {**body, "sampling_params": parameters})
    assert message.startswith(NOT_FINITE)
    assert f"the weights of adapter '{OVERFLOWS}' overflow" in message
    # Elsewhere one rank alone has the request.
    assert ends_in_log(server, before) == (["TP0 EP0", "TP1 EP1"] if layout == "tp2-ep2" else [ANY])


def ends_in_log(server: Server, before: int) -> list[str]:
    """What the log calls the ranks that have ended a request for its logits since: `TP1 EP1`."""
    text = server.log_path.read_text()[before:]
    return sorted(re.findall(r"^\[\S+ \S+?(?: (\S.*))?\] request \S+ ends: the logits", text, re.M))
