"""Hooks in the process that serves HTTP: requests go through the router.

SGLang's launch --> [launch_instances] --> runtime (launch.py)
TokenizerManager --> [dispatch] --> router <-- [note_outputs, note_abort] <-- detokenizer, ranks
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from sgl_esft.hook_ledger import Hook, after, around, replace

if TYPE_CHECKING:
    from sgl_elastic.runtime import Runtime

_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"

_runtime: Runtime | None = None


def use(runtime: Runtime) -> None:
    """The runtime of this process, before the hooks are installed."""
    global _runtime
    _runtime = runtime


def _required() -> Runtime:
    if _runtime is None:
        raise RuntimeError("the elastic hooks run without a runtime")
    return _runtime


def launch_instances(
    engine_class: type,
    server_args: Any,
    port_args: Any,
    run_scheduler_process_func: Callable[..., None],
    *,
    placement_group: Any = None,
) -> tuple[Any, list[Any]]:
    """In place of SGLang's own schedulers: the first elastic instance."""
    from sglang.srt.entrypoints.engine import SchedulerInitResult

    infos: list[dict[str, Any]] = []

    def wait_for_ready() -> None:
        infos.append(_required().start(port_args))

    return SchedulerInitResult(scheduler_infos=infos, wait_for_ready=wait_for_ready), []


def dispatch(manager: Any, obj: Any) -> None:
    """What is meant for the scheduler goes to the instance that serves."""
    _required().router.dispatch(obj)


async def dispatch_async(manager: Any, obj: Any) -> None:
    """As `dispatch`."""
    _required().router.dispatch(obj)


async def note_outputs(
    original: Callable[..., Awaitable[None]], manager: Any, recv_obj: Any
) -> None:
    """The router learns what has come back, then SGLang hands it to the client."""
    tokens = getattr(recv_obj, "completion_tokens", None) or [0] * len(recv_obj.rids)
    output_ids = getattr(recv_obj, "output_ids", None) or ()
    router = _required().router
    router.on_output(recv_obj.rids, recv_obj.finished_reasons, tokens, output_ids)
    await original(manager, recv_obj)


def note_abort(result: None, manager: Any, recv_obj: Any) -> None:
    """A rank has thrown a request out of its queue: no output will say that it has ended."""
    _required().router.on_abort(recv_obj.rid)


async def get_loads(manager: Any, include: Any = None, dp_rank: int | None = None) -> list[Any]:
    """What the ranks that serve wrote with their last batches; replicas are several instances."""
    from sgl_elastic.front import sglang_wire
    from sgl_elastic.instance.state import serving

    runtime = _required()
    found = [
        load
        for each in serving(runtime.instances())
        for load in sglang_wire.read_loads(runtime.directory, each)
    ]
    return [load for load in found if dp_rank in (None, load.dp_rank)]


def note_who_asks(result: None, communicator: Any, *arguments: Any, **named: Any) -> None:
    """So that what is asked during a switch waits for the answers of the ranks that get it."""
    from sgl_elastic.front import sglang_wire

    sglang_wire.note_who_asks(result, communicator, *arguments, **named)


FRONT_HOOKS: tuple[Hook, ...] = (
    replace(
        "sglang.srt.entrypoints.engine.Engine._launch_scheduler_processes",
        launch_instances,
        "server_args port_args run_scheduler_process_func placement_group",
        why="ranks belong to instances that come and go while the HTTP server stays",
        remove_when="SGLang lets a plugin supply the engine class",
    ),
    after(
        "sglang.srt.managers.communicator.FanOutCommunicator.__init__",
        note_who_asks,
        "self send fan_out mode",
        why="a control message that is held during a switch is answered by another number of "
        "ranks than when it was asked: too few for ever, or one too many for the next question",
        remove_when="SGLang's communicator counts the answers of those it was sent to",
    ),
)

# Methods of the class that the launcher hands to SGLang: in the process that serves HTTP.
FRONT_OVERRIDES: tuple[Hook, ...] = (
    *(
        replace(
            f"{_MANAGER}.{method}",
            function,
            "self obj",
            why="which instance gets a request is decided for each request",
            remove_when="SGLang lets a plugin supply the way to the scheduler",
        )
        for method, function in (
            ("_dispatch_to_scheduler", dispatch),
            ("_async_dispatch_to_scheduler", dispatch_async),  # where SGLang sends from a coroutine
        )
    ),
    replace(
        f"{_MANAGER}.get_loads",
        get_loads,
        "self include dp_rank",
        why="SGLang's front reads one file for its whole life, and each instance writes its own: "
        "GET /v1/loads would be empty",
        remove_when="SGLang lets a plugin say where ranks write their load",
    ),
    around(
        f"{_MANAGER}._handle_batch_output",
        note_outputs,
        "self recv_obj",
        why="a request that is handed over goes on only after its last tokens have come by",
        remove_when="SGLang tells a plugin of outputs",
    ),
    after(
        f"{_MANAGER}._handle_abort_req",
        note_abort,
        "self recv_obj",
        why="a request that is aborted while it waits for its rank has no output that ends it: it "
        "would count as running for ever, and be sent again to each instance that takes over",
        remove_when="SGLang tells a plugin of outputs",
    ),
)
