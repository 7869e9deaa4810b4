"""What a stranger may send, and what the answer to it is: one row each.

Row.sent: the bytes of a whole connection, as no HTTP library would send them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tests.support.guarded import ADMIN_KEY, CLIENT_KEY, TENANT_KEY

CLOSED: Final = 0  # in place of a status: the connection was closed, without an answer
JSON_TYPE: Final = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Row:
    """Bytes, and the statuses of which the answer must have one."""

    name: str
    sent: bytes
    statuses: frozenset[int]


def request(
    method: str,
    target: str,
    body: object = None,
    headers: Mapping[str, str] | None = None,
    *,
    key: str | None = CLIENT_KEY,
    host: str = "127.0.0.1",
) -> bytes:
    """A request that is well-formed but for what it is given; `bytes` are a body as it is."""
    raw = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {"Host": host, "Connection": "close", **JSON_TYPE, **(headers or {})}
    if key is not None:
        fields["Authorization"] = f"Bearer {key}"
    if raw and "Transfer-Encoding" not in fields:
        fields.setdefault("Content-Length", str(len(raw)))
    lines = [f"{method} {target} HTTP/1.1", *(f"{n}: {v}" for n, v in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + raw


def rows() -> list[Row]:
    """Every row."""
    return [
        *_numbers(),
        *_types(),
        *_texts(),
        *_documents(),
        *_heads(),
        *_framing(),
        *_routes(),
        *_keys(),
        *_adapters(),
    ]


def _row(name: str, sent: bytes, *statuses: int) -> Row:
    return Row(name, sent, frozenset(statuses))


def _generate(name: str, sampling: Mapping[str, Any], *statuses: int, **fields: Any) -> Row:
    few = {"max_new_tokens": 2, "temperature": 0}
    body = {"text": "x", "sampling_params": {**few, **sampling}, **fields}
    return _row(f"generate: {name}", request("POST", "/generate", body), *(statuses or (400,)))


def _complete(name: str, *statuses: int, **fields: Any) -> Row:
    body = {"model": "base", "prompt": "x", "max_tokens": 2, **fields}
    sent = request("POST", "/v1/completions", body)
    return _row(f"completions: {name}", sent, *(statuses or (400,)))


def _chat(name: str, *statuses: int, **fields: Any) -> Row:
    body = {"model": "base", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    sent = request("POST", "/v1/chat/completions", {**body, **fields})
    return _row(f"chat: {name}", sent, *(statuses or (400,)))


def _numbers() -> Iterator[Row]:
    """Numbers that become an index, a count or a size."""
    for n in (10**9, 5_000_000, 129, -1, 1.5, "3", [1]):
        yield _generate(f"n {n!r}", {"n": n})
    yield _complete("n", n=10**6)
    yield _complete("best_of", best_of=10**6)
    yield _chat("n", n=10**9)
    for ids in ([10**9], [-1], [2**63], [1.5], [[1, -5]], [[]], [["x"]], ["x", 1], [None], []):
        yield _generate(f"input_ids {ids!r}", {}, text=None, input_ids=ids)
    for field, value in (
        ("top_logprobs_num", 10**9),
        ("top_logprobs_num", -1),
        ("logprob_start_len", -(10**9)),
        ("token_ids_logprob", [10**9]),
        ("token_ids_logprob", [-1]),
    ):
        yield _generate(f"{field} {value!r}", {}, return_logprob=True, **{field: value})
    for field, value in (
        ("max_new_tokens", 10**12),
        ("max_new_tokens", -1),
        ("max_new_tokens", "9"),
        ("min_new_tokens", 10**9),
        ("top_k", -7),
        ("top_k", 2**40),
        ("top_p", 7),
        ("top_p", 0),
        ("min_p", -1),
        ("temperature", -1),
        ("repetition_penalty", 99),
        ("frequency_penalty", 1e308),
        ("stop_token_ids", [10**9]),
        ("stop_token_ids", [-1]),
        ("logit_bias", {"99999999": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {str(i): 1 for i in range(400)}),
        ("logit_bias", {"1": "x"}),
        ("stream_interval", -1),
        ("sampling_seed", 2**70),
    ):
        yield _generate(f"{field} {str(value)[:30]}", {field: value})
    yield _complete("logprobs", logprobs=10**6)
    yield _complete("seed", seed=2**80)
    yield _complete("max_tokens", max_tokens=10**9)
    yield _complete("fewer tokens than none", max_tokens=None, n=128, num_predict=-2)
    yield _complete("ids", prompt=[[10**9, 1]])
    yield _complete("an id as a text beside ids", prompt=[1, "99999999"])
    yield _complete("an id as a text in a list of ids", prompt=[["99999999"]])
    for route in (_complete, _chat):
        yield route("stop_token_ids as texts", stop_token_ids=["99999999"], min_tokens=1)
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    values = {"chat_template": endless}
    for route in ("/v1/responses", "/v1/decisions", "/v1/systemone"):
        body = {"model": "base", "input": "x", "state": "x", "chat_template_kwargs": values}
        yield _row(f"{route}: a template", request("POST", route, body), 400)
    yield _chat("input_ids as texts", input_ids=["99999999"])
    last = {"max_new_tokens": 0}
    yield _generate("token_indices_to_pool", last, token_indices_to_pool=[10**9])
    yield _generate("multi_item_delimiter_indices", last, multi_item_delimiter_indices=[10**9])
    yield _chat("top_logprobs", logprobs=True, top_logprobs=10**6)
    yield _generate("too many prompts", {}, text=["x"] * 5000)
    yield _generate("longer than the context", {}, text="x " * 40_000)


def _types() -> Iterator[Row]:
    """Each field with a value of each wrong type."""
    for wrong in (7, True, {"a": 1}, [[["x"]]], [None], [7]):
        yield _generate(f"text {wrong!r}", {}, text=wrong)
        yield _complete(f"prompt {wrong!r}", *((200,) if wrong == [7] else (400,)), prompt=wrong)
    for wrong in (7, "x", [7], [["x"]]):
        yield _generate(f"sampling_params {wrong!r}", {}, sampling_params=wrong)
    for wrong in ("yes", [], {}, 7):
        yield _generate(f"return_logprob {wrong!r}", {}, 400, 200, return_logprob=wrong)
        yield _generate(f"stream {wrong!r}", {}, 400, 200, stream=wrong)
    for field in (
        "temperature",
        "top_p",
        "top_k",
        "stop",
        "regex",
        "json_schema",
        "max_new_tokens",
    ):
        for wrong in ({"a": 1}, [[1]], True):
            yield _generate(f"{field} {wrong!r}", {field: wrong}, 400, 200)
    for wrong in (7, [7], {"a": 1}, ["a", "b"], [[]], True):
        yield _generate(f"adapter {wrong!r}", {}, adapter=wrong)
        yield _generate(f"lora_path {wrong!r}", {}, lora_path=wrong)
    for wrong in (7, [7], [{"role": 7}], [{}], [{"role": "user"}], {"role": "user"}, "x", [None]):
        yield _chat(f"messages {wrong!r}", messages=wrong)
    for wrong in (7, [], {}, None):
        yield _complete(f"model {wrong!r}", 400, 200, model=wrong)
    yield _generate("rid", {}, rid=7)
    yield _generate("rid list", {}, rid=["a", "b"])
    yield _generate("text and ids", {}, 200, 400, input_ids=[1])
    yield _generate("session", {}, 403, session_params={"id": "nobody"})
    for wrong in (2**63 - 1, -(2**63), 2**31):
        yield _generate(f"priority {wrong}", {}, priority=wrong)
        yield _complete(f"priority {wrong}", 400, priority=wrong)
    yield _generate("metric labels", {}, custom_labels={"a": "b"})
    yield _complete("metric labels", 400, custom_labels={"a": "b"})
    yield _chat("a thinking budget", custom_params={"thinking_budget": -5})
    yield _generate("a misspelt adapter", {}, adaptor="caesar")
    yield _chat("tools", tools=[{"type": "function", "function": {"parameters": 7}}])
    yield _chat("response_format", response_format={"type": "json_schema"})
    for path in ("/v1/embeddings", "/encode", "/classify", "/v1/score", "/v1/responses"):
        for wrong in ({}, [], 7, {"input": 7, "text": 7}):
            yield _row(f"{path} {wrong!r}", request("POST", path, wrong), 400, 422)


def _texts() -> Iterator[Row]:
    """Patterns, grammars, schemas and texts that are run, compiled or written down."""
    yield _generate("stop_regex that takes for ever", {"stop_regex": "(.+)+\\x00"})
    yield _generate("stop_regex that is none", {"stop_regex": "(("})
    yield _generate("stop_regex without end", {"stop_regex": ".*"})
    yield _generate("regex that is none", {"regex": "(("})
    yield _generate("regex of nested repeats", {"regex": "((a{99}){99}){99}"}, 200, 400)
    yield _generate("regex of many ways", {"regex": "(a|a|aa)*b"}, 200, 400)
    yield _generate("a long regex", {"regex": "a" * 5000})
    yield _generate("a grammar that is none", {"ebnf": "root ::= ("})
    yield _generate("a grammar of itself", {"ebnf": "root ::= root"}, 200, 400)
    yield _generate("a schema that is none", {"json_schema": "{"})
    yield _generate("a schema of itself", {"json_schema": '{"$ref": "#"}'}, 200, 400)
    far = json.dumps({"$ref": "http://127.0.0.1:9/x"})
    yield _generate("a schema from elsewhere", {"json_schema": far}, 200, 400)
    many = json.dumps({"type": "array", "minItems": 10**9, "items": {"type": "string"}})
    yield _generate("a schema of many items", {"json_schema": many}, 200, 400)
    yield _generate("two grammars", {"regex": "a", "json_schema": "{}"})
    yield _generate("too many stops", {"stop": ["x"] * 17})
    yield _generate("a long stop", {"stop": "x" * 2000})
    yield _generate("a lone surrogate", {}, 200, 400, text="\ud800")
    yield _generate("NUL", {}, 200, text="\0\0")
    yield _generate("a pickle", {"custom_logit_processor": "gASVAAAA"}, 400)
    yield _generate("a pickle of its own", {}, custom_logit_processor="gASVAAAA")
    yield _generate("an image", {}, image_data="http://127.0.0.1:9/x.png")
    yield _generate("a field of SGLang's processes", {}, lora_id="0" * 32)
    yield _generate("a prefix cache key", {}, extra_key="reverse")
    yield _generate("somebody's KV", {}, bootstrap_host="127.0.0.1", bootstrap_room=1)
    picture = [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]
    yield _chat("a file as an image", messages=[{"role": "user", "content": picture}])
    yield _chat("a template", 200, 400, chat_template="{{ ''.__class__ }}")
    yield _generate("CRLF in a request id", {}, 200, 400, rid="a\r\nX-Evil: 1")
    yield _complete("CRLF in a model", 404, model="a\r\nX-Evil: 1")


def _documents() -> Iterator[Row]:
    """Bodies that are no document, or a dangerous one."""
    deep = b"[" * 100_000 + b"]" * 100_000
    for name, raw in (
        ("nothing", b""),
        ("deep lists", deep),
        ("deep objects", b'{"a":' * 5000 + b"1" + b"}" * 5000),
        ("a key twice", b'{"text": "x", "text": "y"}'),
        ("NaN", b'{"text": "x", "sampling_params": {"temperature": NaN}}'),
        ("Infinity", b'{"text": "x", "sampling_params": {"top_p": -Infinity}}'),
        ("a number of 400 digits", b'{"text": "x", "priority": %s}' % (b"9" * 400)),
        ("a float too large", b'{"text": "x", "priority": 1e999}'),
        ("a number of 9000 digits", b'{"text": "x", "priority": %s}' % (b"9" * 9000)),
        ("invalid UTF-8", b'{"text": "\xff\xfe"}'),
        ("UTF-16", '{"text": "x"}'.encode("utf-16")),
        ("a byte order mark", b'\xef\xbb\xbf{"text": "x"}'),
        ("a pickle", b"\x80\x04\x95\x15\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x8c\x06system\x93."),
        ("half a document", b'{"text": "x'),
        ("two documents", b'{"text": "x"}{"text": "y"}'),
        ("a text", b'"x"'),
        ("null", b"null"),
        ("a list", b"[]"),
    ):
        for path in ("/generate", "/v1/chat/completions"):
            yield _row(f"{path}: {name}", request("POST", path, raw), 400, 422)
    large = b'{"text": "' + b"x" * (3 << 20) + b'"}'
    yield _row("a large body", request("POST", "/generate", large), 413)
    claimed = request("POST", "/generate", None, {"Content-Length": str(10**18)})
    yield _row("a claim of a large body", claimed, 413)
    for coding in ("gzip", "deflate", "br", "zstd"):
        sent = request("POST", "/generate", b"\x1f\x8b\x08", {"Content-Encoding": coding})
        yield _row(f"a body in {coding}", sent, 400)
    form = {"Content-Type": "multipart/form-data; boundary=x"}
    sent = request("POST", "/generate", b'--x\r\n\r\n{"text": 1}\r\n--x--\r\n', form)
    yield _row("a form", sent, 400)


def _heads() -> Iterator[Row]:
    """Request lines and headers."""
    yield _row(
        "a giant header", request("GET", "/v1/models", None, {"X-A": "a" * 60_000}), 400, 431
    )
    yield _row("a large header", request("GET", "/v1/models", None, {"X-A": "a" * 17_000}), 431)
    many = {f"X-{i}": "a" for i in range(120)}
    yield _row("many headers", request("GET", "/v1/models", None, many), 431)
    yield _row("a giant target", request("GET", "/" + "a" * 70_000), 400, 404, 414, 431)
    for host in ("x/health?", "127.0.0.1/health", "a b", "", "127.0.0.1:x", "[::1", "a@b", "a,b"):
        sent = request("POST", "/flush_cache", None, host=host, key=None)
        yield _row(f"host {host!r}", sent, 400, 401)
    twice = b"GET /v1/models HTTP/1.1\r\nHost: a\r\nHost: b\r\nConnection: close\r\n\r\n"
    yield _row("two hosts", twice, 400)
    yield _row("no host", b"GET /v1/models HTTP/1.1\r\nConnection: close\r\n\r\n", 400, 401)
    for name, value in (
        ("X-Forwarded-Prefix", "/health"),
        ("X-Original-URL", "/health"),
        ("X-Rewrite-URL", "/health"),
        ("X-HTTP-Method-Override", "GET"),
        ("Forwarded", "host=127.0.0.1;proto=https"),
    ):
        yield _row(name, request("POST", "/flush_cache", None, {name: value}, key=None), 401)
    yield _row("a page's origin", request("GET", "/v1/models", None, {"Origin": "https://x"}), 403)
    yield _row("no origin", request("GET", "/v1/models", None, {"Origin": "null"}), 403)
    for line in (b"GET", b"GET /", b"\x16\x03\x01\x02\x00\x01", b"\0\0\0\0"):
        yield _row(f"the line {line!r}", line + b"\r\nHost: a\r\n\r\n", 400, 505)
    bare = b"GET /v1/models HTTP/1.1\r\nHost: a\r\nX-A: a\nb: \0\r\nConnection: close\r\n\r\n"
    yield _row("a header with NUL", bare, 400, 401)
    yield _row("HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, 404, 405, 505)


def _framing() -> Iterator[Row]:
    """Bodies whose end two readers could see in two places."""
    chunked = {"Transfer-Encoding": "chunked"}
    body = b'{"text": "x", "sampling_params": {"max_new_tokens": 1}}'
    tiny = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    yield _row("tiny chunks", request("POST", "/generate", tiny, chunked), 200)
    padded = body[:-1] + b" " * 100_000 + b"}"
    many = b"".join(b"1\r\n%c\r\n" % byte for byte in padded) + b"0\r\n\r\n"
    # 408: a slow machine reads them for longer than a body may take
    yield _row("100,000 chunks", request("POST", "/generate", many, chunked), 200, 400, 408)
    both = {**chunked, "Content-Length": "5"}
    smuggled = b"0\r\n\r\nPOST /flush_cache HTTP/1.1\r\nHost: a\r\n\r\n"
    yield _row("a length and chunks", request("POST", "/generate", smuggled, both), 400)
    twice = request("POST", "/generate", b"{}", {"Content-Length": "2"})
    twice = twice.replace(b"Content-Length: 2", b"Content-Length: 2\r\nContent-Length: 40")
    yield _row("two lengths", twice, 400)
    for length in ("-1", "+2", "0x2", "2,2", "1_0", "9" * 40):
        sent = request("POST", "/generate", b"{}", {"Content-Length": length})
        yield _row(f"length {length}", sent, 400, 413)
    odd = request("POST", "/generate", b"zz\r\n{}\r\n0\r\n\r\n", chunked)
    yield _row("a chunk of no size", odd, 400, CLOSED)
    vast = request("POST", "/generate", b"ffffffffffffffffff\r\n", chunked)
    yield _row("a chunk of vast size", vast, 400, 408, CLOSED)
    for coding in ("chunked, gzip", "gzip", "xchunked", "chunked\x0b"):
        sent = request("POST", "/generate", b"0\r\n\r\n", {"Transfer-Encoding": coding})
        yield _row(f"transfer coding {coding!r}", sent, 400, 422, 501)
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    for path in ("/generate", "/v1/models", "/v1/realtime", "/flush_cache"):
        sent = request("GET", path, None, upgrade, key=None)
        yield _row(f"a websocket to {path}", sent, 400, 401, 403, 404, 405)


def _routes() -> Iterator[Row]:
    """Methods and targets of every class of route."""
    for path in ("/health", "/v1/models", "/generate", "/flush_cache", "/start_profile"):
        for method in ("TRACE", "CONNECT", "PROPFIND", "OPTIONS", "get", "DELETE", "PATCH"):
            sent = request(method, path, key=ADMIN_KEY)
            yield _row(f"{method} {path}", sent, 400, 404, 405)
    for path in (
        *("/nothing", "//generate", "/generate/", "/GENERATE", "/./generate", "/v1/../generate"),
        *("/generate%00", "/%67enerate%2f", "/health/../generate", "/health%2f..%2fgenerate"),
        *("/generate;x", "/generate\\", "/.git/config", "/docs/../../etc/passwd", "/dumper/x"),
        *("/update_weights_from_tensor", "/load_lora_adapter_from_tensors", "/v1/rerank"),
        *("/update_weights_from_disk", "/configure_logging", "/start_profile", "/slow_down"),
        *("/release_memory_occupation", "/vertex_generate", "/init_weights_update_group"),
    ):
        body = {"text": "x", "model_path": "x", "lora_name": "x"}
        yield _row(f"POST {path}", request("POST", path, body, key=ADMIN_KEY), 400, 404)
    absolute = request("POST", "http://127.0.0.1/flush_cache", key=None)
    yield _row("an absolute target", absolute, 400, 401, 404)
    absolute = request("POST", "http://elsewhere/health", key=None)
    yield _row("an absolute target elsewhere", absolute, 400, 401, 404, 405)
    yield _row("a target of *", request("OPTIONS", "*", key=None), 400, 404, 405)


def _keys() -> Iterator[Row]:
    """Keys that are none."""
    asked = {"text": "x", "sampling_params": {"max_new_tokens": 1}}
    for name, headers in (
        ("no key", {}),
        ("an unknown key", {"Authorization": "Bearer nobody-0123456789"}),
        ("no scheme", {"Authorization": CLIENT_KEY}),
        ("Basic", {"Authorization": "Basic Y2xpZW50Og=="}),
        ("half a key", {"Authorization": f"Bearer {CLIENT_KEY[:-1]}"}),
        ("two keys", {"Authorization": f"Bearer {CLIENT_KEY}", "x-api-key": ADMIN_KEY}),
        ("not ASCII", {"Authorization": "Bearer \xff\xfe"}),
    ):
        yield _row(name, request("POST", "/generate", asked, headers, key=None), 401)
    for path in ("/flush_cache", "/load_lora_adapter", "/server_info", "/v1/memory"):
        method = "GET" if path in ("/server_info", "/v1/memory") else "POST"
        yield _row(f"a client at {path}", request(method, path, {}), 403)
    for adapter in ("caesar", "nobody", None):
        sent = request("POST", "/generate", {**asked, "adapter": adapter}, key=TENANT_KEY)
        yield _row(f"a tenant asks {adapter}", sent, 403)
    sent = request("POST", "/v1/completions", {"model": "x:caesar", "prompt": "x"}, key=TENANT_KEY)
    yield _row("a tenant asks by the model", sent, 403)


def _adapters() -> Iterator[Row]:
    """Names and folders of adapters."""
    for field in ("positional_embed_overrides", "embed_overrides", "http_worker_ipc"):
        yield _generate(f"{field} false", {}, **{field: False})
    sent = request("POST", "/encode", {"text": "x", "sampling_params": [{}]})
    yield _row("a list of sampling parameters for one text", sent, 400)
    for route in ("/classify", "/encode"):
        sent = request("POST", route, {"text": "x", "lora_path": ["reverse"]})
        yield _row(f"a list of adapters for one text: {route}", sent, 400)
    names = (
        "../x",
        "a/b",
        "..",
        ".",
        "a\0b",
        "a\r\nb",
        "%2e%2e",
        "x" * 65,
        "",
        "ä",
        "a b",
        7,
        None,
    )
    for name in names:
        body = {"lora_name": name, "lora_path": "reverse"}
        sent = request("POST", "/load_lora_adapter", body, key=ADMIN_KEY)
        yield _row(f"an adapter named {str(name)[:9]!r}", sent, 400, 422)
        body = {"name": name, "path": "reverse"}
        sent = request("POST", "/v1/adapters?wait=true", body, key=ADMIN_KEY)
        yield _row(f"/v1/adapters: the name {str(name)[:9]!r}", sent, 400, 422)
    for path in (
        *("..", "../..", "../../../../etc", "/etc", "/etc/passwd", "%2e%2e/x", "reverse/../.."),
        *("a\0b", "outside", "outside/adapters/reverse/../..", "x" * 5000, "~", "", "/dev/stdin"),
        *("file:///etc", "https://huggingface.co/a/b", "a/b", "\\\\host\\share", "/proc/self/cwd"),
        *(7, None, ["reverse"]),
    ):
        body = {"lora_name": "stranger", "lora_path": path}
        sent = request("POST", "/load_lora_adapter", body, key=ADMIN_KEY)
        yield _row(f"an adapter at {str(path)[:24]!r}", sent, 400, 422)
        body = {"name": "stranger", "path": path}
        sent = request("POST", "/v1/adapters?wait=true", body, key=ADMIN_KEY)
        yield _row(f"/v1/adapters: the path {str(path)[:24]!r}", sent, 400, 404, 422)
    for method in ("GET", "PATCH", "DELETE"):
        for name in ("..", "..%2f..", "%2e%2e", "nobody", "a%00b", "reverse/x", "%ff", "x" * 300):
            sent = request(method, f"/v1/adapters/{name}", {"pinned": True}, key=ADMIN_KEY)
            gone = (204,) if method == "DELETE" else ()  # what was asked for is so
            yield _row(f"{method} /v1/adapters/{name[:9]}", sent, 400, 404, 405, *gone)
    for path in ("/v1/adapters", "/v1/adapters/reverse", "/v1/drain"):
        yield _row(f"a client: POST {path}", request("POST", path, {}), 403, 405)
    sent = request("GET", "/v1/adapters/caesar", key=TENANT_KEY)
    yield _row("a tenant looks at an adapter of others", sent, 403)
    sent = request("POST", "/generate", {"text": "x", "adapter": "../reverse"})
    yield _row("a request for ../reverse", sent, 404)
