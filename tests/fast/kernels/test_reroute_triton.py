"""Rerouting by Triton: interpreted here, compiled for a GPU, and run on one where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from triton.runtime.errors import InterpreterError

from sgl_esft_kernels import NOT_HERE, KernelInputError, KernelUnavailableError, reroute_unfused
from sgl_esft_kernels import reroute_triton as subject
from sgl_esft_kernels.op import reroute
from tests.fast.kernels.cases import Case, cases, naive_rows, where_asked, where_drawn
from tests.fast.kernels.compiled import compiler, num_instructions, resources
from tests.fast.kernels.interpreted import changed_module, interpreter

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("case", cases(), ids=str)
def test_equals_the_reference(case: Case) -> None:
    inputs = case.make()
    with interpreter():
        found = subject.launch_reroute(*inputs)
    assert found.dtype == case.dtype
    assert torch.equal(found, reroute_unfused(*inputs))
    assert all(torch.equal(*pair) for pair in zip(inputs, case.make(), strict=True))
    with interpreter():
        assert subject.launch_reroute(*inputs, out=inputs[0]) is inputs[0]
    assert torch.equal(inputs[0], found)


@pytest.mark.parametrize("case", cases(), ids=str)
def test_with_where_equals_the_naive_loop(case: Case) -> None:
    """NOT_HERE is passed through: whoever gives `where` brings what is asked for first."""
    inputs = case.make()
    where = where_drawn(inputs)
    expected, before = naive_rows(inputs, where), where.clone()
    with interpreter():
        found = subject.launch_reroute(*inputs, where=where)
        assert found.dtype == case.dtype
        assert found.tolist() == expected
        assert subject.launch_reroute(*inputs, inputs[0], where) is inputs[0]
    assert inputs[0].tolist() == expected
    assert torch.equal(where, before)


def test_writes_nothing_beside_its_output() -> None:
    topk_ids, tags, table = Case(num_tokens=133).make()
    around = torch.full((133 * 6 + 2,), 77, dtype=torch.int32)
    with interpreter():
        subject.launch_reroute(topk_ids, tags, table, out=around[1:-1].view(133, 6))
    assert around[0] == around[-1] == 77
    assert torch.equal(around[1:-1].view(133, 6), reroute_unfused(topk_ids, tags, table))


WRONG = {
    "base row first": ("adapter_slots < 0, NUM_ROWS - 1,", "adapter_slots < 0, 0,"),
    "base row for all": ("adapter_slots < 0, NUM_ROWS - 1, adapter_slots", "True, NUM_ROWS - 1, 0"),
    "no expert becomes 0": ("(expert_ids >= 0), other=-1", "(expert_ids >= 0), other=0"),
    "first adapter for all": ("offsets // K,", "offsets * 0,"),
    "ids pass through": ("slot_ids.to(", "expert_ids.to("),
    "first program only": ("program * BLOCK +", "program * 0 +"),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG.keys())
def test_cases_find_a_wrong_kernel(change: tuple[str, str], tmp_path: Path) -> None:
    launch = changed_module(subject, change, tmp_path).launch_reroute
    with interpreter():
        assert any(
            not torch.equal(launch(*case.make()), reroute_unfused(*case.make()))
            for case in cases()
            if 0 < case.num_tokens < 1000
        )


WRONG_ROWS = {
    "slots pass through": ("    return rows\n", "    return slot_ids\n"),
    "none reads the first row": ("mask=slot_ids >= 0, other=slot_ids)", "mask=slot_ids >= -1)"),
    "none becomes 0": ("mask=slot_ids >= 0, other=slot_ids)", "mask=slot_ids >= 0, other=0)"),
}


@pytest.mark.parametrize("change", WRONG_ROWS.values(), ids=WRONG_ROWS.keys())
def test_cases_find_a_wrong_lookup_of_rows(change: tuple[str, str], tmp_path: Path) -> None:
    launch = changed_module(subject, change, tmp_path).launch_reroute
    case = Case(is_expert_parallel=True, share_of_none=0.2)
    inputs = case.make()
    where = where_drawn(inputs)
    where = torch.cat([where[:1] + 7, where])[1:]  # that what lies before it is no -1
    with interpreter():
        assert launch(*inputs, where=where).tolist() != naive_rows(inputs, where)


def test_bad_inputs_and_no_tokens_launch_nothing() -> None:
    ids, tags, table = Case().make()
    with compiler() as kernels:
        with pytest.raises(KernelInputError, match=r"expert_map is torch\.int64"):
            subject.launch_reroute(ids, tags, table.long())
        with pytest.raises(KernelInputError, match=r"out is \(6, 6\)"):
            subject.launch_reroute(ids, tags, table, ids[1:].clone())
        with pytest.raises(KernelInputError, match=r"where is torch\.int64"):
            subject.launch_reroute(ids, tags, table, where=where_drawn((ids, tags, table)).long())
        nothing = Case(num_tokens=0, k=4).make()
        assert subject.launch_reroute(*nothing, where=where_drawn(nothing)).shape == (0, 4)
        assert subject.launch_reroute(*Case(num_tokens=0, k=4).make()).shape == (0, 4)
    assert kernels == []


@pytest.mark.parametrize(
    ("message", "expert_id", "adapter_slot"),
    [("topk_ids", 64, 0), ("topk_ids", -2, 0), ("token_adapter", 0, 5), ("token_adapter", 0, -2)],
)
def test_debug_builds_assert_values(
    message: str, expert_id: int, adapter_slot: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    topk_ids, tags, table = Case().make()
    monkeypatch.setattr(subject, "is_debug", lambda: True)
    with interpreter():
        assert torch.equal(
            subject.launch_reroute(topk_ids, tags, table), reroute_unfused(topk_ids, tags, table)
        )
        topk_ids[2, 1] = expert_id
        tags[2] = adapter_slot
        with pytest.raises(InterpreterError, match=f"{message}.* out of range"):
            subject.launch_reroute(topk_ids, tags, table)


def not_here() -> tuple[tuple[torch.Tensor, ...], torch.Tensor, int]:
    """A batch whose token 2 alone asks for some expert, `where` without it, and its slot."""
    topk_ids, tags, table = Case().make()
    where = where_asked((topk_ids, tags, table))
    topk_ids[2, 1] = min(set(range(64)) - set(topk_ids.flatten().tolist()))
    return (topk_ids, tags, table), where, int(table[tags[2], topk_ids[2, 1]])


def test_debug_builds_name_an_expert_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, where, slot = not_here()
    with interpreter():
        assert NOT_HERE in subject.launch_reroute(*inputs, where=where)
    monkeypatch.setattr(subject, "is_debug", lambda: True)
    message = rf"token 2 asks for expert {inputs[0][2, 1]}: its slot {slot} is not here"
    with compiler() as kernels, pytest.raises(KernelInputError, match=message):
        subject.launch_reroute(*inputs, where=where)
    assert kernels == []


def test_debug_builds_assert_rows_while_they_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, where, slot = not_here()
    monkeypatch.setattr(subject, "is_debug", lambda: True)
    monkeypatch.setattr(subject, "can_wait", lambda _: False)
    with interpreter():
        with pytest.raises(InterpreterError, match="an expert is not here"):
            subject.launch_reroute(*inputs, where=where)
        where[slot] = 3
        assert subject.launch_reroute(*inputs, where=where)[2, 1] == 3
        with pytest.raises(InterpreterError, match="a slot out of range"):
            subject.launch_reroute(*inputs, where=where[:slot])


def test_asserts_are_in_debug_builds_only(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = Case().make()
    where = where_asked(inputs)
    with compiler() as kernels:
        for given_where in (None, where):
            subject.launch_reroute(*inputs, where=given_where)
        monkeypatch.setattr(subject, "is_debug", lambda: True)
        for given_where in (None, where):
            subject.launch_reroute(*inputs, where=given_where)
    has_asserts = ["__assertfail" in kernel.asm["ptx"] for kernel in kernels]
    assert has_asserts == [False, False, True, True]


SERVED = [
    Case(num_tokens=256, k=6, num_adapters=20, num_experts=64),
    Case(num_tokens=256, k=8, num_adapters=64, num_experts=256),
    Case(num_tokens=256, k=4, num_adapters=5, num_experts=60, dtype=torch.int64),
    Case(num_tokens=256, k=2, num_adapters=1, num_experts=8),
]


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_compiles_to_three_loads_and_a_store(case: Case) -> None:
    with compiler() as kernels:
        subject.launch_reroute(*case.make())
    ptx = kernels[0].asm["ptx"]
    counts = {what: ptx.count(what) for what in ("ld.global", "st.global", ".local", "bar.sync")}
    # A thread has one id: its id, its tag, its cell, its slot.
    assert counts == {"ld.global": 3, "st.global": 1, ".local": 0, "bar.sync": 0}
    used = resources(kernels[0])
    assert (used["STACK"], used["LOCAL"], used["SHARED"]) == (0, 0, 0)
    assert used["REG"] <= 32


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_where_is_one_load_more(case: Case) -> None:
    inputs = case.make()
    with compiler() as kernels:
        subject.launch_reroute(*inputs)
        subject.launch_reroute(*inputs, where=where_drawn(inputs))
    plain, rows = (kernel.asm["ptx"] for kernel in kernels)
    assert (plain.count("ld.global"), rows.count("ld.global")) == (3, 4)
    assert rows.count("st.global") == 1
    assert rows.count(".local") == rows.count("bar.sync") == 0
    # Its pointer is an argument; without `where` there is none that would be handed over for it.
    assert rows.count("ld.param") == plain.count("ld.param") + 1
    assert num_instructions(kernels[0]) < num_instructions(kernels[1])
    used = resources(kernels[1])
    assert (used["STACK"], used["LOCAL"], used["SHARED"]) == (0, 0, 0)
    assert used["REG"] <= 32


def test_batches_of_any_size_share_a_binary() -> None:
    with compiler() as kernels:
        for num_tokens in (1, 2, 7, 16, 133, 4096):
            topk_ids, tags, table = Case(num_tokens=num_tokens).make()
            subject.launch_reroute(topk_ids, tags, table)
            shifted = torch.zeros(topk_ids.numel() + 1, dtype=torch.int32)[1:].view_as(topk_ids)
            subject.launch_reroute(topk_ids, tags, table, out=shifted)
    assert len({kernel.hash for kernel in kernels}) == 1


def test_batches_of_any_size_share_a_binary_with_where() -> None:
    with compiler() as kernels:
        for num_tokens in (1, 16, 133):
            inputs = Case(num_tokens=num_tokens).make()
            later = torch.zeros(inputs[2].numel() + 1, dtype=torch.int32)[1:]
            for where in (where_drawn(inputs), later):
                subject.launch_reroute(*inputs, where=where)
    assert len({kernel.hash for kernel in kernels}) == 1


def test_offsets_have_64_bits_where_they_must() -> None:
    table = torch.empty(2, 64, dtype=torch.int32, device="meta")
    with compiler() as kernels:
        for num_tokens in (2**28 - 16, 2**28 - 15):
            ids = torch.empty(num_tokens, 8, dtype=torch.int32, device="meta")
            tags = torch.empty(num_tokens, dtype=torch.int32, device="meta")
            subject.launch_reroute(ids, tags, table)
    comparisons = ["setp.lt.s64" in kernel.asm["ptx"] for kernel in kernels]
    assert comparisons == [False, True]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_loading_without_a_device_says_so() -> None:
    with pytest.raises(KernelUnavailableError, match="needs a CUDA device"):
        subject.load()


def test_registers_once_for_cuda() -> None:
    subject.register()
    subject.register()
    for name in ("reroute", "reroute_out", "reroute_rows"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"sgl_esft::{name}", "CUDA")


@needs_gpu
def test_equals_the_reference_on_a_gpu() -> None:
    loaded = subject.load()
    for case in cases():
        topk_ids, tags, table = case.make("cuda")
        expected = reroute_unfused(topk_ids, tags, table)
        assert torch.equal(loaded(topk_ids, tags, table), expected), case
        assert torch.equal(reroute(topk_ids, tags, table, out=topk_ids), expected), case


@needs_gpu
def test_a_captured_graph_sees_a_new_map_and_new_tags() -> None:
    subject.load()
    topk_ids, tags, table = Case(num_tokens=64).make("cuda")
    out = reroute(topk_ids, tags, table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        reroute(topk_ids, tags, table, out=out)
    table += 1000
    tags.copy_(tags.flip(0))
    graph.replay()
    assert torch.equal(out, reroute_unfused(topk_ids, tags, table))


@needs_gpu
def test_with_where_equals_the_naive_loop_on_a_gpu() -> None:
    loaded = subject.load()
    for case in cases():
        inputs = case.make("cuda")
        for where in (where_drawn(inputs), where_asked(inputs)):
            expected = naive_rows(inputs, where)
            assert loaded(*inputs, where=where).tolist() == expected, case
            assert reroute_unfused(*inputs, where=where).tolist() == expected, case
        assert loaded(*inputs, out=inputs[0], where=where).tolist() == expected, case


@needs_gpu
def test_a_captured_graph_sees_new_rows() -> None:
    subject.load()
    inputs = Case(num_tokens=64).make("cuda")
    where = where_drawn(inputs)
    out = reroute(*inputs, where=where)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        reroute(*inputs, out=out, where=where)
    where.copy_(where_asked(inputs))
    graph.replay()
    assert out.tolist() == naive_rows(inputs, where)
