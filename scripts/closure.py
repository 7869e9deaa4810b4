"""Which installed distributions a set of roots needs, and what is wrong with them.

installed metadata -> [closure] -> pin (writes the pins), tests/repo/test_dependencies (checks them)
In:  root names, names to leave out.  Out: `Closure`: needed names, problems in words.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ENGINE = "sglang"


@dataclass
class Closure:
    """The result of a walk: `extras_of` holds each needed name and the extras asked of it."""

    extras_of: dict[str, set[str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def walk(roots: list[str], left_out: set[str], held: Collection[str] = ()) -> Closure:
    """Follow installed metadata from the roots, not through what is left out.

    held: names of which SGLang, and nobody else, may ask for another version.
    """
    result = Closure()
    waiting = [(canonicalize_name(root), frozenset[str]()) for root in roots]
    while waiting:
        name, extras = waiting.pop()
        known = result.extras_of.get(name)
        if known is not None and extras <= known:
            continue
        result.extras_of.setdefault(name, set()).update(extras)
        for requirement in active_requirements(name, result.extras_of[name]):
            needed = canonicalize_name(requirement.name)
            if needed in left_out:
                continue
            if name == ENGINE and needed in held:
                requirement.specifier = SpecifierSet()
            problem = problem_with(name, requirement)
            if problem:
                result.problems.append(problem)
            else:
                waiting.append((needed, frozenset(requirement.extras)))
    return result


def active_requirements(name: str, extras: set[str]) -> Iterator[Requirement]:
    """Requirements of an installed distribution that hold on this machine with these extras."""
    for text in importlib.metadata.requires(name) or []:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement


def problem_with(name: str, requirement: Requirement) -> str | None:
    """Why the installed set does not satisfy this requirement of `name`, or None."""
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return f"{name} needs {requirement}, which is neither installed nor left out"
    if not requirement.specifier.contains(version, prereleases=True):
        return f"{name} needs {requirement}, but {version} is installed"
    return None
