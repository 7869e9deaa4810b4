"""docs/access.md says what the code says: flags, keys file, classes, bounds, errors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sgl_esft import errors
from sgl_esft.access import ask, bodies, keys, origins
from sgl_esft.fields.described import (
    DESCRIBED,
    INTERNAL,
    MAX_LOGIT_BIASES,
    MAX_PROMPTS,
    MAX_STOPS,
    MEDIA,
)
from sgl_esft.http.body import MAX_DEPTH
from sgl_esft.http.classes import TABLE, RouteClass
from sgl_esft_launch import access, flags

TEXT = (Path(__file__).parents[3] / "docs" / "access.md").read_text()


def section(title: str) -> str:
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def first_cells(title: str) -> list[str]:
    rows = [line for line in section(title).splitlines() if line.startswith("| ")]
    return [row.split(" | ")[0].removeprefix("| ") for row in rows[1:]]


def test_flags_are_those_of_the_parser() -> None:
    documented = [cell.strip("`").split()[0] for cell in first_cells("Flags")]
    group = next(g for g in flags.build_parser()._action_groups if g.title == "access")
    assert sorted(documented) == sorted(a.option_strings[0] for a in group._group_actions)


def test_defaults() -> None:
    parsed = flags.parse([])[0].access
    for text in (
        f"| {access.DEFAULT_BODY_TIMEOUT_S:g} |",
        f"| {access.DEFAULT_REQUEST_TIMEOUT_S:g} |",
        f"| {parsed.max_body_bytes >> 20}MiB |",
    ):
        assert text in section("Flags")


def test_the_keys_file_of_the_page_can_be_read(tmp_path: Path) -> None:
    document = re.findall(r"```json\n(.*?)```", section("The keys file"), re.DOTALL)[0]
    path = tmp_path / "keys.json"
    path.write_text(document)
    path.chmod(0o600)
    names = [entry.caller.name for entry in keys.read_keys_file(path)]
    assert names == [each["name"] for each in json.loads(document)["keys"]]
    listed = set(re.findall(r"`([a-z0-9_]+)`", " ".join(first_cells("The keys file"))))
    assert listed == keys._FIELDS


@pytest.mark.parametrize("route_class", RouteClass)
def test_routes_are_named_under_their_class(route_class: RouteClass) -> None:
    row = next(
        line
        for line in section("Classes of routes").splitlines()
        if line.startswith(f"| {route_class.value} |")
    )
    named = set(re.findall(r"`(/[a-z0-9_./-]*)`", row))
    assert named
    assert {TABLE[path].route_class for path in named} == {route_class}


def test_bounds() -> None:
    text = section("Bodies")
    assert DESCRIBED["n"].integers == (0, 128)
    for part in (
        f"at most {MAX_DEPTH} levels",
        f"at most {origins.MAX_HEADERS}, and {origins.MAX_HEADER_BYTES >> 10} KiB",
        f"0 to 128; prompts {MAX_PROMPTS}",
        f"times `n` {ask.MAX_SEQUENCES}",
        f"{MAX_LOGIT_BIASES} biases",
        "0 to {[1]}".format(DESCRIBED["top_logprobs"].integers),
        f"| {MAX_STOPS}, of {DESCRIBED['stop'].max_chars} and "
        f"{DESCRIBED['stop_regex'].max_chars} characters",
        f"{DESCRIBED['regex'].max_chars}, {(DESCRIBED['ebnf'].max_chars or 0) >> 10} Ki and "
        f"{(DESCRIBED['json_schema'].max_chars or 0) >> 10} Ki characters",
    ):
        assert part in text, part
    known = {*DESCRIBED, *INTERNAL, *MEDIA, *bodies.MEDIA_PARTS}
    named = set(re.findall(r"`([a-z_]+)`", " ".join(first_cells("Bodies"))))
    assert named - known == set()


def test_errors_are_all_there_with_their_status() -> None:
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", section("Errors"), re.MULTILINE)
    for status, name in rows:
        assert getattr(errors, name).http_status == int(status)
    of_access = {each.__name__ for each in errors.AccessError.__subclasses__()}
    others = {
        "DuplicateRequestIdError",
        "EmptyPromptError",
        "KeyLimitError",
        "RequestTimeoutError",
        "InternalError",
        "PromptTooLongError",
        "TextBusyError",
    }
    assert {name for _, name in rows} == of_access | others
