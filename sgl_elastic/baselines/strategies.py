"""The ways to scale that the ElasticMoE paper compares (section 7.2), and its ablations (7.7).

strategy, devices now and wanted --> [check_strategy] --> BadScaleError
--ablate --> [parse_switches, check_switches] --> AblationSwitches, ElasticConfigError
"""

from __future__ import annotations

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


def parse_switches(text: str) -> AblationSwitches:
    """`no_standby,no_peer_copy` as switches; "" for none. Raises ElasticConfigError."""
    known = {f"no_{each.name}": each.name for each in fields(AblationSwitches)}
    given = [word.strip() for word in text.split(",") if word.strip()]
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ElasticConfigError(f"--ablate {', '.join(unknown)}: there are {', '.join(known)}")
    return AblationSwitches(**{known[word]: False for word in given})


def check_switches(strategy: ScaleStrategy, switches: AblationSwitches) -> None:
    """Raises ElasticConfigError for parts turned off that the strategy does not have."""
    if switches.off and strategy is not ScaleStrategy.ELASTIC:
        raise ElasticConfigError(
            f"{strategy} has no {', '.join(switches.off)} to turn off: use the elastic strategy"
        )
