"""What is run first on an NPU finds an operator that differs; here all are simulated."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.fast.ascend import real_operators
from tests.support.npu_simulator.stand_in import OPERATORS


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What torch.ops.npu has; a test may change one."""
    found = dict(OPERATORS)
    lent = SimpleNamespace(**{name: lambda *a, _n=name, **k: found[_n](*a, **k) for name in found})
    monkeypatch.setattr(real_operators.torch, "ops", SimpleNamespace(npu=lent))
    monkeypatch.setattr(real_operators, "DTYPES", (torch.bfloat16,))
    monkeypatch.setattr(real_operators, "NUM_SLOTS", (80,))
    return found


@pytest.mark.usefixtures("operators")
def test_the_same_operators_are_equal() -> None:
    found = real_operators.compare_all("cpu")
    assert len(found) == 4
    assert set(found.values()) == {""}


def first_row_off(operator: Any) -> Any:
    def wrong(*args: Any, **kwargs: Any) -> Any:
        result = operator(*args, **kwargs)
        tensors = result if isinstance(result, list | tuple) else [result]
        tensors[0][0] += 1
        return result

    return wrong


def reads_undefined_rows(operator: Any) -> Any:
    def wrong(rows: torch.Tensor, *args: Any) -> Any:
        result = operator(rows, *args)
        result[0] += rows.flatten(0, 1)[-1]
        return result

    return wrong


def refuses(operator: Any) -> Any:
    def wrong(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("aclnn says no")

    return wrong


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("npu_moe_init_routing_v2", first_row_off, "values differ"),
        ("npu_grouped_matmul", first_row_off, "values differ"),
        ("npu_grouped_matmul", refuses, "RuntimeError: aclnn says no"),
        ("npu_swiglu", first_row_off, "values differ"),
        ("npu_moe_finalize_routing", reads_undefined_rows, "values differ by nan"),
    ],
)
def test_one_that_differs_is_named(
    operators: dict[str, Any], name: str, change: Any, said: str
) -> None:
    operators[name] = change(operators[name])
    wrong = {case.split()[0]: text for case, text in real_operators.compare_all("cpu").items()}
    assert said in wrong.pop(name)
    assert set(wrong.values()) == {""}
