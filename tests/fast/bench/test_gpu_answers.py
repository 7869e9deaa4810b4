"""The GPU benches of answers: servers with tiers and with quantised experts beside plain ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import equality, quantised, run, serve, tiers
from bench.gpu.parts import PARTS
from bench.gpu.servers import Held, held
from sgl_esft.formats.expert_scheme import SCHEME_NAMES
from sgl_esft.zoo import serving

WIDE = replace(serve.TINY, changes={**serve.TINY.changes, "moe_intermediate_size": 128})


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> serve.Files:
    return serve.write_files(serve.TINY, tmp_path_factory.mktemp("answers"))


# ---- tiers ----


@pytest.mark.full
@pytest.mark.alone  # its servers together need much of the memory
def test_tiers_answer_as_resident_experts(tmp_path: Path) -> None:
    """On a CPU to the bit, prompts in waves and answers alike."""
    found = tiers.measure(serve.TINY, tmp_path)
    assert "failed" not in found, found["failed"]
    assert {row["server"] for row in found["rows"]} == {"6 rows", "4 rows"}
    assert {row["model"] for row in found["rows"]} == {"base", "a00", "a01", "a02"}
    for row in found["rows"]:
        assert row["off"] == row["rounding"]
        assert row["distance"] > 0.01
    assert all(of["demand"] > 100 for of in found["counted"].values())
    assert set(found["milliseconds_a_token"]) == {"plain", "resident", "6 rows", "4 rows"}


def test_each_kind_of_tier_has_a_server(files: serve.Files) -> None:
    on_gpu = tiers.servers_of(files, "cuda")
    assert set(on_gpu) - set(tiers.servers_of(files, "cpu")) == {
        "6 rows, host memory",
        "6 rows, no graphs",
    }
    assert "--expert-cache" not in on_gpu[tiers.RESIDENT]
    assert "--no-esft" in on_gpu[tiers.PLAIN]


def answers(prompts: float, decoded: float, read: float) -> tiers.Answers:
    zero = torch.zeros(2, 3)
    return tiers.Answers(zero + prompts, zero + decoded, zero + read)


@pytest.mark.parametrize(
    ("tiered", "wrong"),
    [
        (answers(5.1, 5.1, 5.0), []),
        (answers(0.0, 5.1, 5.0), ["prompts"]),  # as the base: experts that were not there
        (answers(5.1, 0.0, 5.0), ["answers"]),
        (answers(float("nan"), float("nan"), 5.0), ["prompts", "answers"]),
    ],
)
def test_a_tier_that_answers_as_the_base_is_found(
    tiered: tiers.Answers, wrong: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    resident = {None: answers(0.0, 0.1, 0.0), "a00": answers(5.0, 5.1, 5.0)}
    reference = tiers.Reference("resident", [[1]], torch.zeros(2, 3) + 0.1, resident)
    seen = {None: resident[None], "a00": tiered}
    monkeypatch.setattr(tiers, "answers_of", lambda url, resident, asked, model: seen[model])
    rows = list(tiers.compared("tiers", reference))
    assert [(row["model"], row["phase"]) for row in rows if "why" in row] == [
        ("a00", phase) for phase in wrong
    ]


# ---- quantised ----


@pytest.mark.full
@pytest.mark.alone  # its servers together need much of the memory
def test_a_quantised_base_answers_as_merged_and_quantised(tmp_path: Path) -> None:
    found = quantised.measure(WIDE, tmp_path, ["int8"])
    assert "failed" not in found, found["failed"]
    (row,) = found["rows"]
    assert (row["rounding"], row["off"]) == (0, 0)
    assert row["distance"] > 0.01


def test_each_scheme_has_three_servers(files: serve.Files) -> None:
    name = next(iter(files.adapters))
    made = {(s, w): Path(f"{s}-{w}") for s in SCHEME_NAMES for w in ("base", "merged")}
    for scheme in SCHEME_NAMES:
        commands = quantised.commands_of(files, name, made, scheme, "cuda")
        assert set(commands) == {"woven", "merged", "base"}
        assert f"{scheme}-merged" in commands["merged"]
        plain = [each for which, each in commands.items() if which != "woven"]
        assert all(("moe_wna16" in each) == (scheme == "int4") for each in plain)
        assert "moe_wna16" not in commands["woven"], "the launcher says it itself"


def test_a_scheme_whose_server_does_not_come_up_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {"w": 1.0, "m": 2.0, "b": 1.0}
    monkeypatch.setattr(
        equality,
        "log_probabilities",
        lambda url, prompts, adapter=None: torch.zeros(4) + (2.0 if adapter else found[url]),
    )
    up = {f"int8, {which}": which[0] for which in ("woven", "merged", "base")}
    servers = Held(up, {"int4, woven": "no kernel"})
    assert "why" not in quantised.row_of("int8", "a00", servers, [[1]])
    assert quantised.row_of("int4", "a00", servers, [[1]])["why"] == "int4, woven: no kernel"


# ---- servers, results ----


def test_a_server_that_does_not_come_up_is_named_and_ends_no_other() -> None:
    with held({"one": ["--model-path", "/nowhere"], "two": ["--no-such-flag"]}, 60.0) as servers:
        assert servers.urls == {}
        assert set(servers.failed) == {"one", "two"}
        assert "/nowhere" in servers.failed["one"]


def test_an_error_has_what_a_server_said_that_had_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def server(arguments: list[str], seconds: float) -> Iterator[str]:
        try:
            yield f"http://{arguments[0]}"
        except Exception as error:  # as zoo.serving does
            error.add_note(f"{arguments[0]} ended")
            raise

    monkeypatch.setattr(serving, "server", server)
    commands = {"one": ["a"], "two": ["b"]}
    with held(commands, 1.0) as servers:
        assert servers.urls == {"one": "http://a", "two": "http://b"}

    def asked() -> None:
        with held(commands, 1.0):
            raise OSError("refused")

    with pytest.raises(OSError, match="refused") as found:
        asked()
    assert sorted(found.value.__notes__) == ["a ended", "b ended"]


def test_a_result_says_which_device_each_step_ran_on(tmp_path: Path) -> None:
    """Steps of an earlier run are kept, on the device that they ran on."""
    part = PARTS["answers"]
    old: dict[str, Any] = {"driver": {"name": "a"}, "steps": {"serve: equality": {"ok": True}}}
    (tmp_path / f"{part.file}.json").write_text(json.dumps(old))
    report = run.Report(part, tmp_path, "ran on hardware", {"name": "b"})
    report.resume()
    report.add("tiers: equality", {"ok": True, "took_seconds": 0.0})
    written = json.loads((tmp_path / f"{part.file}.json").read_text())["steps"]
    assert {name: step["device"] for name, step in written.items()} == {
        "serve: equality": "a",
        "tiers: equality": "b",
    }
