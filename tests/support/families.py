"""Random bases with four adapters each, the demo, and merged checkpoints: once a test session."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

from sgl_esft import zoo
from sgl_esft.tools.merge import merge_adapter
from tests.support.adapter_factory import write_random_adapter
from tests.support.base_factory import write_random_base

NUM_ADAPTERS = 4
NUM_PROMPTS = 50


@dataclass(frozen=True)
class Family:
    """A base model of one architecture and its adapters."""

    architecture: str
    base: Path
    adapters: dict[str, Path]
    num_prompts: int = NUM_PROMPTS  # that each of its models is asked

    @cached_property
    def merged(self) -> dict[str, Path]:
        """Adapter name -> full checkpoint with that adapter written in."""
        return {name: self._merge(name) for name in self.adapters}

    def _merge(self, name: str) -> Path:
        out = self.base.parent / f"merged-{name}"
        merge_adapter(self.base, self.adapters[name], out)
        return out

    @property
    def named(self) -> tuple[tuple[str, Path], ...]:
        return tuple(self.adapters.items())


def make_family(architecture: str, folder: Path) -> Family:
    base = write_random_base(folder / "base", architecture, seed=1)
    adapters = {
        f"a{i}": write_random_adapter(folder / f"a{i}", base, seed=10 + i)
        for i in range(NUM_ADAPTERS)
    }
    return Family(architecture, base, adapters)


class Families:
    """Families by architecture, made when first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, Family] = {}

    def get(self, architecture: str) -> Family:
        if architecture not in self._made:
            self._made[architecture] = make_family(architecture, self._folder / architecture)
        return self._made[architecture]


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> Families:
    return Families(tmp_path_factory.mktemp("families"))


def random_prompts(num_prompts: int = NUM_PROMPTS, seed: int = 0) -> list[str]:
    """Prompts of 3 to 150 characters; every third continues an earlier one (prefix cache)."""
    rng = random.Random(seed)
    prompts: list[str] = []
    for i in range(num_prompts):
        text = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz  .,", k=rng.randint(3, 90)))
        prompts.append(rng.choice(prompts)[:60] + text if i % 3 == 2 else text)
    return prompts


class MergedDemo:
    """The demo's merged checkpoints, made when first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, adapter: str | None) -> Path:
        """The base with this adapter written in; None: the base."""
        if adapter is None:
            return zoo.base_path()
        out = self._folder / adapter
        if not out.exists():
            merge_adapter(zoo.base_path(), zoo.adapter_paths()[adapter], out)
        return out


@pytest.fixture(scope="session")
def merged_demo(tmp_path_factory: pytest.TempPathFactory) -> MergedDemo:
    return MergedDemo(tmp_path_factory.mktemp("merged"))
