"""An instance that dies within milliseconds of publishing its freeze, its last outputs with it.

The real instance manager with the real router's wait; ranks are threads. Three tokens of
request `a` were sent, as the frozen rank says, and two of them ever came by.
"""

from __future__ import annotations

from array import array

import pytest

from sgl_elastic.front import router as module
from sgl_elastic.instance import rank_messages as m
from tests.fast.elastic.front.test_router import Bench
from tests.fast.elastic.test_faults_manager import ONE, STATE, Scene, scene

__all__ = ["scene"]

PUBLISHED = m.RequestState("a", array("q", [7, 8, 9]).tobytes(), 3, {}, {})
KV = m.KvSequence(b"", b"", None, None, 0.0)


@pytest.fixture
def bench(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A router that has seen two tokens; rank 1 publishes three."""
    monkeypatch.setattr(module, "_OUTPUT_TIMEOUT_S", 0.05)
    bench = Bench()
    bench.dispatch("a")
    bench.output("a", 2)
    monkeypatch.setattr(scene, "wait_for_outputs", bench.router.wait_for_outputs)
    return bench


@pytest.mark.parametrize("is_complete", [False, True])
def test_requests_go_on_from_the_tokens_that_came_by(
    scene: Scene, bench: Bench, is_complete: bool
) -> None:
    """A death after the outputs came by is no trouble."""
    name = scene.first()
    scene.ranks[name][1].published = m.Frozen((KV,), (PUBLISHED,))
    if is_complete:
        bench.output("a", 3)
    new = scene.manager.prepare(ONE)
    published = scene.manager.freeze(name)
    assert scene.lost == ([] if is_complete else [name])
    scene.manager.activate(new, published, {1: 0})
    moved = m.KvMove("device-1", (KV,) if is_complete else ())
    state = PUBLISHED if is_complete else STATE
    assert scene.heard(new, 0, m.Activate) == [m.Activate((), (moved,), (state,))]
