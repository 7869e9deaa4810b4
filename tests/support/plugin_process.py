"""What a SGLang process does with the plugin, scenario by scenario, each in a process of its own.

    python -m tests.support.plugin_process  ->  {scenario: {"exit_code", "answer", "output"}} as
    JSON

The processes are forks of one that has imported SGLang, because that import takes most of the time.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sgl_elastic.engine.hooks import ENGINE_HOOKS
from sgl_elastic.front_hooks import FRONT_HOOKS
from sgl_elastic.instance import engine_config
from sgl_esft import hook_ledger
from sgl_esft.config import EsftConfig
from sgl_esft.errors import HookError
from sgl_esft.hook_ledger import Hook
from sgl_esft.plugin import hook_table, register

SCENARIOS: dict[str, Callable[[], Any]] = {}


def scenario(function: Callable[[], Any]) -> Callable[[], Any]:
    SCENARIOS[function.__name__] = function
    return function


def load() -> None:
    """As every SGLang process begins."""
    from sglang.srt.plugins import load_plugins

    load_plugins()


def weaving(platform: str = "cpu", reroute: str = "router") -> None:
    os.environ["ESFT_PLATFORM"] = platform
    EsftConfig(max_adapters=2, max_experts_per_adapter=3, reroute=reroute).export()


def in_place(ledger: tuple[Hook, ...]) -> dict[str, bool]:
    def holds(hook: Hook) -> bool:
        try:
            return hook_ledger.is_in_place(hook)
        except HookError:  # an ADD that was not added
            return False

    return {hook.target: holds(hook) for hook in ledger}


WEAVING = hook_table.CPU_HOOKS + hook_table.WEAVE_HOOKS + hook_table.ROUTER_HOOKS
EVERYTHING = WEAVING + hook_table.LAUNCHER_HOOKS + ENGINE_HOOKS + FRONT_HOOKS


def everything_in_place() -> dict[str, bool]:
    return in_place(EVERYTHING)


def elastic_engine_process() -> None:
    os.environ[engine_config.VARIABLE] = engine_config.EngineConfig(
        "i1", "/nowhere", (0, 1), backend="host", page_bytes=4096, max_kv_tokens=64
    ).to_json()
    engine_config.current.cache_clear()


def complaint() -> str:
    """What `verify` says; empty when it is content."""
    try:
        hook_ledger.verify_required()
    except HookError as error:
        return str(error)
    return ""


@scenario
def weaving_on_the_cpu() -> Any:
    weaving()
    load()
    return {"in_place": everything_in_place(), "complaint": complaint()}


@scenario
def weaving_on_an_accelerator() -> Any:
    weaving("native")
    load()
    return {"in_place": everything_in_place(), "complaint": complaint()}


@scenario
def weaving_with_sglangs_router() -> Any:
    weaving(reroute="fused")
    load()
    return {"in_place": everything_in_place(), "complaint": complaint()}


@scenario
def weaving_off() -> Any:
    os.environ["ESFT_PLATFORM"] = "cpu"
    load()
    return {"in_place": everything_in_place(), "complaint": complaint()}


@scenario
def our_launcher_without_weaving() -> Any:
    """It names a heartbeat table in which loops show that they turn."""
    os.environ["ESFT_PLATFORM"] = "cpu"
    os.environ["ESFT_HEARTBEAT_TABLE"] = "/nowhere"
    load()
    return {"in_place": everything_in_place(), "complaint": complaint()}


@scenario
def where_ranks_meet() -> Any:
    """What SGLang chooses under our launcher, for each of two servers and one that has its own."""
    from sglang.srt.server_args import PortArgs, ServerArgs

    os.environ["ESFT_PLATFORM"] = "cpu"
    os.environ["ESFT_HEARTBEAT_TABLE"] = "/nowhere"
    load()
    given: list[dict[str, Any]] = [{"port": 29990}, {"port": 29990}, {"nccl_port": 12345}]
    servers = [ServerArgs(model_path="unused", device="cpu", **more) for more in given]
    return [PortArgs.init_new(server).nccl_port for server in servers]


@scenario
def elastic_engine() -> Any:
    """A rank of an elastic instance: its environment says so."""
    weaving()
    elastic_engine_process()
    load()
    return {"in_place": everything_in_place()}


@scenario
def elastic_front() -> Any:
    """The process that serves HTTP installs its own."""
    weaving()
    load()
    hook_ledger.install(FRONT_HOOKS)
    return {"in_place": everything_in_place()}


@scenario
def an_elastic_engine_that_cannot_hook() -> Any:
    from sglang.srt.managers.scheduler import Scheduler

    weaving()
    elastic_engine_process()
    del Scheduler.pause_generation
    load()
    return "served"


@scenario
def each_hook_undone() -> Any:
    """Target -> the complaint after this one was put back as SGLang has it."""
    from unittest import mock

    weaving()
    load()
    complaints = {}
    for hook in WEAVING:
        owner, name = hook.owner()
        with mock.patch.object(owner, name, new=object()):
            complaints[hook.target] = complaint()
    return {"complaints": complaints, "in_the_end": complaint()}


@scenario
def imported_before() -> Any:
    """Names that still mean SGLang's own function, in modules that were imported before."""
    from sglang.srt.models import qwen2_moe

    weaving()
    before = {hook.target: hook.resolve() for hook in hook_table.CPU_HOOKS if not hook.is_value}
    assert "fused_gate_sigmoid_mul_add" in vars(qwen2_moe)
    load()
    return [
        f"{module.__name__}.{name} is still {target}"
        for module in list(sys.modules.values())
        for name, value in list(getattr(module, "__dict__", {}).items())
        for target, original in before.items()
        if value is original and not target.startswith(module.__name__ + ".")
    ]


@scenario
def left_out_of_the_plugin_list() -> Any:
    weaving()
    os.environ["SGLANG_PLUGINS"] = "another_plugin"
    load()
    return {"in_place": everything_in_place(), "complaint": complaint()}


@scenario
def never_loaded() -> Any:
    weaving()
    return {"complaint": complaint()}


@scenario
def an_sglang_that_was_not_tried() -> Any:
    weaving()
    register.sglang_version = lambda: "0.5.22"
    load()
    return "served"


@scenario
def a_target_that_is_gone() -> Any:
    from sglang.srt.model_executor.model_runner import ModelRunner

    weaving()
    ModelRunner.make_lora_manager = ModelRunner.init_lora_manager
    del ModelRunner.init_lora_manager
    load()
    return "served"


@scenario
def a_target_with_other_parameters() -> Any:
    from sglang.srt.managers.scheduler import Scheduler

    weaving()
    Scheduler.can_schedule_lora_req = lambda self, request: True
    load()
    return "served"


@scenario
def a_hook_that_the_registry_only_logs() -> Any:
    from sglang.srt.plugins.hook_registry import HookRegistry

    weaving()
    HookRegistry._apply_target = classmethod(lambda *_: 1 / 0)
    load()
    return "served"


@scenario
def a_ledger_that_cannot_be_imported() -> Any:
    """SGLang moved something that is imported, not hooked."""
    import sgl_esft

    weaving()
    del sgl_esft.plugin.hook_table
    sys.modules["sgl_esft.plugin.hook_table"] = None  # type: ignore[assignment]
    load()
    return "served"


@scenario
def a_broken_configuration() -> Any:
    os.environ["ESFT_CONFIG"] = "{"
    load()
    return "served"


@scenario
def an_unknown_platform() -> Any:
    weaving("gpu")
    load()
    return "served"


def run(name: str, folder: Path) -> dict[str, Any]:
    """One scenario in a fork: its answer, how it ended, and what it printed."""
    answer, output = folder / f"{name}.json", folder / f"{name}.txt"
    pid = os.fork()
    if pid == 0:
        descriptor = os.open(output, os.O_CREAT | os.O_WRONLY)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os._exit(exit_code_of(lambda: answer.write_text(json.dumps(SCENARIOS[name]()))))
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return {
        "exit_code": status,
        "answer": json.loads(answer.read_text()) if answer.exists() else None,
        "output": output.read_text(errors="replace"),
    }


def exit_code_of(body: Callable[[], object]) -> int:
    """As Python ends a process: 0, 1 after an exception, or what SystemExit says."""
    try:
        body()
    except SystemExit as stop:
        if isinstance(stop.code, str):
            sys.stderr.write(stop.code + "\n")
        sys.stderr.flush()
        return stop.code if isinstance(stop.code, int) else 1
    except Exception:
        logging.exception("the scenario itself is broken: a refusal ends with SystemExit")
        return 99
    return 0


def main() -> None:
    for hook in EVERYTHING:
        hook.owner()  # imports what all scenarios need
    with tempfile.TemporaryDirectory() as folder:
        results = {name: run(name, Path(folder)) for name in SCENARIOS}
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main()
