"""The table of states.py: total, and closed."""

from __future__ import annotations

import itertools

import pytest

from sgl_esft.lifecycle.states import Action, Command, Outcome, Situation, decide, ended, started

PAIRS = list(itertools.product(Command, Situation))
# What goes on: only an outcome ends these.
AT_WORK = (Situation.LOADING, Situation.REPLACING, Situation.LEAVING, Situation.DRAINING)


def test_every_pair_has_an_answer() -> None:
    assert {decide(command, situation) for command, situation in PAIRS} <= set(Action)


@pytest.mark.parametrize(("command", "situation"), PAIRS)
def test_only_what_starts_changes_a_situation(command: Command, situation: Situation) -> None:
    action, then = decide(command, situation), started(command, situation)
    if action not in (Action.START, Action.QUEUE, Action.BRING_BACK):
        assert then is situation
    elif command is not Command.PIN:
        assert then in AT_WORK


@pytest.mark.parametrize("situation", Situation)
def test_what_goes_on_ends_and_nothing_else_does(situation: Situation) -> None:
    ends = [bool(ended(situation, outcome)) for outcome in (Outcome.DONE, Outcome.FAILED)]
    assert set(ends) == {situation in AT_WORK}


@pytest.mark.parametrize("situation", AT_WORK)
def test_nothing_starts_beside_work_that_goes_on(situation: Situation) -> None:
    actions = {decide(command, situation) for command in Command}
    assert not actions & {Action.START, Action.BRING_BACK}


def test_every_situation_can_be_reached_and_left() -> None:
    steps = {(s, started(c, s)) for c, s in PAIRS}
    steps |= {(s, then) for s in Situation for o in Outcome for then in ended(s, o)}
    for origin in (Situation.ABSENT, Situation.LOADED):
        reached = {origin}
        while more := {then for s, then in steps if s in reached} - reached:
            reached |= more
        assert reached >= set(Situation) - {Situation.ABSENT}


def test_a_request_never_finds_what_leaves() -> None:
    for situation in (Situation.ABSENT, Situation.LEAVING, Situation.DRAINING):
        assert decide(Command.USE, situation) is Action.UNKNOWN
