"""Programs of SGLang's frontend language against a real server, with adapters and without.

Every answer is compared with what /generate says to the same text with the same `lora_path`.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import sglang

from sgl_esft import lang as sgl
from sgl_esft.errors import UnknownAdapterError
from tests.support.one_rank import OneRank
from tests.support.servers import Server

pytestmark = [
    pytest.mark.usefixtures("no_automatic_gc"),
    pytest.mark.server,
    # SGLang's word about a failed call, beside the error itself.
    pytest.mark.filterwarnings("ignore:Error in stream_executor"),
]

NAMES = ("a0", "a1", None)
GREEDY = {"temperature": 0, "ignore_eos": True}
LENGTH = 12


@pytest.fixture
def server(one_rank: OneRank) -> Server:
    return one_rank.server


@pytest.fixture
def backend(server: Server) -> sgl.RuntimeEndpoint:
    return sgl.RuntimeEndpoint(server.url)


def expected(server: Server, text: str, adapter: str | None, **sampling: Any) -> str:
    return str(server.generate([text], [adapter], LENGTH, **sampling)[0]["text"])


def gen(name: str, **fields: Any) -> Any:
    return sgl.gen(name, max_tokens=LENGTH, **GREEDY, **fields)


@sgl.function
def answer(s: Any, prompt: str) -> None:
    s += prompt
    s += gen("a")


@sgl.function
def answer_as(s: Any, prompt: str, name: str | None) -> None:
    s += prompt
    s += gen("a", adapter=name)


def test_adapters_answer_differently(server: Server) -> None:
    """Else the other tests would say nothing."""
    assert len({expected(server, "Which model are you?", name) for name in NAMES}) == 3


@pytest.mark.parametrize("name", NAMES)
def test_gen(server: Server, backend: sgl.RuntimeEndpoint, name: str | None) -> None:
    prompt = "One and one is"
    wanted = expected(server, prompt, name)
    others = {"a0", "a1"} - {name}
    default = others.pop()
    assert answer_as.run(prompt, name, backend=backend, adapter=default)["a"] == wanted
    assert answer.run(prompt, backend=backend, adapter=name)["a"] == wanted
    assert answer.run(prompt, backend=backend.with_adapter(name))["a"] == wanted


def test_one_program_many_adapters(server: Server, backend: sgl.RuntimeEndpoint) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += sgl.system("Be brief.") + sgl.user("Where are we?")
        s += sgl.assistant_begin()
        for i, name in enumerate([*NAMES, *NAMES]):
            s[f"text{i}"] = s.text()
            s += gen(f"a{i}", adapter=name)

    state = program.run(backend=backend, adapter="a1")
    for i, name in enumerate([*NAMES, *NAMES]):
        assert state[f"a{i}"] == expected(server, state[f"text{i}"], name)


def test_forks(server: Server, backend: sgl.RuntimeEndpoint) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "We hold these truths: "
        s += gen("first", adapter="a0")
        s.sync()
        forks = s.fork(4)
        for fork, name in zip(forks.states, ("a0", "a1", None, "a0"), strict=True):
            fork += gen("x", adapter=name)  # noqa: PLW2901  # how programs are written
        forks[3] += " and " + gen("y")
        forks.join()
        s["text"] = s.text()
        with s.copy() as other:
            other += gen("z", adapter=None)  # noqa: PLW2901
        s += gen("last")

    state = program.run(backend=backend, adapter="a1")
    assert state["first"] == expected(server, "We hold these truths: ", "a0")
    text = state["text"]
    as_a0, as_a1, as_base = (expected(server, text, name) for name in NAMES)
    assert state["x"] == [as_a0, as_a1, as_base, as_a0]
    assert state["y"] == [expected(server, f"{text}{as_a0} and ", "a1")]
    assert state["z"] == [as_base]
    assert state["last"] == as_a1


@pytest.mark.parametrize("num_threads", [1, 8])
def test_batch(server: Server, backend: sgl.RuntimeEndpoint, num_threads: int) -> None:
    rows = [{"prompt": f"{i}. Tell me of {i}", "name": NAMES[i % 3]} for i in range(24)]
    states = answer_as.run_batch(rows, adapter="a1", backend=backend, num_threads=num_threads)
    wanted = server.generate(
        [row["prompt"] or "" for row in rows], [row["name"] for row in rows], LENGTH
    )
    assert [state["a"] for state in states] == [each["text"] for each in wanted]


@pytest.mark.parametrize(("name", "other"), [("a0", None), (None, "a1")])
def test_a_batchs_prefix_is_cached_for_its_adapter_only(
    server: Server, backend: sgl.RuntimeEndpoint, name: str | None, other: str | None
) -> None:
    prefix = f"This beginning is {name}'s, and it is longer than what is not worth caching. " * 2

    @sgl.function
    def program(s: Any, tail: str) -> None:
        s += prefix
        s += tail + gen("a")

    states = program.run_batch([("x",), ("y",)], adapter=name, backend=backend)
    for state in states:
        assert state.get_meta_info("a")["cached_tokens"] >= len(prefix)
    stranger = server.generate([prefix + "x"], [other], LENGTH)[0]
    assert stranger["meta_info"]["cached_tokens"] == 0
    for state, tail in zip(states, "xy", strict=True):
        assert state["a"] == expected(server, prefix + tail, name)


@pytest.mark.parametrize("name", NAMES)
def test_stream(server: Server, backend: sgl.RuntimeEndpoint, name: str | None) -> None:
    is_read = threading.Event()

    @sgl.function
    def program(s: Any) -> None:
        s += "Once upon a time"
        s += gen("a") + gen("b", adapter=name)
        is_read.wait(60)  # SGLang streams nothing of a program that is over

    state = program.run(backend=backend, adapter="a1", stream=True)
    first, second = ("".join(state.text_iter(each)) for each in "ab")
    is_read.set()
    assert first == expected(server, "Once upon a time", "a1")
    assert second == expected(server, "Once upon a time" + first, name)


@pytest.mark.parametrize("name", NAMES)
def test_gen_int(server: Server, backend: sgl.RuntimeEndpoint, name: str | None) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "The answer is "
        s += sgl.gen_int("n", max_tokens=LENGTH, adapter=name, **GREEDY)

    number = program.run(backend=backend, adapter="a1")["n"]
    assert int(number) is not None
    sampling = {"regex": sglang.lang.ir.REGEX_INT, "stop": [" ", "\n"]}
    assert number == expected(server, "The answer is ", name, **sampling)


def mean_logprob(server: Server, prompt: str, choice: str, name: str | None) -> float:
    """Of the choice's tokens, which are its bytes."""
    body = {
        "text": prompt + choice,
        "lora_path": name,
        "sampling_params": {"max_new_tokens": 0, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    logprobs = server.post("/generate", body).json()["meta_info"]["input_token_logprobs"]
    return sum(logprob for logprob, *_ in logprobs[-len(choice) :]) / len(choice)


def test_select(server: Server, backend: sgl.RuntimeEndpoint) -> None:
    prompts = ("The best of all letters is ", "My first one: ", "So be it, then, say ")
    choices = ["alef", "beta", "eins", "iota", "mute", "unau"]

    @sgl.function
    def program(s: Any, prompt: str, name: str | None) -> None:
        s += prompt
        s += sgl.select("letter", choices, adapter=name)
        s += gen("a", choices=choices)

    chosen = set()
    for prompt, name in itertools.product(prompts, NAMES):
        state = program.run(prompt, name, backend=backend, adapter="a1")
        letter = max(choices, key=lambda each: mean_logprob(server, prompt, each, name))
        assert state["letter"] == letter
        again = max(choices, key=lambda each: mean_logprob(server, prompt + letter, each, "a1"))
        assert state["a"] == again
        chosen.add(letter)
    assert len(chosen) > 1


def test_an_answer_chooses_the_adapter(server: Server, backend: sgl.RuntimeEndpoint) -> None:
    @sgl.function
    def route(s: Any) -> None:
        s += "Who answers? " + sgl.select("who", ["a0", "a1"])
        s["text"] = s.text()
        s += gen("a", adapter=s["who"])

    state = route.run(backend=backend, adapter="a0")
    assert state["a"] == expected(server, state["text"], state["who"])


def test_unknown_adapter(server: Server, backend: sgl.RuntimeEndpoint) -> None:
    def unknown() -> Any:
        return pytest.raises(UnknownAdapterError, match="'nope'")

    @sgl.function
    def forking(s: Any) -> None:
        s += "Who? "
        forks = s.fork(2)
        forks[0] += gen("x", adapter="a0")
        forks[1] += gen("x", adapter="nope")
        forks.join()

    with unknown():
        answer_as.run("Who?", "nope", backend=backend, adapter="a0")["a"]
    with unknown():
        answer.run("Who?", backend=backend, adapter="nope").text()
    with unknown():
        "".join(answer.run("Who?", backend=backend, adapter="nope", stream=True).text_iter("a"))
    with unknown():
        forking.run(backend=backend)
    good, bad = answer_as.run_batch([("Who?", "a0"), ("Who?", "nope")], backend=backend)
    assert good["a"] == expected(server, "Who?", "a0")
    with unknown():
        bad["a"]


def test_a_program_of_plain_sglang(server: Server) -> None:
    @sglang.function
    def program(s: Any, prompt: str) -> None:
        s += prompt + sglang.gen("a", max_tokens=LENGTH, **GREEDY)
        s.sync()
        forks = s.fork(2)
        forks += lambda i: f" {i} " + sglang.gen("b", max_tokens=LENGTH, **GREEDY)
        forks.join()

    sglang.set_default_backend(sglang.RuntimeEndpoint(server.url))
    try:
        states = program.run_batch([("Here",), ("There",)])
        for state, prompt in zip(states, ("Here", "There"), strict=True):
            text = prompt + expected(server, prompt, None)
            assert state.text() == text
            assert state["b"] == [expected(server, f"{text} {i} ", None) for i in range(2)]
    finally:
        sglang.set_default_backend(None)
