"""The ways to scale that the ElasticMoE paper compares (section 7.2), and its ablations (7.7).

    strategy, devices now and wanted --> [describe, check] --> devices needed, phases, down time

Pure description and validation: who runs a strategy asks here what it needs and what it does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum

from sgl_elastic.errors import BadScaleError, ElasticConfigError


class ScaleStrategy(StrEnum):
    """How to get from one configuration to another."""

    ELASTIC = "elastic"  # this runtime: one set of weights and KV, changed in place
    COLD_RESTART = "cold_restart"  # stop the old one, then start the new one
    EXTRAVAGANT = "extravagant"  # start the new one on other devices, then stop the old one
    COLOCATED = "colocated"  # start the new one on the old devices too, two copies for a while
    HORIZONTAL = "horizontal"  # one more whole replica, or one fewer


@dataclass(frozen=True)
class Traits:
    """What a strategy does, in the order in which it does it."""

    phases: tuple[str, ...]
    serves_meanwhile: bool  # requests are answered from the first phase to the last
    weight_copies: int  # the most copies of the weights on one device
    remark: str


TRAITS: Mapping[ScaleStrategy, Traits] = {
    ScaleStrategy.ELASTIC: Traits(
        phases=("plan", "memory", "prepare", "switch", "retire", "after"),
        serves_meanwhile=True,
        weight_copies=1,
        remark="Devices in both configurations keep their weights and KV; the rest is copied once.",
    ),
    ScaleStrategy.COLD_RESTART: Traits(
        phases=("stop old", "start new"),
        serves_meanwhile=False,
        weight_copies=1,
        remark="Down from the stop of the old one until the new one has read its weights.",
    ),
    ScaleStrategy.EXTRAVAGANT: Traits(
        phases=("start new", "switch", "stop old"),
        serves_meanwhile=True,
        weight_copies=1,
        remark="Needs the devices of both configurations at once.",
    ),
    ScaleStrategy.COLOCATED: Traits(
        phases=("start new", "switch", "stop old"),
        serves_meanwhile=True,
        weight_copies=2,
        remark="Shared devices hold weights and KV twice, so both must start with little KV.",
    ),
    ScaleStrategy.HORIZONTAL: Traits(
        phases=("start replica", "route to both"),
        serves_meanwhile=True,
        weight_copies=1,
        remark="Only by whole replicas: as many devices again, or half of them.",
    ),
}


def devices_needed(strategy: ScaleStrategy, num_old: int, num_new: int) -> int:
    """The most devices in use at any moment while scaling from `num_old` to `num_new`."""
    if strategy is ScaleStrategy.EXTRAVAGANT:
        return num_old + num_new
    return max(num_old, num_new)


def check_strategy(strategy: ScaleStrategy, num_old: int, num_new: int, max_devices: int) -> None:
    """Raises BadScaleError where the strategy cannot do this scale on `max_devices` devices."""
    whole_replicas = num_new == 2 * num_old or num_old == 2 * num_new
    if strategy is ScaleStrategy.HORIZONTAL and not whole_replicas:
        raise BadScaleError(
            f"horizontal scaling goes by whole replicas, not from {num_old} to {num_new} devices: "
            f"ask for {2 * num_old}, or for half"
        )
    needed = devices_needed(strategy, num_old, num_new)
    if needed > max_devices:
        raise BadScaleError(
            f"{strategy} scaling from {num_old} to {num_new} devices needs {needed} devices at "
            f"once, there are {max_devices}: use another strategy, or a smaller step"
        )


@dataclass(frozen=True)
class AblationSwitches:
    """Parts of the elastic strategy that can be turned off to see what each is worth."""

    shared_allocator: bool = True  # the paper's IPC-safe allocator
    peer_copy: bool = True  # the paper's HCCL transfers
    standby: bool = True  # the paper's pre-initialised instances
    zero_copy: bool = True  # both instances map the same pages

    @property
    def off(self) -> tuple[str, ...]:
        """Names of what is turned off, in the order of the paper's table."""
        return tuple(each.name for each in fields(self) if not getattr(self, each.name))

    @property
    def serves_meanwhile(self) -> bool:
        """Without zero copy the old instance must stop before the new one fits."""
        return self.zero_copy


def parse_switches(text: str) -> AblationSwitches:
    """`no_standby,no_peer_copy` as switches; "" for none. Raises ElasticConfigError."""
    known = {f"no_{each.name}": each.name for each in fields(AblationSwitches)}
    given = [word.strip() for word in text.split(",") if word.strip()]
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ElasticConfigError(f"--ablate {', '.join(unknown)}: there are {', '.join(known)}")
    return AblationSwitches(**{known[word]: False for word in given})


@dataclass(frozen=True)
class Change:
    """What one switch, turned off, does to one phase of a scale."""

    switch: str
    phase: str
    instead: str


CHANGES: tuple[Change, ...] = (
    Change("shared_allocator", "memory", "a staging buffer of the same size beside each copy"),
    Change("peer_copy", "memory", "incoming weights are read from the checkpoint on disk"),
    Change("standby", "prepare", "the instance is started from nothing"),
    Change("zero_copy", "prepare", "the new instance reads its own copy of all weights from disk"),
    Change("zero_copy", "switch", "the old instance stops first; its requests start again"),
)

# The rows of the paper's table: one more part off in each.
PROGRESSION: tuple[AblationSwitches, ...] = (
    AblationSwitches(),
    AblationSwitches(shared_allocator=False),
    AblationSwitches(shared_allocator=False, peer_copy=False),
    AblationSwitches(shared_allocator=False, peer_copy=False, standby=False),
    AblationSwitches(shared_allocator=False, peer_copy=False, standby=False, zero_copy=False),
)


def changes(switches: AblationSwitches) -> tuple[Change, ...]:
    """What these switches change, in the order of a scale's phases."""
    return tuple(change for change in CHANGES if change.switch in switches.off)


def check_switches(strategy: ScaleStrategy, switches: AblationSwitches) -> None:
    """Raises ElasticConfigError for parts turned off that the strategy does not have."""
    if switches.off and strategy is not ScaleStrategy.ELASTIC:
        raise ElasticConfigError(
            f"{strategy} has no {', '.join(switches.off)} to turn off: use the elastic strategy"
        )
