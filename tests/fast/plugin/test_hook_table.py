"""Every hook fits the installed SGLang, and a process whose hooks do not hold does not serve."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import sglang
from packaging.specifiers import SpecifierSet

from sgl_elastic.engine.hooks import ENGINE_HOOKS
from sgl_elastic.front_hooks import FRONT_HOOKS, FRONT_OVERRIDES
from sgl_esft import hook_ledger
from sgl_esft.hook_ledger import Hook, HookKind
from sgl_esft.plugin import hook_table
from tests.support.processes import first_outgoing_port, run_module

ROOT = Path(__file__).resolve().parents[3]
LEDGER = (
    hook_table.CPU_HOOKS
    + hook_table.LAUNCHER_HOOKS
    + hook_table.WEAVE_HOOKS
    + hook_table.JSON_LOG_HOOKS
    + hook_table.ROUTER_HOOKS
    + hook_table.GRAPH_HOOKS
    + hook_table.TIER_HOOKS
    + hook_table.LORA_HOOKS
    + ENGINE_HOOKS
    + FRONT_HOOKS
)
# Of classes that are handed to SGLang's own factories: nothing of SGLang is changed for them.
OVERRIDES = (
    hook_table.REQUEST_OVERRIDES
    + hook_table.WEAVE_OVERRIDES
    + hook_table.OBSERVE_OVERRIDES
    + hook_table.JSON_LOG_OVERRIDES
    + hook_table.ENDING_OVERRIDES
    + hook_table.SIGNAL_OVERRIDES
    + FRONT_OVERRIDES
)
# A new way into SGLang needs a reason to raise these; one that goes lowers them.
NUM_HOOKS, NUM_REPLACING, NUM_OVERRIDES = 83, 20, 23
CPU_TARGETS = {hook.target for hook in hook_table.CPU_HOOKS}
LAUNCHER_TARGETS = {hook.target for hook in hook_table.LAUNCHER_HOOKS}
WEAVE_TARGETS = {hook.target for hook in hook_table.WEAVE_HOOKS}
ROUTER_TARGETS = {hook.target for hook in hook_table.ROUTER_HOOKS}
ENGINE_TARGETS = {hook.target for hook in ENGINE_HOOKS}
FRONT_TARGETS = {hook.target for hook in FRONT_HOOKS}

each_hook = pytest.mark.parametrize(
    "hook", LEDGER + OVERRIDES, ids=lambda hook: hook.target.split(".", 2)[-1]
)


@each_hook
def test_target_is_as_the_ledger_says(hook: Hook) -> None:
    hook_ledger.check_signature(hook)


@each_hook
def test_entry_is_complete(hook: Hook) -> None:
    assert hook.target.startswith("sglang.")
    assert len(hook.why) > 10
    assert len(hook.remove_when) > 10
    assert sglang.__version__ in SpecifierSet(hook.sglang)
    assert bool(hook.parameters) != hook.is_value


def test_each_target_is_hooked_once() -> None:
    entries = LEDGER + OVERRIDES
    assert len({hook.target for hook in entries}) == len(entries)


def test_how_much_of_sglang_is_hooked() -> None:
    replacing = [hook for hook in LEDGER if hook.kind is HookKind.REPLACE]
    assert (len(LEDGER), len(replacing)) == (NUM_HOOKS, NUM_REPLACING)
    assert len(OVERRIDES) == NUM_OVERRIDES


@pytest.mark.parametrize(
    "hook",
    [hook for hook in LEDGER + OVERRIDES if not hook.is_value],
    ids=lambda hook: hook.target.split(".", 2)[-1],
)
def test_function_takes_every_call_its_target_takes(hook: Hook) -> None:
    """By position and by keyword; `self`, and a class method's class, always by position.

    What the target takes by keyword only, the hook gets by keyword only.
    """
    owner, name = hook.owner()
    is_class_method = isinstance(owner, type) and isinstance(
        inspect.getattr_static(owner, name), classmethod
    )
    first = {HookKind.AROUND: ["original"], HookKind.AFTER: ["result"]}
    positional = list(first.get(hook.kind, []))
    positional += ["cls"] if is_class_method else []
    named = list(hook.parameters)
    if named[0] == "self":
        positional.append(named.pop(0))
    signature = inspect.signature(hook.function)
    variadic = inspect.signature(hook.resolve()).parameters
    named = [n for n in named if variadic[n].kind is not inspect.Parameter.VAR_KEYWORD]
    for given in (named, [n for n in named if variadic[n].default is inspect.Parameter.empty]):
        by_keyword = [n for n in given if variadic[n].kind is inspect.Parameter.KEYWORD_ONLY]
        by_position = [n for n in given if n not in by_keyword]
        signature.bind(*positional, *by_position, **dict.fromkeys(by_keyword))
    if "_" not in named:
        signature.bind(*positional, **dict.fromkeys(named))


def test_a_changed_parameter_would_be_noticed() -> None:
    """The same check, made to fail on the real target."""
    hook = next(h for h in LEDGER if h.kind is HookKind.REPLACE)
    changed = Hook(hook.target, hook.kind, hook.function, "", "", (*hook.parameters, "more"))
    with pytest.raises(hook_ledger.HookError, match="more"):
        hook_ledger.check_signature(changed)


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """The scenarios of `tests/support/plugin_process.py`, each run in a SGLang process of its
    own.
    """
    return run_module("tests.support.plugin_process")


def answer_of(results: dict[str, Any], scenario: str) -> Any:
    assert results[scenario]["exit_code"] == 0, results[scenario]["output"]
    return results[scenario]["answer"]


@pytest.mark.parametrize(
    ("scenario", "expected"),
    [
        ("weaving_on_the_cpu", CPU_TARGETS | WEAVE_TARGETS | ROUTER_TARGETS),
        ("weaving_on_an_accelerator", WEAVE_TARGETS | ROUTER_TARGETS),
        ("weaving_with_sglangs_router", CPU_TARGETS | WEAVE_TARGETS),
        ("weaving_off", CPU_TARGETS),
        ("our_launcher_without_weaving", CPU_TARGETS | LAUNCHER_TARGETS),
        ("elastic_engine", CPU_TARGETS | WEAVE_TARGETS | ROUTER_TARGETS | ENGINE_TARGETS),
        ("elastic_front", CPU_TARGETS | WEAVE_TARGETS | ROUTER_TARGETS | FRONT_TARGETS),
    ],
)
def test_the_right_hooks_are_in_place(
    results: dict[str, Any], scenario: str, expected: set[str]
) -> None:
    answer = answer_of(results, scenario)
    assert {target for target, holds in answer["in_place"].items() if holds} == expected
    if not scenario.startswith("elastic"):
        assert answer["complaint"] == ""


def test_no_outgoing_connection_takes_the_port_where_ranks_will_meet(
    results: dict[str, Any],
) -> None:
    one, other, given = answer_of(results, "where_ranks_meet")
    assert one != other
    assert 1024 <= min(one, other) <= max(one, other) < first_outgoing_port()
    assert given == 12345


def test_an_elastic_engine_without_its_hooks_does_not_start(results: dict[str, Any]) -> None:
    result = results["an_elastic_engine_that_cannot_hook"]
    assert result["exit_code"] == 1, result["output"]
    last_line = result["output"].strip().splitlines()[-1]
    assert last_line.startswith("sgl_elastic refuses to serve: HookError: "), last_line
    assert "pause_generation: SGLang has no such name" in last_line


def test_names_imported_before_lead_to_the_hooks_too(results: dict[str, Any]) -> None:
    assert answer_of(results, "imported_before") == []


def test_each_hook_is_missed_when_it_is_undone(results: dict[str, Any]) -> None:
    answer = answer_of(results, "each_hook_undone")
    assert answer["complaints"].keys() == CPU_TARGETS | WEAVE_TARGETS | ROUTER_TARGETS
    for target, complaint in answer["complaints"].items():
        assert complaint.endswith(f"adapters would be ignored: {target}")
    assert answer["in_the_end"] == ""


@pytest.mark.parametrize("scenario", ["left_out_of_the_plugin_list", "never_loaded"])
def test_a_plugin_that_was_not_loaded_is_missed(results: dict[str, Any], scenario: str) -> None:
    answer = answer_of(results, scenario)
    assert "SGLANG_PLUGINS" in answer["complaint"]
    assert not any(answer.get("in_place", {}).values())


@pytest.mark.parametrize(
    ("scenario", "reason"),
    [
        (
            "an_sglang_that_was_not_tried",
            "HookError: .* this is 0.5.22; install a supported sglang",
        ),
        (
            "a_target_that_is_gone",
            "HookError: .*ModelRunner.init_lora_manager: SGLang has no such name",
        ),
        (
            "a_target_with_other_parameters",
            r"HookError: .*can_schedule_lora_req takes \('self', 'request'\), the hook was written",
        ),
        (
            "a_hook_that_the_registry_only_logs",
            "HookError: these hooks into SGLang are not in place",
        ),
        ("a_ledger_that_cannot_be_imported", "ImportError|ModuleNotFoundError"),
        ("a_broken_configuration", "ConfigError: ESFT_CONFIG is not a configuration"),
        ("an_unknown_platform", "ConfigError: ESFT_PLATFORM='gpu'"),
    ],
)
def test_a_failing_plugin_ends_the_process(
    results: dict[str, Any], scenario: str, reason: str
) -> None:
    """SGLang's loader logs what a plugin raises and serves on; this must get past it."""
    result = results[scenario]
    assert result["exit_code"] == 1, result["output"]
    assert result["answer"] is None
    last_line = result["output"].strip().splitlines()[-1]
    assert last_line.startswith("sgl_esft refuses to serve: ")
    assert re.search(reason, last_line), last_line
