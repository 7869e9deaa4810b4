"""When to scale, and by how many devices: a pure decision.

    SloWindow, load --> LoadSample --> [decide] --> ScaleRequest --> autoscaler.py

Up when attainment is low, down when it is high and one device fewer would still have room. Off
unless a policy is given. docs/autoscaling.md explains the numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any

import msgspec

from sgl_elastic.autoscale.slo import Attainment, check_above_zero
from sgl_elastic.errors import ElasticConfigError
from sgl_elastic.types import ScaleRequest

MAX_DEVICES = 1024


@dataclass(frozen=True)
class AutoscalePolicy:
    """The numbers of `decide`. Raises ElasticConfigError for any that cannot work together."""

    min_devices: int
    max_devices: int
    up_below: float = 0.90  # attainment under it: too few devices (the paper's 90 %)
    down_above: float = 0.99  # attainment from it on: maybe too many
    down_utilisation: float = 0.70  # of the smaller configuration, at most
    up_windows: int = 1  # so many low windows in a row
    down_windows: int = 3  # so many calm windows in a row
    up_cooldown_s: float = 30.0  # after any scale, before the next up
    down_cooldown_s: float = 120.0  # after any scale, before the next down
    max_step: int = 1  # devices added at once, at most; a down takes one
    min_requests: int = 8  # fewer prove nothing: no up

    def __post_init__(self) -> None:
        for name in ("min_devices", "max_devices", "max_step"):
            _check_count(name, getattr(self, name), MAX_DEVICES)
        for name in ("up_windows", "down_windows", "min_requests"):
            _check_count(name, getattr(self, name), 1_000_000)
        for name in ("up_below", "down_above", "down_utilisation"):
            check_above_zero(name, getattr(self, name), most=1.0)
        for name in ("up_cooldown_s", "down_cooldown_s"):
            check_above_zero(name, getattr(self, name))
        _check_order("min_devices", self.min_devices, "max_devices", self.max_devices)
        _check_order("up_below", self.up_below, "down_above", self.down_above)


def _check_count(name: str, value: object, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ElasticConfigError(f"{name} is {value!r}: give an integer from 1 to {most}.")


def _check_order(low: str, low_value: float, high: str, high_value: float) -> None:
    if low_value > high_value:
        raise ElasticConfigError(
            f"{low} is {low_value} and {high} is {high_value}: {low} must not be above {high}."
        )


def parse_policy(text: str | None) -> AutoscalePolicy | None:
    """The policy of a flag: a JSON object of `AutoscalePolicy`'s fields; None = off.

    Raises ElasticConfigError for anything else, naming the fields there are.
    """
    if text is None:
        return None
    try:
        given: dict[str, Any] = msgspec.json.decode(text, type=dict[str, int | float])
        return AutoscalePolicy(**given)
    except (msgspec.MsgspecError, TypeError) as cause:
        optional = ", ".join(each.name for each in fields(AutoscalePolicy)[2:])
        raise ElasticConfigError(
            f"the autoscale policy is {text[:200]!r}: {cause}. Give a JSON object of numbers with "
            f"min_devices, max_devices and any of {optional}."
        ) from cause


@dataclass(frozen=True)
class LoadSample:
    """What `decide` looks at: one window of one configuration. Counts are over all ranks."""

    num_devices: int
    attainment: Attainment
    kv_used_tokens: int
    kv_capacity_tokens: int
    is_scaling: bool = False  # a scale is under way, whoever asked for it


@dataclass(frozen=True)
class AutoscaleState:
    """What one window tells the next. Times in seconds of the caller's clock."""

    num_low: int = 0  # low windows in a row
    num_calm: int = 0  # calm windows in a row
    last_scale_s: float = -math.inf
    last_was_down: bool = False
    num_regrets: int = 0  # downs that an up soon took back, less those that lasted


class Reason(StrEnum):
    """Why `decide` asked for a scale, or for none; a label of the metrics."""

    LOW_ATTAINMENT = "low_attainment"  # asks for an up
    SLACK = "slack"  # asks for a down
    OFF = "off"
    STEADY = "steady"  # neither low nor calm
    SCALING = "scaling"
    TOO_FEW_REQUESTS = "too_few_requests"
    MORE_WINDOWS = "more_windows"  # low or calm, not yet for long enough
    COOLING_DOWN = "cooling_down"
    AT_MAX = "at_max"
    AT_MIN = "at_min"


Decision = tuple[ScaleRequest | None, AutoscaleState, Reason]

MAX_REGRETS = 5  # the cool-down before a down grows to at most 2^5 times
REGRET_S = 300.0  # queues grow slowly where a size is barely too small


def decide(
    policy: AutoscalePolicy | None, sample: LoadSample, state: AutoscaleState, now_s: float
) -> Decision:
    """One window's decision; pure, to be called once a window.

    Returns the request or None, the state for the next window, and why. The state takes it that
    a request was accepted: who could not submit it goes on with the state of before.
    """
    if policy is None:
        return None, AutoscaleState(), Reason.OFF
    if sample.is_scaling:
        # Half of such a window belongs to another configuration.
        return None, _streaks(state), Reason.SCALING
    if sample.attainment.worst < policy.up_below:
        return _up(policy, sample, state, now_s)
    if _is_calm(policy, sample):
        return _down(policy, sample, state, now_s)
    return None, _streaks(state), Reason.STEADY


def _up(
    policy: AutoscalePolicy, sample: LoadSample, state: AutoscaleState, now_s: float
) -> Decision:
    if sample.attainment.num_seen < policy.min_requests:
        return None, _streaks(state), Reason.TOO_FEW_REQUESTS
    state = _streaks(state, low=state.num_low + 1)
    if sample.num_devices >= policy.max_devices:
        return None, state, Reason.AT_MAX
    if state.num_low < policy.up_windows:
        return None, state, Reason.MORE_WINDOWS
    if now_s - state.last_scale_s < policy.up_cooldown_s:
        return None, state, Reason.COOLING_DOWN
    wanted = max(sample.num_devices + step_up(policy, sample), policy.min_devices)
    wanted = min(wanted, policy.max_devices)
    regrets = _regrets_after_up(policy, state, now_s)
    return ScaleRequest(wanted), AutoscaleState(0, 0, now_s, False, regrets), Reason.LOW_ATTAINMENT


def _down(
    policy: AutoscalePolicy, sample: LoadSample, state: AutoscaleState, now_s: float
) -> Decision:
    state = _streaks(state, calm=state.num_calm + 1)
    if sample.num_devices <= policy.min_devices:
        return None, state, Reason.AT_MIN
    if state.num_calm < policy.down_windows:
        return None, state, Reason.MORE_WINDOWS
    if now_s - state.last_scale_s < down_wait_s(policy, state):
        return None, state, Reason.COOLING_DOWN
    # A down long after a down: nobody took the one before back.
    is_proven = state.last_was_down and now_s - state.last_scale_s >= _regret_s(policy, state)
    regrets = max(0, state.num_regrets - is_proven)
    after = AutoscaleState(0, 0, now_s, True, regrets)
    return ScaleRequest(sample.num_devices - 1), after, Reason.SLACK


def step_up(policy: AutoscalePolicy, sample: LoadSample) -> int:
    """Devices to add: in proportion to the shortfall, from 1 to `max_step`.

    Attainment at half of `up_below` asks for half as many devices again; at 0, for twice as many.
    """
    shortfall = (policy.up_below - sample.attainment.worst) / policy.up_below
    return min(max(1, math.ceil(sample.num_devices * shortfall)), policy.max_step)


def utilisation_when_smaller(sample: LoadSample) -> float:
    """KV used over what one device fewer would have, in proportion.

    Infinite on one device, and where nothing is known of the KV.
    """
    kv_tokens = sample.kv_capacity_tokens * (sample.num_devices - 1) / sample.num_devices
    return sample.kv_used_tokens / kv_tokens if kv_tokens > 0 else math.inf


def down_wait_s(policy: AutoscalePolicy, state: AutoscaleState) -> float:
    """Seconds from a scale to the next down: doubled for each regretted one.

    Where the utilisation is judged wrongly, a size that is too small looks big enough each time
    anew. Without this a steady load would go up and down for ever.
    """
    return policy.down_cooldown_s * 2.0 ** min(state.num_regrets, MAX_REGRETS)


def _regret_s(policy: AutoscalePolicy, state: AutoscaleState) -> float:
    """An up so soon after a down takes it back; a later one answers a load that has grown."""
    return max(down_wait_s(policy, state), REGRET_S)


def _regrets_after_up(policy: AutoscalePolicy, state: AutoscaleState, now_s: float) -> int:
    if not state.last_was_down:
        return state.num_regrets
    is_regretted = now_s - state.last_scale_s < _regret_s(policy, state)
    return min(max(0, state.num_regrets + (1 if is_regretted else -1)), MAX_REGRETS)


def _is_calm(policy: AutoscalePolicy, sample: LoadSample) -> bool:
    is_high = sample.attainment.worst >= policy.down_above
    # On one device there is nothing to shrink to; decide() says so by AT_MIN.
    has_room = sample.num_devices <= 1 or (
        utilisation_when_smaller(sample) <= policy.down_utilisation
    )
    return is_high and has_room


def _streaks(state: AutoscaleState, low: int = 0, calm: int = 0) -> AutoscaleState:
    return replace(state, num_low=low, num_calm=calm)
