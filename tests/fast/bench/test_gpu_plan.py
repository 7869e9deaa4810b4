"""bench/gpu/plan.py: what fits 78 and 139 GiB, ten minutes a call and thirty in all."""

from __future__ import annotations

import pytest

from bench.gpu import elastic, model, parts, plan, serve
from bench.gpu.parts import PARTS
from bench.gpu.plan import GIB, Limits
from bench.gpu.steps import FULL, _profile, fragmentation_layers

# Free memory of the two cards once a process has its context.
H100, H200 = 77 * GIB, 138 * GIB
ALL_LAYERS = 27


@pytest.mark.parametrize(("free", "num_layers"), [(H100, 16), (H200, ALL_LAYERS)])
def test_a_decode_step_is_measured_on_as_many_layers_as_fit(free: int, num_layers: int) -> None:
    size = model.full_size(free)
    assert size.config["num_hidden_layers"] == num_layers
    # Counted here once more, expert by expert: two bases, one set of adapters.
    layers = range(1, num_layers)
    tuned = sum(len(size.tuned(n, at)) for n in range(20) for at in layers)
    experts = (2 * 64 * len(layers) + tuned) * size.shape.num_bytes
    assert 0.7 * free < experts < plan.MARGIN * free


@pytest.mark.parametrize(("free", "num_layers"), [(H100, 14), (H200, 26)])
def test_two_servers_fit_side_by_side(free: int, num_layers: int) -> None:
    planned = serve.planned(serve.FULL, 20)
    found = plan.layers_of_two_servers(free, ALL_LAYERS, planned)
    assert found == num_layers
    assert planned.woven(found) + planned.base(found) < free - 2 * plan.SERVER_BYTES


@pytest.mark.parametrize("free", [H100, H200])
def test_three_servers_fit_where_two_with_all_adapters_do(free: int) -> None:
    """bench/gpu/equality.py: one adapter, its merged model, the base; of serve.py's files."""
    one = serve.planned(serve.FULL, 1)
    layers = plan.layers_of_two_servers(free, ALL_LAYERS, serve.planned(serve.FULL, 20))
    every = one.woven(layers) + 2 * one.base(layers)
    assert every + 3 * plan.SERVER_BYTES <= plan.STATIC_SHARE * free


def test_the_whole_model_does_not_fit_the_smaller_card_twice() -> None:
    """What was planned before: 110 GB of model step, two servers at 0.85 of the card each."""
    planned = serve.planned(serve.FULL, 20)
    assert planned.woven(ALL_LAYERS) + planned.base(ALL_LAYERS) > H100
    with pytest.raises(plan.DoesNotFitError, match="two servers in 4294967296 bytes"):
        plan.layers_of_two_servers(4 * GIB, ALL_LAYERS, planned)


@pytest.mark.parametrize("free", [H100, H200])
def test_a_swap_and_the_ten_adapters_of_table_1_fit_both(free: int) -> None:
    size, num_layers = elastic.fitted(elastic.FULL, free)
    assert num_layers == ALL_LAYERS
    assert size.device_memory is not None
    assert int(size.device_memory.removesuffix("MiB")) << 20 < plan.MARGIN * free
    assert fragmentation_layers(FULL, _profile(FULL), free) == FULL.layers
    assert fragmentation_layers(FULL, _profile(FULL), 30 * GIB) == 10


def test_calls_end_inside_ten_minutes_and_all_inside_thirty() -> None:
    found = parts.calls()
    assert [name for names in found for name in names] == list(PARTS)
    assert len(found) == 3
    for names in found:
        seconds = parts.BUILD_SECONDS.least + sum(PARTS[name].least_seconds for name in names)
        assert seconds <= 60 * plan.CALL_MINUTES < 600
    assert len(found) * plan.CALL_MINUTES <= plan.ALL_MINUTES + 1


def test_steps_that_do_not_fit_are_named_and_a_shorter_one_behind_them_runs() -> None:
    steps = {"a": Limits(50, 90), "b": Limits(400, 500), "c": Limits(20, 30)}
    found = plan.choose(steps, 100)
    assert list(found.run) == ["a", "c"]
    assert found.not_run == {"b": "needs 400 s, 50 s were left of this call"}


def test_a_step_is_given_what_later_ones_do_not_need() -> None:
    assert plan.allot(100, Limits(20, 90), [Limits(30, 60)]) == 70
    assert plan.allot(500, Limits(20, 90), [Limits(30, 60)]) == 90
