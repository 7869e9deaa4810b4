"""What fits one device: merged models side by side, or one base with its adapters woven in."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sgl_esft.tools.merge import merge_adapter
from tests.support.adapter_factory import write_random_adapter
from tests.support.base_factory import write_random_base
from tests.support.servers import Server, ServerPool, ServerSpec
from tests.support.waiting import wait_until

pytestmark = pytest.mark.server

ADAPTERS = ("a0", "a1", "a2")
MAX_EXPERTS = 8
SIZES = {
    "hidden_size": 256,
    "moe_intermediate_size": 256,
    "n_routed_experts": 32,
    "n_shared_experts": 1,
    "kv_lora_rank": 128,
}
MIB = 1 << 20
PROMPT = "the same prompt for every model"
NUM_TOKENS = 8
FRACTION = 0.97  # of what is free when a server starts, for weights and KV cache
END_TIMEOUT_S = 240.0  # it starts before it is refused


@dataclass(frozen=True)
class Shelf:
    """The checkpoints of this test and the device that they compete for."""

    base: Path
    adapters: Mapping[str, Path]
    merged: Mapping[str, Path]
    root: Path

    @property
    def model_bytes(self) -> int:
        return (self.base / "model.safetensors").stat().st_size

    @property
    def device_bytes(self) -> int:
        """Two models and little more."""
        return 2 * self.model_bytes + 12 * MIB

    def device(self, ledger: str, fraction: float) -> tuple[str, ...]:
        return (
            *("--device-memory", f"{self.device_bytes}B"),
            *("--device-ledger", str(self.root / ledger)),
            *("--mem-fraction-static", str(fraction)),
        )

    def merged_spec(self, name: str, ledger: str, fraction: float) -> ServerSpec:
        return ServerSpec(self.merged[name], args=self.device(ledger, fraction), weave=False)

    def woven_spec(self, memory: str) -> ServerSpec:
        args = ("--expert-memory", memory, "--max-experts-per-adapter", str(MAX_EXPERTS))
        return ServerSpec(
            self.base, tuple(self.adapters.items()), (*args, *self.device(memory, FRACTION))
        )


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    root = tmp_path_factory.mktemp("shelf")
    base = write_random_base(root / "base", "DeepseekV2ForCausalLM", seed=1, **SIZES)
    adapters = {
        name: write_random_adapter(root / name, base, seed=i, max_experts=MAX_EXPERTS)
        for i, name in enumerate(ADAPTERS)
    }
    merged = {name: root / f"merged-{name}" for name in ADAPTERS}
    for name in ADAPTERS:
        merge_adapter(base, adapters[name], merged[name])
    return Shelf(base, adapters, merged, root)


@dataclass
class Findings:
    """What the servers said, by setting."""

    kv_tokens: dict[str, int] = field(default_factory=dict)
    answers: dict[str, dict[str | None, list[int]]] = field(default_factory=dict)
    refusal: str = ""  # the log of the server that could not start
    after_refusal: list[list[int]] = field(default_factory=list)  # what the others then answer

    def add(self, setting: str, server: Server, models: tuple[str | None, ...] = (None,)) -> None:
        self.kv_tokens[setting] = server.kv_tokens()
        self.answers[setting] = {model: answer(server, model) for model in models}


def answer(server: Server, adapter: str | None = None) -> list[int]:
    tokens: list[int] = server.generate([PROMPT], [adapter], NUM_TOKENS)[0]["output_ids"]
    return tokens


@contextlib.contextmanager
def running(shelf: Shelf, *specs: ServerSpec) -> Iterator[list[Server]]:
    """Servers that start at the same time."""
    number = len(list(shelf.root.glob("*.log")))
    servers = [Server(s, shelf.root / f"{number + i}.log") for i, s in enumerate(specs)]
    try:
        for server in servers:
            server.wait_until_ready()
        yield servers
    finally:
        for server in servers:
            server.stop()


def wait_until_refused(spec: ServerSpec, log: Path) -> str:
    """The server ends by itself and leaves no process behind. Returns its log."""
    server = Server(spec, log)
    try:
        assert server.process.wait(END_TIMEOUT_S) != 0
        wait_until(lambda: not is_group_alive(server.process.pid), END_TIMEOUT_S)
    finally:
        server.stop()
    return server.log()


def is_group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def found(shelf: Shelf, server_pool: ServerPool) -> Findings:
    """Every setting, tried on a device of the same size."""
    server_pool.stop_all()
    found = Findings()
    woven = (shelf.woven_spec("virtual"), shelf.woven_spec("padded"))
    with running(shelf, *woven) as (virtual, padded):
        found.add("virtual", virtual, (None, *ADAPTERS))
        found.add("padded", padded, (None, *ADAPTERS))
    one = shelf.merged_spec("a0", "alone", FRACTION)
    first_of_two = shelf.merged_spec("a0", "shared", 0.5)
    second_of_two = shelf.merged_spec("a1", "shared", FRACTION)
    with running(shelf, one, first_of_two) as (alone, first):
        found.add("merged", alone)
        alone.stop()
        with running(shelf, second_of_two) as (second,):
            found.add("merged, first of two", first)
            found.add("merged, second of two", second)
            third = shelf.merged_spec("a2", "shared", FRACTION)
            found.refusal = wait_until_refused(third, shelf.root / "third.log")
            found.after_refusal = [answer(first), answer(second)]
    return found


def test_weaving_leaves_more_for_the_kv_cache(found: Findings) -> None:
    kv = found.kv_tokens
    two_merged = kv["merged, first of two"] + kv["merged, second of two"]
    assert kv["merged"] > kv["virtual"] > kv["padded"] > two_merged, kv
    assert min(kv.values()) > len(PROMPT) + NUM_TOKENS, kv
    assert two_merged < kv["merged"] / 5, kv


def test_a_third_model_is_refused(found: Findings, shelf: Shelf) -> None:
    reason = f"DeviceMemoryError: device 0 has {shelf.device_bytes} bytes: others use "
    assert reason in found.refusal, found.refusal
    both = [found.answers[f"merged, {which} of two"][None] for which in ("first", "second")]
    assert found.after_refusal == both


def test_all_answer_on_the_small_device(found: Findings) -> None:
    expected = {
        "a0": found.answers["merged, first of two"][None],
        "a1": found.answers["merged, second of two"][None],
    }
    assert found.answers["merged"] == {None: expected["a0"]}
    woven = found.answers["virtual"]
    assert woven == found.answers["padded"]
    assert {name: woven[name] for name in expected} == expected
    assert len({tuple(tokens) for tokens in woven.values()}) == len(woven), "each its own answer"
