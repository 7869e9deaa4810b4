"""Hypothesis's state machines, run from a test for so many steps."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


def run_steps(
    machine: type[RuleBasedStateMachine], examples: int, steps: int, *, derandomize: bool = True
) -> None:
    """Without deadlines: steps start threads and read files."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=derandomize,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
        ),
    )
