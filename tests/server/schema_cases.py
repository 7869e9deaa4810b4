"""Cases that an OpenAPI document allows and forbids, sent to a live server.

GET /openapi.json -> operations of a class -> [fuzz_all: positive, negative cases] -> Findings
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from sgl_esft.http.classes import TABLE, RouteClass
from tests.server.exchange import check_answers
from tests.support.guarded import ADMIN_KEY, Guarded

ANSWER_TIMEOUT_S = 30.0
# A server may be busy, or take too long; those are said in docs/access.md and docs/http.md.
DOCUMENTED = frozenset({503, 504})

# Operations that answer 5xx to what they cannot do, by design of SGLang 0.5.23, and why that stays.
EXCEPTIONS: Mapping[str, tuple[frozenset[int], str]] = {}
# Not called at random, because they would end what the others are tested on.
NOT_CALLED: Mapping[str, str] = {
    "POST /pause_generation": "every later request would wait for /continue_generation",
    "POST /v1/drain": "the server would end",
    "POST /unload_lora_adapter": "the adapter that answers are checked with would be gone",
    "POST /scale_elastic_ep": "for --elastic; without it SGLang waits for ranks that never come",
}


@dataclass
class Findings:
    """Answers that must not be, by operation."""

    broken: dict[str, list[str]] = field(default_factory=dict)
    num_calls: int = 0

    def note(self, label: str, answer: requests.Response) -> None:
        self.num_calls += 1
        allowed = DOCUMENTED | EXCEPTIONS.get(label, (frozenset(), ""))[0]
        if answer.status_code >= 500 and answer.status_code not in allowed:
            request = answer.request
            body = request.body if isinstance(request.body, bytes) else str(request.body).encode()
            seen = f"{answer.status_code} to {request.method} {request.url} {body[:400]!r}"
            self.broken.setdefault(label, []).append(f"{seen}: {answer.text[:200]}")

    def note_lost(self, label: str, body: object, error: Exception) -> None:
        """A connection that ended without an answer."""
        self.num_calls += 1
        self.broken.setdefault(label, []).append(f"{error!r:.200} to {body!r:.400}")


def on_any_server(label: str) -> bool:
    """Operations that every server can be asked at random."""
    return label not in NOT_CALLED


def operations(
    document: Mapping[str, Any], classes: Sequence[RouteClass], is_called: Callable[[str], bool]
) -> list[Any]:
    """Operations of the document whose routes have these classes. Label -> is_called."""
    found = [
        result.ok() for result in schemathesis.openapi.from_dict(document).get_all_operations()
    ]
    return [
        each
        for each in found
        if is_called(f"{each.method.upper()} {each.path}")
        and _class_of(each.method.upper(), each.path) in classes
    ]


def _class_of(method: str, path: str) -> RouteClass | None:
    declared = TABLE.get(path) or TABLE.get(path.replace("}", ":path}"))
    return None if declared is None else declared.class_for(method)


def few_tokens(body: object) -> object:
    """So that a case that is taken does not take the server's time: a bound where it has none."""
    if not isinstance(body, dict):
        return body
    if "sampling_params" in body or "text" in body or "input_ids" in body:
        sampling = body.get("sampling_params")
        if sampling is None or isinstance(sampling, dict):
            body = {**body, "sampling_params": {"max_new_tokens": 2, **(sampling or {})}}
        return body
    return {"max_tokens": 2, **body}


def fuzz(
    guarded: Guarded,
    operation: Any,
    mode: GenerationMode,
    num_cases: int,
    key: str,
    found: Findings,
) -> None:
    """Cases of one operation, all of them sent, whatever the first ones were answered."""
    label = f"{operation.method.upper()} {operation.path}"

    @settings(
        max_examples=num_cases,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        if _class_of(operation.method.upper(), operation.path) is RouteClass.CLIENT:
            case.body = few_tokens(case.body)
        sent = case.as_transport_kwargs(base_url=guarded.server.url)
        sent["headers"] = {**sent["headers"], "Authorization": f"Bearer {key}"}
        try:
            answer = requests.request(**sent, timeout=ANSWER_TIMEOUT_S)
        except (UnicodeError, requests.exceptions.InvalidHeader):
            return  # what an HTTP client cannot send; test_hostile.py sends such by hand
        except requests.ConnectionError as error:
            found.note_lost(label, case.body, error)
            return
        found.note(label, answer)

    send()


def fuzz_all(
    guarded: Guarded,
    num_cases: int,
    key: str,
    classes: Sequence[RouteClass],
    is_called: Callable[[str], bool] = on_any_server,
) -> Findings:
    url = f"{guarded.server.url}/openapi.json"
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    document = requests.get(url, headers=headers, timeout=ANSWER_TIMEOUT_S).json()
    found = Findings()
    for operation in operations(document, classes, is_called):
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            try:
                fuzz(guarded, operation, mode, num_cases, key, found)
            except (schemathesis.errors.SchemathesisError, Unsatisfiable):
                # An operation without parameters has nothing that could be wrong.
                if mode is GenerationMode.POSITIVE:
                    raise
        assert guarded.server.process.poll() is None, operation.label
        check_answers(guarded)
    return found


def check(found: Findings) -> None:
    shown = {label: [len(seen), *seen[:2]] for label, seen in found.broken.items()}
    assert shown == {}, json.dumps(shown, indent=1)
