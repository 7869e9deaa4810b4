"""The table of fields: complete, and each bound at its edge."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from sglang.srt.sampling.sampling_params import SamplingParams

from sgl_esft.errors import BadBodyError
from sgl_esft.fields import check, request_classes, table
from sgl_esft.fields.check import check_fields
from sgl_esft.fields.described import DESCRIBED, INTERNAL
from sgl_esft.fields.rules import BodyRules, ModelBounds
from sgl_esft.fields.shapes import fields_of
from sgl_esft.fields.table import Described
from sgl_esft.http.classes import TABLE, RouteClass

BOUNDS = ModelBounds(vocab_size=300, context_length=1000)
EVERYTHING = BodyRules(takes_logit_processors=True, takes_stop_regex=True, takes_media=True)
ROWS = [row for row in table.described_fields() if row.part in ("", "sampling_params")]
NUMERIC = [r for r in ROWS if r.low is not None and r.refusal is None]
HIGHEST = {"context_length": 1000, "vocab_size": 299}


def send(row: Described, value: Any, rules: BodyRules = EVERYTHING) -> None:
    body = {row.part: {row.name: value}} if row.part else {row.name: value}
    check_fields(row.route, body, rules, BOUNDS)


def of(row: Described, number: float) -> Any:
    """The number, in the simplest form that the field takes."""
    for kind in row.types:
        if kind in ("an integer", "a number"):
            return number
        if kind == "an object of numbers":
            return {"1": number}
        if kind.startswith("a list of") and "integers" in kind:
            return [[number]] if "lists" in kind else [number]
    raise AssertionError(row)


@pytest.mark.parametrize("row", NUMERIC, ids=lambda row: f"{row.route} {row.part}.{row.name}")
def test_a_number_is_taken_at_its_edges_and_not_beyond(row: Described) -> None:
    low, high = row.low or 0, HIGHEST.get(str(row.high), row.high)
    assert isinstance(high, int | float)
    is_float = any("number" in kind for kind in row.types)
    for edge, beyond in ((low, -1), (high, 1)):
        send(row, of(row, edge))
        over = edge + beyond * (max(1.0, abs(edge)) * 0.01 if is_float else 1)
        with pytest.raises(BadBodyError, match=row.name):
            send(row, of(row, over))
    if "a string" not in row.types and "a list of strings" not in row.types:
        with pytest.raises(BadBodyError, match=row.name):
            send(row, of(row, "7"))  # type: ignore[arg-type]


# What differs from 32 bits, or from any number of 32 bits. Said here once more: a bound that is
# changed in the table alone is a mistake.
NUMBERS = {
    (0, "context_length"): """max_new_tokens max_tokens max_completion_tokens max_output_tokens
        min_new_tokens min_tokens max_thinking_tokens thinking_budget routed_experts_start_len""",
    (-1, "context_length"): "logprob_start_len",
    (0, "vocab_size"): """input input_ids items label_token_ids prompt query stop_token_ids
        token_ids_logprob tokens""",
    (0, 16): "beam_width",
    (0, 100): "logprobs top_logprobs top_logprobs_num",
    (0, 128): "n best_of",
    (0, 2**30): "stream_interval",
    (0, 2**31 - 1): "data_parallel_rank remaining routed_dp_rank total",
    (1, 2**31 - 1): "dimensions",
    (-1, 2**30): "top_k",
    (-(2**63), 2**63 - 1): "seed sampling_seed",
    (0, 0.99): "reasoning_effort",
    (0, 1): "min_p top_p",
    (0, 1e9): "temperature",
    (1e-6, 1e9): "temperature",  # of what divides by it
    (0.001, 2): "repetition_penalty",
    (-2, 2): "frequency_penalty presence_penalty",
    (-1e9, 1e9): "logit_bias",
}
USUAL = {(-(2**31), 2**31 - 1), (-3e38, 3e38), (None, None)}
CHARS = {
    64: "reasoning_parser tool_call_parser",
    256: """conversation_id id previous_response_id request_id rid routing_key session_id
        session_params stop_regex""",
    1024: "cache_salt regex stop stop_sequences",
    16 << 10: "ebnf",
    64 << 10: "json_schema structural_tag",
}
ITEMS = {
    16: "stop stop_regex stop_sequences",
    256: """cache_salt conversation_id custom_logit_processor id previous_response_id request_id rid
        routing_key session_id session_params""",
    300: "logit_bias",
}


def by_bound(bound_of: Callable[[Described], Any], usual: Collection[Any]) -> dict[Any, set[str]]:
    """Bound -> the fields that have it, of those that a client may send to some server."""
    found: dict[Any, set[str]] = {}
    for row in table.described_fields():
        if row.refusal is None or row.switch:
            found.setdefault(bound_of(row), set()).add(row.name)
    return {bound: names for bound, names in found.items() if bound not in usual}


def test_every_bound_is_the_one_that_was_meant() -> None:
    numbers = by_bound(lambda row: (row.low, row.high), USUAL)
    assert numbers == {bound: set(names.split()) for bound, names in NUMBERS.items()}
    chars = by_bound(lambda row: row.max_chars, {None})
    assert chars == {bound: set(names.split()) for bound, names in CHARS.items()}
    items = by_bound(lambda row: row.max_items, {None})
    assert items == {bound: set(names.split()) for bound, names in ITEMS.items()}
    as_json = {name: each.max_json_chars for name, each in DESCRIBED.items() if each.max_json_chars}
    assert as_json == dict.fromkeys(
        ("ResponsesRequest.text", "json_schema", "response_format"), 64 << 10
    )


@pytest.mark.parametrize("row", [r for r in ROWS if r.refusal and not r.switch], ids=str)
def test_a_field_that_is_not_for_clients(row: Described) -> None:
    with pytest.raises(BadBodyError, match=f"{row.name}: not for clients"):
        send(row, "x")


WRONG = {"a string": 7, "a boolean": "x", "an object": "x"}


@pytest.mark.parametrize("row", [r for r in ROWS if len(r.types) == 1 and not r.refusal], ids=str)
def test_a_value_of_another_type(row: Described) -> None:
    if row.types[0] in WRONG:
        with pytest.raises(BadBodyError, match=f"{row.name} must be"):
            send(row, WRONG[row.types[0]])


def test_sampling_parameters_at_their_edges_are_sglangs_too() -> None:
    """The bounds say no more than SGLang's own check does."""
    for row in NUMERIC:
        if row.route == "/generate" and row.part == "sampling_params":
            for edge in (row.low, HIGHEST.get(str(row.high), row.high)):
                if row.name in ("top_k", "n", "beam_width", "top_p") and edge == 0:
                    continue  # SGLang says so itself
                given = {row.name: of(row, edge)}  # type: ignore[arg-type]
                given.setdefault("max_new_tokens", 1000)
                SamplingParams(**given).verify(BOUNDS.vocab_size)


def test_priority_fits_what_the_scheduler_makes_of_it() -> None:
    for row in NUMERIC:
        if row.name == "priority":
            assert row.low == -(2**31)
            assert row.high == 2**31 - 1


def test_every_open_route_with_a_body_has_a_class() -> None:
    posts = {
        path
        for path, declared in TABLE.items()
        if declared.route_class is RouteClass.CLIENT and "POST" in declared.methods
    }
    assert posts - {"/v1/responses/{response_id}/cancel"} == set(request_classes.route_classes())


def test_every_field_of_sglangs_classes_is_described() -> None:
    """Red when SGLang adds one: describe it, or add it to what is not for clients."""
    refused = {row.name for row in table.described_fields() if row.refusal and not row.switch}
    assert refused == set(INTERNAL)
    assert all(
        set(fields_of(kind)) for kinds in request_classes.route_classes().values() for kind in kinds
    )


@dataclass
class Next:
    """A class of the next SGLang."""

    text: str = ""
    opens_a_hole: bool = False


def test_a_field_that_sglang_adds_is_refused() -> None:
    part = table.part_of((Next,))
    assert part.fields["text"].refusal is None
    assert part.fields["opens_a_hole"].refusal is not None


@dataclass
class Rows:
    """Objects at a depth where no class of SGLang's has them yet."""

    messages: list[list[Next]] | None = None


def test_objects_in_lists_of_lists_are_looked_into() -> None:
    fields = table.part_of((Rows,))
    check._check_part(fields, {"messages": [[{"text": "x"}]]}, BodyRules(), BOUNDS)
    with pytest.raises(BadBodyError, match="opens_a_hole: not for clients"):
        check._check_part(fields, {"messages": [[{"opens_a_hole": True}]]}, BodyRules(), BOUNDS)


@pytest.mark.parametrize(
    ("path", "params"),
    [
        ("/v1/chat/completions", chat_create_params.CompletionCreateParamsBase),
        ("/v1/completions", completion_create_params.CompletionCreateParamsBase),
        ("/v1/embeddings", embedding_create_params.EmbeddingCreateParams),
        ("/v1/responses", response_create_params.ResponseCreateParamsBase),
    ],
)
def test_what_openais_client_can_send_is_known(path: str, params: type) -> None:
    fields = table.routes()[path].fields
    assert set(params.__annotations__) - fields.keys() == set()
    assert not [name for name in params.__annotations__ if fields[name].refusal]


@pytest.mark.parametrize("route", sorted(request_classes.route_classes()))
def test_a_misspelt_field_is_told_the_nearest(route: str) -> None:
    with pytest.raises(BadBodyError, match='"adaptor" is not known here; did you mean "adapter"'):
        check_fields(route, {"adaptor": "x"}, BodyRules(), BOUNDS)
    with pytest.raises(BadBodyError, match="a field has a name"):
        check_fields(route, {"\n" * 99: json.dumps(1)}, BodyRules(), BOUNDS)
