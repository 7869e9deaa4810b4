"""Which of SGLang's decode graphs weaving starts with."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from sgl_esft.config import EsftConfig, TierConfig
from sgl_esft.errors import UnsupportedModelError
from sgl_esft.plugin.graph_hooks import flatten
from sgl_esft.plugin.hook_table import GRAPH_HOOKS


def choose(monkeypatch: pytest.MonkeyPatch, backend: str | None, *, breaks: bool = False) -> None:
    from sgl_esft import sglang_api

    decode = SimpleNamespace(backend=backend)
    config = None if backend is None else SimpleNamespace(decode=decode)
    chosen = SimpleNamespace(graph=SimpleNamespace(cuda_graph_config=config))
    monkeypatch.setattr(sglang_api, "get_exec", lambda: chosen)
    sglang_api.check_decode_graphs(breaks=breaks)


@pytest.mark.parametrize("backend", [None, "full", "disabled"])
def test_graphs_of_a_whole_step_or_none(
    monkeypatch: pytest.MonkeyPatch, backend: str | None
) -> None:
    choose(monkeypatch, backend)


def test_a_breakable_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedModelError, match="--cuda-graph-backend-decode breakable"):
        choose(monkeypatch, "breakable")


@pytest.mark.parametrize("backend", [None, "breakable", "disabled"])
def test_layers_that_decide_on_the_host_have_graphs_with_breaks(
    monkeypatch: pytest.MonkeyPatch, backend: str | None
) -> None:
    choose(monkeypatch, backend, breaks=True)


def test_a_whole_graph_of_decisions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedModelError, match=r"backend-decode full: .* use breakable"):
        choose(monkeypatch, "full", breaks=True)


def selected(
    monkeypatch: pytest.MonkeyPatch, config: EsftConfig, *, on_cpu: bool
) -> frozenset[str]:
    """Targets of the hooks that a rank installs."""
    from sgl_esft import config as configuration
    from sgl_esft import platform
    from sgl_esft.plugin.register import select_hooks

    monkeypatch.setattr(configuration, "current_config", lambda: config)
    monkeypatch.setattr(platform, "is_active", lambda: on_cpu)
    return frozenset(hook.target for hook in select_hooks())


def test_sglangs_backend_is_hooked_where_its_graphs_have_breaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = EsftConfig(max_adapters=1, max_experts_per_adapter=1)
    tiered = replace(plain, tiers=TierConfig(num_rows=4, top_k=2))
    own = {hook.target for hook in GRAPH_HOOKS}
    assert len(own) == 2
    assert own <= selected(monkeypatch, tiered, on_cpu=False)
    assert not own & selected(monkeypatch, tiered, on_cpu=True)
    assert not own & selected(monkeypatch, plain, on_cpu=False)


def test_a_steps_answer_is_its_tensors_and_the_rest() -> None:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput

    logits, hidden = torch.ones(2, 3), torch.zeros(2, 4)
    form, tensors = flatten(LogitsProcessorOutput(logits, hidden_states=hidden))
    assert [tensor.data_ptr() for tensor in tensors] == [logits.data_ptr(), hidden.data_ptr()]
    assert form.bare == LogitsProcessorOutput(None)
    again = form.fill((hidden, logits))
    assert again.next_token_logits is hidden
    assert again.hidden_states is logits
    with pytest.raises(UnsupportedModelError, match="answers with customized_info"):
        flatten(LogitsProcessorOutput(logits, customized_info={"a": [1]}))
