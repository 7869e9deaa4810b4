"""Which of SGLang's decode graphs weaving starts with."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sgl_esft.errors import UnsupportedModelError


def choose(monkeypatch: pytest.MonkeyPatch, backend: str | None) -> None:
    from sgl_esft import sglang_api

    decode = SimpleNamespace(backend=backend)
    config = None if backend is None else SimpleNamespace(decode=decode)
    chosen = SimpleNamespace(graph=SimpleNamespace(cuda_graph_config=config))
    monkeypatch.setattr(sglang_api, "get_exec", lambda: chosen)
    sglang_api.check_decode_graphs()


@pytest.mark.parametrize("backend", [None, "full", "disabled"])
def test_graphs_of_a_whole_step_or_none(
    monkeypatch: pytest.MonkeyPatch, backend: str | None
) -> None:
    choose(monkeypatch, backend)


def test_a_breakable_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedModelError, match="--cuda-graph-backend-decode breakable"):
        choose(monkeypatch, "breakable")
