"""The frontend language names the right adapter in every request, and its errors reach the reader.

The server here only keeps what it is asked, and answers with the adapter's name.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import runpy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import sglang

from sgl_esft import lang as sgl
from sgl_esft.errors import AdapterNameError, HookError, UnknownAdapterError, UserError
from sgl_esft.lang import endpoint as endpoint_module
from tests.support.loopback import JsonHandler, served, url_of

# SGLang's word about a failed call, beside the error itself.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Error in stream_executor"),
    pytest.mark.usefixtures("no_automatic_gc"),
]

README = Path(__file__).parents[3] / "README.md"
LOADED = {"law", "math", "intent"}


class FakeServer(ThreadingHTTPServer):
    """Answers as SGLang does; `bodies` are the requests to /generate so far."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.unknown_status = 400

    def asked(self) -> list[tuple[Any, str | None]]:
        """(prompt, adapter) of every request that generates."""
        return self._sent(generates)

    def prepared(self) -> list[tuple[Any, str | None]]:
        """(prompt, adapter) of every request that only fills the cache."""
        return self._sent(lambda body: not generates(body) and "return_logprob" not in body)

    def _sent(self, is_meant: Callable[[dict[str, Any]], bool]) -> list[tuple[Any, str | None]]:
        return [(each.get("text"), each.get("lora_path")) for each in self.bodies if is_meant(each)]


def generates(body: dict[str, Any]) -> bool:
    return bool(body["sampling_params"]["max_new_tokens"])


class Handler(JsonHandler):
    server: FakeServer

    def do_GET(self) -> None:
        if self.path == "/get_model_info":
            self.send_json(200, {"model_path": "base"})
        else:
            self.send_json(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = self.read_json()
        self.server.bodies.append(body)
        adapter = body.get("lora_path")
        if adapter is None or adapter in LOADED:
            reply = answer(body)
        else:
            message = f"Got LoRA adapter that has never been loaded: {adapter}\n"
            reply = {"error": {"message": message}}
        if body.get("stream"):
            self.send_stream(reply)
        else:
            self.send_json(self.server.unknown_status if "error" in reply else 200, reply)

    def send_stream(self, reply: dict[str, Any]) -> None:
        """An error is a chunk of a stream that began well, as in SGLang."""
        text = reply.get("text", "")
        parts = [text[:i] for i in range(1, len(text) + 1)]
        self.send_events([reply | {"text": part} for part in parts] or [reply])


def answer(body: dict[str, Any]) -> Any:
    name = body.get("lora_path") or "base"
    if isinstance(body.get("text"), str):
        return {"text": f"<{name}>", "meta_info": {"prompt_tokens": 4}}
    prompts = body.get("text") or body["input_ids"]
    # Each model likes best the choice that is its own name.
    scores = [-1.0 if str(prompt).endswith(name) else -5.0 for prompt in prompts]
    return [
        {
            "meta_info": {
                "input_token_logprobs": [[-1.0, 1, "?"], [score, 2, "!"]],
                "output_token_logprobs": [],
            }
        }
        for score in scores
    ]


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with served(FakeServer()) as server:
        yield server


@pytest.fixture
def backend(server: FakeServer) -> sgl.RuntimeEndpoint:
    return sgl.RuntimeEndpoint(url_of(server))


@sgl.function
def ask(s: Any, **gen_args: Any) -> None:
    s += "Q "
    s += sgl.gen("a", **gen_args)


# ---- which adapter ----


@pytest.mark.parametrize(
    ("call", "run", "of_backend", "expected"),
    [
        ({}, {}, None, "base"),
        ({}, {}, "math", "math"),
        ({}, {"adapter": "law"}, None, "law"),
        ({}, {"adapter": "law"}, "math", "law"),
        ({}, {"adapter": None}, "math", "base"),
        ({"adapter": "intent"}, {"adapter": "law"}, "math", "intent"),
        ({"adapter": None}, {"adapter": "law"}, "math", "base"),
        ({"adapter": None}, {}, "math", "base"),
    ],
)
def test_the_nearest_name_decides(
    server: FakeServer, call: Any, run: Any, of_backend: str | None, expected: str
) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "Q " + sgl.gen("a", **call)

    backend = sgl.RuntimeEndpoint(url_of(server), adapter=of_backend)
    assert program.run(backend=backend, **run)["a"] == f"<{expected}>"
    assert server.asked() == [("Q ", None if expected == "base" else expected)]


def test_without_adapters_requests_are_sglangs(
    server: FakeServer, backend: sgl.RuntimeEndpoint
) -> None:
    def program(s: Any, q: str) -> None:
        s += sgl.user(q)
        s += sgl.assistant(sgl.gen("a", stop="x", max_tokens=7))
        s.sync()
        forks = s.fork(2)
        forks[0] += sgl.gen_int("b")
        forks[0].sync()
        forks[1] += sgl.select("c", ["base", "law"])
        s += forks[0]["b"] + forks[1]["c"]

    plain = sglang.function(program).run(q="why", backend=sglang.RuntimeEndpoint(url_of(server)))
    text, bodies = plain.text(), server.bodies[:]
    server.bodies.clear()
    ours = sgl.function(program).run(q="why", backend=backend)
    assert ours.text() == text
    assert server.bodies == bodies


def test_plain_sglang_programs_run_on_our_backend(server: FakeServer) -> None:
    @sglang.function
    def program(s: Any) -> None:
        s += "Q " + sglang.gen("a")

    assert program.run(backend=sgl.RuntimeEndpoint(url_of(server), adapter="law"))["a"] == "<law>"


def test_the_readmes_row_works_as_it_is_written(
    backend: sgl.RuntimeEndpoint, tmp_path: Path
) -> None:
    """Its import, its call of `gen` and its `run`, from the text."""
    row = re.search(r"frontend language, by `(.+?)` \| `(.+?)`, `(.+?)` \|", README.read_text())
    assert row is not None
    statement, call, run = row.groups()
    lines = (
        *(statement, "@sgl.function", "def program(s):", f"    s += {call}"),
        *("sgl.set_default_backend(backend)", f"said = program.{run}['said']"),
    )
    file = tmp_path / "program.py"
    file.write_text("\n".join(lines).replace("...", '"said"'))
    assert runpy.run_path(str(file), {"backend": backend})["said"] == "<math>"


def test_default_backend(backend: sgl.RuntimeEndpoint) -> None:
    sgl.set_default_backend(backend)
    try:
        assert ask.run(adapter="law")["a"] == "<law>"
        assert ask(adapter="math")["a"] == "<math>"
    finally:
        sgl.set_default_backend(None)


def test_an_answer_may_choose_the_adapter(backend: sgl.RuntimeEndpoint) -> None:
    @sgl.function
    def route(s: Any) -> None:
        s += "Q " + sgl.select("task", ["math", "law"], adapter="law")
        s += sgl.gen("a", adapter=s["task"])

    assert route.run(backend=backend)["a"] == "<law>"


@pytest.mark.parametrize(
    ("call", "regex"),
    [(sgl.gen_int, r"[-+]?[0-9]+[ \n]*"), (sgl.gen_string, r"\"[\w\d\s]*\""), (sgl.gen, None)],
)
def test_typed_calls_keep_their_type(
    server: FakeServer, backend: sgl.RuntimeEndpoint, call: Callable[..., Any], regex: str | None
) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += call("a", max_tokens=9, adapter="law")

    assert program.run(backend=backend)["a"] == "<law>"
    assert server.bodies[0]["sampling_params"]["regex"] == regex
    assert server.bodies[0]["sampling_params"]["max_new_tokens"] == 9


# ---- choices ----


@pytest.mark.parametrize("call", [sgl.select, sgl.gen])
@pytest.mark.parametrize(
    "method",
    [
        sgl.token_length_normalized,
        sgl.greedy_token_selection,
        sgl.unconditional_likelihood_normalized,
    ],
)
@pytest.mark.parametrize("use_run", [False, True])
def test_choices(
    server: FakeServer,
    backend: sgl.RuntimeEndpoint,
    call: Callable[..., Any],
    method: Any,
    use_run: bool,
) -> None:
    named = {"adapter": "law"}

    @sgl.function
    def program(s: Any) -> None:
        s += "Q "
        s += call(
            "a",
            choices=["base", "math", "law"],
            choices_method=method,
            **({} if use_run else named),
        )

    state = program.run(backend=backend, **(named if use_run else {}))
    assert state["a"] == "law"
    assert {body["lora_path"] for body in server.bodies} == {"law"}
    assert len(server.bodies) == (3 if method.requires_unconditional_logprobs else 2)


# ---- forks, batches, streams ----


def test_choices_of_the_base(server: FakeServer, backend: sgl.RuntimeEndpoint) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "Q " + sgl.select("a", ["law", "base"], adapter=None)

    assert program.run(backend=backend, adapter="law")["a"] == "base"
    assert not any("lora_path" in body for body in server.bodies)


@sgl.function
def forking(s: Any) -> None:
    s += "Q "
    s.sync()  # a fork caches what it has only if there is some already
    forks = s.fork(4)
    forks[0] += "0" + sgl.gen("x", adapter="law")
    forks[1] += "1" + sgl.gen("x", adapter="math")
    forks[2] += "2" + sgl.gen("x", adapter=None)
    forks[3] += "3" + sgl.gen("x")
    forks.join()
    with s.copy() as again:
        again += sgl.gen("y", adapter="math")  # noqa: PLW2901  # how programs are written
    s += sgl.gen("z")


@pytest.mark.parametrize(("default", "expected"), [("intent", "intent"), (None, "base")])
def test_forks(
    server: FakeServer, backend: sgl.RuntimeEndpoint, default: str | None, expected: str
) -> None:
    state = forking.run(backend=backend, adapter=default)
    assert state["x"] == ["<law>", "<math>", "<base>", f"<{expected}>"]
    assert state["y"] == ["<math>"]
    assert state["z"] == f"<{expected}>"
    assert server.prepared() == [("Q ", default)]


@pytest.mark.parametrize("num_threads", [1, 8])
def test_batches(backend: sgl.RuntimeEndpoint, num_threads: int) -> None:
    @sgl.function
    def program(s: Any, i: int, which: str | None) -> None:
        s += f"{i}: "
        s += sgl.gen("a", adapter=which)
        s += sgl.gen("b")

    names = ["law", None, "math", "intent"] * 8
    rows = [{"i": i, "which": name} for i, name in enumerate(names)]
    states = program.run_batch(rows, adapter="intent", backend=backend, num_threads=num_threads)
    assert [state["a"] for state in states] == [f"<{name or 'base'}>" for name in names]
    assert {state["b"] for state in states} == {"<intent>"}


@pytest.mark.parametrize("default", ["law", None])
def test_a_batchs_prefix_is_cached_for_its_adapter(
    server: FakeServer, backend: sgl.RuntimeEndpoint, default: str | None
) -> None:
    prefix = "a long common beginning " * 4

    @sgl.function
    def program(s: Any, q: str) -> None:
        s += prefix
        s += q + sgl.gen("a")

    states = program.run_batch(
        [("1",), ("2",)], adapter=default, backend=backend, generator_style=True
    )
    assert [state["a"] for state in states] == [f"<{default or 'base'}>"] * 2
    assert server.prepared() == [(prefix, default)]


def test_programs_at_the_same_time_do_not_mix(backend: sgl.RuntimeEndpoint) -> None:
    def one(i: int) -> bool:
        name = sorted(LOADED)[i % 3]
        return bool(ask.run(adapter=name, backend=backend)["a"] == f"<{name}>")

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(60)))
    assert backend.adapter is None


def collect(state: Any) -> str:
    return "".join(state.text_iter("a"))


def collect_async(state: Any) -> str:
    async def parts() -> list[str]:
        return [part async for part in state.text_async_iter("a")]

    return "".join(asyncio.run(parts()))


@pytest.mark.parametrize("read", [collect, collect_async])
@pytest.mark.parametrize("adapter", ["law", None])
def test_streams(
    backend: sgl.RuntimeEndpoint, read: Callable[[Any], str], adapter: str | None
) -> None:
    is_read = threading.Event()

    @sgl.function
    def program(s: Any) -> None:
        s += "Q " + sgl.gen("a", adapter=adapter)
        is_read.wait(60)  # SGLang streams nothing of a program that is over

    state = program.run(backend=backend, adapter="math", stream=True)
    text = read(state)
    is_read.set()
    assert text == state["a"] == f"<{adapter or 'base'}>"


# ---- errors ----


@pytest.fixture(params=[400, 404])
def picky(request: pytest.FixtureRequest, server: FakeServer) -> sgl.RuntimeEndpoint:
    """A server that answers an unknown adapter as SGLang does, and as ours."""
    server.unknown_status = request.param
    return sgl.RuntimeEndpoint(url_of(server))


def unknown() -> Any:
    return pytest.raises(UnknownAdapterError, match=r"adapter 'nope' is not loaded at http://")


@pytest.mark.parametrize(
    "read",
    [
        lambda state: state["a"],
        lambda state: state.text(),
        lambda state: (state.sync(), state.sync(), state["a"]),
        lambda state: state.messages(),
        lambda state: state.get_meta_info("a"),
        lambda state: state.fork(2),
        lambda state: list(state.text_iter()),
        lambda state: list(state.text_iter("a")),
    ],
)
@pytest.mark.parametrize("use_thread", [True, False])
def test_unknown_adapter(
    picky: sgl.RuntimeEndpoint, read: Callable[[Any], Any], use_thread: bool
) -> None:
    with unknown():
        state = ask.run(adapter="nope", backend=picky, use_thread=use_thread)
        read(state)


def reads_within(s: Any) -> None:
    s += sgl.gen("a", adapter="nope")
    s += "so " + s["a"]


def adds_after_the_failure(s: Any) -> None:
    s += sgl.gen("a", adapter="nope")
    s.stream_executor.worker.join()
    s += "more"


def calls_others_around(s: Any) -> None:
    s += sgl.gen("a", adapter="law") + sgl.gen("b", adapter="nope") + sgl.gen("c")
    s.text()


def selects(s: Any) -> None:
    s += sgl.select("a", ["x", "y"], adapter="nope")
    s.text()


@pytest.mark.parametrize(
    "program", [reads_within, adds_after_the_failure, calls_others_around, selects]
)
def test_unknown_adapter_within_a_program(
    picky: sgl.RuntimeEndpoint, program: Callable[[Any], None]
) -> None:
    with unknown():
        sgl.function(program).run(backend=picky)
    with unknown():
        forking.run(adapter="nope", backend=picky)


@pytest.mark.parametrize("read", [collect, collect_async, lambda state: state["a"]])
def test_unknown_adapter_in_a_stream(
    picky: sgl.RuntimeEndpoint, read: Callable[[Any], str]
) -> None:
    state = ask.run(adapter="nope", backend=picky, stream=True)
    with unknown():
        read(state)


@pytest.mark.parametrize("join", [True, False])
def test_unknown_adapter_in_a_fork(picky: sgl.RuntimeEndpoint, join: bool) -> None:
    workers = []

    @sgl.function
    def program(s: Any) -> None:
        forks = s.fork(2)
        workers.extend(fork.stream_executor.worker for fork in forks)
        forks[0] += sgl.gen("x", adapter="law")
        forks[1] += sgl.gen("x", adapter="nope")
        if join:
            forks.join()
        else:
            s += forks[0]["x"] + forks[1]["x"]

    with unknown() as raised:
        program.run(backend=picky)
    assert raised.tb is not None  # it keeps the forks alive
    for worker in workers:
        worker.join(10)
    assert not any(worker.is_alive() for worker in workers)


def test_rows_of_a_batch_fail_each_for_itself(picky: sgl.RuntimeEndpoint) -> None:
    @sgl.function
    def program(s: Any, which: str) -> None:
        s += sgl.gen("a", adapter=which)

    good, bad, fine, last = program.run_batch(
        [("law",), ("nope",), ("math",), ("nope",)], backend=picky
    )
    assert (good["a"], fine["a"]) == ("<law>", "<math>")
    for state in (bad, last, *ask.run_batch([{}, {}], adapter="nope", backend=picky)):
        with unknown():
            state["a"]


@pytest.mark.parametrize("name", ["", "a b", "..", "x" * 65, 7])
def test_bad_names(server: FakeServer, backend: sgl.RuntimeEndpoint, name: Any) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += sgl.gen("a", adapter=name)

    with pytest.raises(AdapterNameError):
        program.run(backend=backend)["a"]
    with pytest.raises(AdapterNameError):
        ask.run(adapter=name, backend=backend)
    with pytest.raises(AdapterNameError):
        sgl.RuntimeEndpoint(url_of(server), adapter=name)
    assert server.bodies == []


def test_other_errors_stay_sglangs(server: FakeServer) -> None:
    backend = sgl.RuntimeEndpoint(url_of(server), adapter="law")
    with pytest.raises(RuntimeError, match="Not Found"):
        backend.get_server_info()


@pytest.mark.parametrize("call", [sgl.gen, sgl.gen_int, sgl.select])
def test_sglangs_own_backend_refuses_adapters(server: FakeServer, call: Callable[..., Any]) -> None:
    plain = sglang.RuntimeEndpoint(url_of(server))
    choices = {"choices": ["x", "y"]} if call is sgl.select else {}

    @sgl.function
    def program(s: Any) -> None:
        s += call("a", adapter="law", **choices)

    state = program.run(backend=plain)
    state.stream_executor.worker.join()
    assert "law" in str(state.error())
    assert server.asked() == []
    with pytest.raises(UserError, match=r"sgl_esft\.lang\.RuntimeEndpoint"):
        ask.run(adapter="law", backend=plain)
    with pytest.raises(UserError, match=r"sgl_esft\.lang\.RuntimeEndpoint"):
        ask.run_batch([{}], adapter="law", backend=plain)


def test_a_programs_own_adapter_argument_is_refused() -> None:
    def program(s: Any, adapter: str) -> None:
        s += adapter

    with pytest.raises(UserError, match="'program' has an argument 'adapter'"):
        sgl.function(program)


@pytest.mark.parametrize("method", ["generate", "generate_stream", "commit_lazy_operations"])
def test_an_sglang_that_drops_adapters_is_refused(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(sglang.RuntimeEndpoint, method, lambda *_: None)
    with pytest.raises(HookError, match="would drop adapters"):
        endpoint_module._check_sglang()


def test_an_interpreter_that_drops_adapters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    executor, method = endpoint_module.interpreter.StreamExecutor, "_resolve_sampling_params"
    monkeypatch.setattr(executor, method, lambda self, _: self.default_sampling_para)
    with pytest.raises(HookError, match="would drop adapters"):
        endpoint_module._check_sglang()
    monkeypatch.delattr(executor, method)
    with pytest.raises(HookError, match="would drop adapters"):
        endpoint_module._check_sglang()


# ---- the surface ----


def test_everything_of_sglangs_frontend_is_there() -> None:
    for name in sglang.__all__:
        assert getattr(sgl, name) is not None
        assert name in dir(sgl)
    assert sgl.user is sglang.user
    with pytest.raises(AttributeError):
        _ = sgl.no_such_thing


@pytest.mark.parametrize("name", ["gen", "gen_int", "gen_string", "select"])
def test_signatures_are_sglangs_and_adapter(name: str) -> None:
    ours = list(inspect.signature(getattr(sgl, name)).parameters)
    assert ours == [*inspect.signature(getattr(sglang, name)).parameters, "adapter"]


def test_arguments_binding_and_tracing(server: FakeServer, backend: sgl.RuntimeEndpoint) -> None:
    @sgl.function(num_api_spec_tokens=None)
    def program(s: Any, q: str, tail: str = "!") -> str:
        s += q + tail + sgl.gen("a")
        return q

    bound = program.bind(q="why")
    state = bound.run(tail="?", adapter="law", backend=backend)
    assert (state["a"], state.ret_value) == ("<law>", "why")
    assert server.asked() == [("why?", "law")]
    assert "Gen('a')" in str(bound.trace(adapter="law", backend=backend).nodes)
