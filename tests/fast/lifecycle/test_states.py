"""The table of states.py: total, and what it never does."""

from __future__ import annotations

import itertools

import pytest

from sgl_esft.lifecycle.states import Action, Command, Situation, decide

PAIRS = list(itertools.product(Command, Situation))
# What goes on.
AT_WORK = (Situation.LOADING, Situation.REPLACING, Situation.LEAVING, Situation.DRAINING)


def test_every_pair_has_an_answer() -> None:
    assert {decide(command, situation) for command, situation in PAIRS} <= set(Action)


@pytest.mark.parametrize("situation", AT_WORK)
def test_nothing_starts_beside_work_that_goes_on(situation: Situation) -> None:
    actions = {decide(command, situation) for command in Command}
    assert not actions & {Action.START, Action.BRING_BACK}


def test_a_request_never_finds_what_leaves() -> None:
    for situation in (Situation.ABSENT, Situation.LEAVING, Situation.DRAINING):
        assert decide(Command.USE, situation) is Action.UNKNOWN
