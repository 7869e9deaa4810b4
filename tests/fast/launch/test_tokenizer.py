"""The TokenizerManager that SGLang is started with: its own, but for the ledger's overrides."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers import tokenizer_manager as sglang_manager

from sgl_elastic import front_hooks
from sgl_esft import hook_ledger
from sgl_esft.config import EsftConfig, current_config
from sgl_esft.errors import EmptyPromptError, HookError
from sgl_esft.health import process
from sgl_esft.hook_ledger import Hook, HookKind, after, around, before, constant, replace
from sgl_esft.plugin import registry_hooks
from sgl_esft_launch import tokenizer

TARGET = f"{__name__}.Sglangs"


class Sglangs:
    """A class of SGLang's, with one method of each kind."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def note(self, word: str) -> str:
        self.seen.append(word)
        return word

    async def later(self, word: str) -> str:
        return word


def entry(make: Any, function: Any, method: str = "note") -> Hook:
    return make(f"{TARGET}.{method}", function, "self word", why="-", remove_when="-")


@pytest.mark.parametrize(
    ("make", "function", "seen", "answer"),
    [
        (before, lambda self, word: self.seen.append("first"), ["first", "a"], "a"),
        (after, lambda result, self, word: self.seen.append(result + "!"), ["a", "a!"], "a"),
        (around, lambda original, self, word: original(self, word + "b"), ["ab"], "ab"),
        (replace, lambda self, word: "ours", [], "ours"),
    ],
)
def test_each_kind_meets_its_method(make: Any, function: Any, seen: list[str], answer: str) -> None:
    found = hook_ledger.subclass(Sglangs, [entry(make, function)])()
    assert (found.note("a"), found.seen) == (answer, seen)
    assert Sglangs().note("a") == "a", "SGLang's own is as it was"


def test_a_coroutine_is_awaited_by_who_calls() -> None:
    async def twice(original: Any, self: Any, word: str) -> str:
        return str(await original(self, word)) * 2

    found = hook_ledger.subclass(Sglangs, [entry(around, twice, "later")])()
    assert asyncio.run(found.later("a")) == "aa"


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        (entry(before, print, "gone"), "has no such name"),
        (Hook(f"{TARGET}.note", HookKind.BEFORE, print, "-", "-", ("self",)), "was written for"),
        (Hook("builtins.dict.get", HookKind.BEFORE, print, "-", "-"), "is no method of Sglangs"),
        (constant(f"{TARGET}.note", 1, why="-", remove_when="-"), "is no method of Sglangs"),
    ],
)
def test_what_does_not_fit_is_refused(hook: Hook, said: str) -> None:
    with pytest.raises(HookError, match=said):
        hook_ledger.subclass(Sglangs, [hook])


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    for name in ("ESFT_CONFIG", "ESFT_LOG_FORMAT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    current_config.cache_clear()
    yield monkeypatch
    current_config.cache_clear()


def overridden(found: type) -> set[str]:
    own = sglang_manager.TokenizerManager
    names = (name for name in dir(own) if not name.startswith("__"))
    return {name for name in names if getattr(found, name) is not getattr(own, name)}


ALWAYS = {
    "generate_request",
    "_set_default_priority",
    "abort_request",
    "handle_loop",
    "_tokenize_texts",
}
ELASTIC = {
    "_dispatch_to_scheduler",
    "_async_dispatch_to_scheduler",
    "_handle_batch_output",
    "_handle_abort_req",
    "get_loads",
}


def test_without_weaving_ids_are_ours(environment: pytest.MonkeyPatch) -> None:
    assert current_config() is None
    assert overridden(tokenizer.manager_class()) == ALWAYS


def test_with_weaving_and_elastic(environment: pytest.MonkeyPatch) -> None:
    EsftConfig(1, 1).export()
    found: Any = tokenizer.manager_class(front_hooks.FRONT_OVERRIDES)
    assert found._resolve_lora_path is registry_hooks.resolve
    assert found._dispatch_to_scheduler is front_hooks.dispatch
    assert overridden(found) == ALWAYS | ELASTIC | {
        "_validate_one_request",
        "_handle_abort_finish_reason",
        "load_lora_adapter",
        "load_lora_adapter_from_tensors",
        "unload_lora_adapter",
        "_resolve_lora_path",
        "_release_lora_once",
        "_init_req_state",
        "_create_tokenized_object",
        "collect_metrics",
    }
    with pytest.raises(EmptyPromptError):
        found._validate_one_request(SimpleNamespace(), None, [])
    tokenizer.check_is(object.__new__(found), found)
    with pytest.raises(HookError, match="SGLang serves with TokenizerManager"):
        tokenizer.check_is(object.__new__(sglang_manager.TokenizerManager), found)


@pytest.mark.parametrize("adapter_id", [None, "of-a-request-that-was-resolved"])
def test_only_what_a_request_holds_is_given_back(
    environment: pytest.MonkeyPatch, adapter_id: str | None
) -> None:
    """By SGLang's own way for requests that fail before they are sent."""
    EsftConfig(1, 1).export()
    manager: Any = object.__new__(tokenizer.manager_class())
    released: list[str | list[str]] = []

    async def release(lora_id: str | list[str]) -> None:  # as SGLang's registry does
        if not isinstance(lora_id, (str, list)):
            raise TypeError("lora_id must be either a string or a list of strings.")
        released.append(lora_id)

    async def fail() -> list[object]:
        request = SimpleNamespace(lora_path="math", lora_id=adapter_id)
        state = SimpleNamespace(obj=request, lora_released=False, dispatched=False)
        manager.enable_lora, manager.lora_registry = True, SimpleNamespace(release=release)
        manager._lora_release_tasks, manager.encoder_dispatch_ready = set(), {}
        manager.rid_to_state = {"rid": state}
        manager._release_req_states_on_failure({"rid": state})
        assert manager.rid_to_state == {}
        return await asyncio.gather(*manager._lora_release_tasks, return_exceptions=True)

    assert asyncio.run(fail()) == ([] if adapter_id is None else [None])
    assert released == ([] if adapter_id is None else [adapter_id])


def test_sglang_makes_its_signal_handler_of_ours(environment: pytest.MonkeyPatch) -> None:
    """SGLang's own initialiser builds the class it is given, which names the handler's."""
    environment.setattr(sglang_manager.TokenizerManager, "__init__", lambda self, *_: None)
    found: Any = tokenizer.manager_class()(None, None)
    handler = found.signal_handler_class(found)
    assert isinstance(handler, sglang_manager.SignalHandler)
    assert handler.sigterm_handler.__func__ is process.on_sigterm
    assert handler.running_phase_sigquit_handler.__func__ is process.on_sigquit
    assert tokenizer.initializer(tokenizer.manager_class()).keywords.keys() == {
        "TokenizerManagerClass"
    }
