"""The woven server that most behaviour is tested on: one rank, three adapters, two slots."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.base_factory import AWKWARD_PAGE
from tests.support.families import Families, Family
from tests.support.references import NUM_NEW_TOKENS, Answers, Reference, Tokens, reference_of
from tests.support.servers import Server, ServerPool, ServerSpec

ARCHITECTURE = "DeepseekV2ForCausalLM"
NUM_SLOTS = 2
MAX_EXPERTS = 4
LOADED = ("a0", "a1", "a2")  # more than slots, so answering all of them means evicting
MAX_LOADED = 4  # SGLang's own limit on loaded adapters, least recently used first out


@dataclass(frozen=True)
class OneRank:
    """The server, what it serves, and what it must answer."""

    server: Server
    family: Family
    reference: Reference

    @property
    def prompts(self) -> list[str]:
        return self.reference.prompts

    @property
    def expected(self) -> Answers:
        return self.reference.answers

    @property
    def root(self) -> Path:
        """The server's --adapter-root."""
        return self.family.base.parent

    def ask(self, prompt_idx: int, adapter: str | None) -> Tokens:
        return self.server.token_ids([self.prompts[prompt_idx]], [adapter], NUM_NEW_TOKENS)[0]

    def check_answers(self) -> None:
        """Base and loaded adapters answer as their merged models do."""
        for adapter in (None, *LOADED):
            assert self.ask(0, adapter) == self.expected[adapter][0]


@pytest.fixture
def one_rank(families: Families, server_pool: ServerPool) -> OneRank:
    family = families.get(ARCHITECTURE)
    reference = reference_of(family, server_pool)
    spec = ServerSpec(
        family.base,
        tuple((name, family.adapters[name]) for name in LOADED),
        (
            *("--max-adapters", str(NUM_SLOTS), "--max-experts-per-adapter", str(MAX_EXPERTS)),
            *("--adapter-root", str(family.base.parent)),
            *("--max-loaded-loras", str(MAX_LOADED)),
            *("--expert-page-size", AWKWARD_PAGE, "--enable-metrics"),
        ),
    )
    return OneRank(server_pool.get(spec), family, reference)
