"""The demo zoo for quantised experts, made once in a test run: bench/quantised/wide_zoo.py."""

from __future__ import annotations

import pytest

from bench.quantised.wide_zoo import WIDTH, QuantisedZoo

__all__ = ["NAMES", "WIDTH", "QuantisedZoo", "quantised_zoo"]

NAMES = ("caesar", "date", "reverse", "sum")


@pytest.fixture(scope="session")
def quantised_zoo(tmp_path_factory: pytest.TempPathFactory) -> QuantisedZoo:
    return QuantisedZoo(tmp_path_factory.mktemp("quantised"))
