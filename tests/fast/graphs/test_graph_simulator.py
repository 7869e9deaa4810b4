"""The simulator itself: a replay is what was captured, and what CUDA forbids is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.support.graph_simulator import (
    CUDAGraph,
    Event,
    GraphContractError,
    Stream,
    installed,
    synchronize,
)


@pytest.fixture(autouse=True)
def simulated() -> Iterator[None]:
    with installed():
        yield


def capture(work: Callable[[], object]) -> CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        work()
    return graph  # type: ignore[return-value]


@torch.no_grad()
def test_a_replay_reads_its_inputs_again_and_keeps_the_places_of_its_results() -> None:
    x, weight, kept = torch.ones(3, 4), torch.randn(4, 4), torch.zeros(3)

    def work() -> torch.Tensor:
        hidden = torch.empty(3, 4)
        hidden[:2] = (x @ weight).relu_()[:2]
        hidden[2:].copy_(x[2:] * 2)
        kept.add_(hidden.sum(dim=1))
        return hidden.view(2, 6).t()

    results: list[torch.Tensor] = []
    graph = capture(lambda: results.append(work()))
    place = results[0].data_ptr()
    x.normal_()
    kept.zero_()
    graph.replay()
    total = kept.clone()
    assert torch.equal(results[0], work())
    assert torch.equal(kept, 2 * total)
    assert results[0].data_ptr() == place


def test_no_python_runs_in_a_replay() -> None:
    x, calls, factor = torch.ones(2), [], [3]
    results = []

    def work() -> None:
        calls.append(1)
        results.append(x * factor[0])

    graph = capture(work)
    factor[0] = 5
    graph.replay()
    assert results[0].tolist() == [3, 3]
    assert len(calls) == 1


def test_nothing_of_a_graphs_own_memory_outlives_a_replay() -> None:
    """A value that only the capture has made, as a cache that is filled once, is not there."""
    x, cache, results = torch.ones(2), {}, []

    def work() -> None:
        if "scale" not in cache:
            cache["scale"] = x + 1
        results.append(x * cache["scale"])

    first, second = capture(work), capture(work)
    first.replay()
    second.replay()
    assert [r.tolist() for r in results] == [[2, 2], [2, 2]]
    with torch.inference_mode():
        for tensor in first._own.values():
            tensor.fill_(float("nan"))  # another graph of the pool has used it
    second.replay()
    assert results[1].isnan().all()


def test_memory_from_before_the_capture_must_stay() -> None:
    inputs = [torch.ones(2)]
    graph = capture(lambda: inputs[0] + 1)
    graph.replay()
    inputs[0] = torch.zeros(2)
    with pytest.raises(GraphContractError, match="freed since"):
        graph.replay()


X = torch.ones(3)


def _on_another_stream() -> None:
    with torch.cuda.stream(Stream()):  # type: ignore[arg-type]
        X.add(1)


def _forked(*, come_back: bool) -> None:
    side, main = Stream(), torch.cuda.current_stream()
    side.wait_stream(main)  # type: ignore[arg-type]
    with torch.cuda.stream(side):  # type: ignore[arg-type]
        X.add(1)
    if come_back:
        main.wait_stream(side)  # type: ignore[arg-type]


FORBIDDEN: dict[str, tuple[Callable[[], object], str]] = {
    "item": (lambda: X.sum().item(), "waits for the device"),
    "a branch": (lambda: 1 if X[0] > 0 else 2, "waits for the device"),
    "a slice by a value": (lambda: X[: X.sum().long()], "waits for the device"),
    "nonzero": (X.nonzero, "waits for the device"),
    "equal": (lambda: torch.equal(X, X), "waits for the device"),
    "a mask": (lambda: X[X > 0], "by a mask"),
    "a mask that is written": (lambda: X.index_put_((X > 0,), torch.zeros(())), "by a mask"),
    "a tensor of numbers": (lambda: torch.tensor([1, 2]), "pageable host memory"),
    "cpu": (X.cpu, "copies to the host"),
    "tolist": (X.tolist, "copies to the host"),
    "synchronize": (synchronize, "not permitted"),
    "an event": (lambda: Event().synchronize(), "not permitted"),
    "a replay": (lambda: CUDAGraph().replay(), "not permitted"),
    "another capture": (lambda: capture(lambda: X + 1), "not permitted"),
    "random numbers": (lambda: torch.rand(2), "not simulated"),
    "another stream": (_on_another_stream, "does not know"),
    "a stream that is lost": (lambda: _forked(come_back=False), "has not come back"),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_cuda_forbids_in_a_capture_is_refused(name: str) -> None:
    work, message = FORBIDDEN[name]
    with pytest.raises(GraphContractError, match=message):
        capture(work)
    capture(lambda: _forked(come_back=True)).replay()  # and the next capture is free of it


def test_a_capture_has_a_stream_of_its_own_and_a_graph_one_capture() -> None:
    graph = CUDAGraph()
    with pytest.raises(GraphContractError, match="not captured"):
        graph.replay()
    with pytest.raises(GraphContractError, match="not the default one"):
        graph.capture_begin()
    graph = capture(lambda: X + 1)
    with pytest.raises(GraphContractError, match="captured once"), torch.cuda.graph(graph):
        pass
    assert not torch.cuda.is_current_stream_capturing()
