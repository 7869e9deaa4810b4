"""docs/api.md from the code: `python -m scripts.api_docs`.

    api_app.openapi(), the command lines' parsers, the error classes -> [page] -> docs/api.md

A test holds the page to the code.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scripts.api_app import openapi
from sgl_elastic import errors as elastic_errors
from sgl_elastic.options import add_flags
from sgl_esft import errors
from sgl_esft.http.classes import RouteTable
from sgl_esft.tools import cli
from sgl_esft_launch import flags

PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.md"

_HEAD = """\
# API reference

Made from the code by `python -m scripts.api_docs`; do not edit. What the fields of generation
requests mean: [HTTP](http.md). A running server shows the same, and SGLang's own routes, at `/docs`
and `/openapi.json`.
"""
_ROUTES = """\
## Routes

Of this package and of the elastic runtime. The class says whose key it takes ([access](access.md)):
*public* none, *client* any, *admin* the admin key, *off* needs `--enable-route` too.
"""
_COMMANDS = """\
## Commands

`sgl-esft` needs neither SGLang nor a GPU.
"""
_LAUNCHER = """\
## Launcher

SGLang's own flags are taken too: `python -m sglang.launch_server --help`.
"""
_ERRORS = """\
## Errors

The `type` of an error's answer, and what a command prints, is one of these. The status is that of
the answer, where it becomes one.
"""
_CLASSES = RouteTable()
_WIDTH = 100
_MAX_EXAMPLE = 1200  # characters


def page() -> str:
    """The whole page."""
    os.environ["COLUMNS"] = str(_WIDTH)
    document = openapi()
    parts = [_HEAD, _ROUTES, *_route_table(document), ""]
    parts += [line for each in _operations(document) for line in _operation(document, *each)]
    parts += [_COMMANDS, *_commands(), _LAUNCHER, *_text(_launcher())]
    parts += [
        _ERRORS,
        *_error_table(errors.EsftError),
        "",
        *_error_table(elastic_errors.ElasticError),
    ]
    return "\n".join(parts).rstrip() + "\n"


def _operations(document: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for path, methods in sorted(document["paths"].items()):
        for method, operation in sorted(methods.items()):
            yield method.upper(), path, operation


def _route_table(document: Mapping[str, Any]) -> list[str]:
    lines = ["| route | class | |", "|---|---|---|"]
    for method, path, operation in _operations(document):
        kind = _CLASSES.find(method, path).value  # raises for a route without a class
        lines.append(f"| `{method} {path}` | {kind} | {operation['summary']} |")
    return lines


def _operation(
    document: Mapping[str, Any], method: str, path: str, operation: Mapping[str, Any]
) -> list[str]:
    lines = [f"### {method} {path}\n", _sentence(operation["summary"])]
    if operation.get("description"):
        lines += ["", operation["description"].strip()]
    lines += _parameters(operation)
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    for schema in _alternatives(document, body.get("schema", {})):
        lines += _fields(document, schema)
    return [*lines, *_responses(operation), ""]


def _parameters(operation: Mapping[str, Any]) -> list[str]:
    rows = [
        f"| `{each['name']}` | {each['in']} | {_type(each['schema'])} | "
        f"{_needed(each['required'], each['schema'])} | {_cell(each.get('description', ''))} |"
        for each in operation.get("parameters", [])
    ]
    return (
        ["", "| parameter | in | type | default | |", "|---|---|---|---|---|", *rows]
        if rows
        else []
    )


def _alternatives(document: Mapping[str, Any], schema: Mapping[str, Any]) -> list[dict[str, Any]]:
    if not schema:
        return []
    found = [_resolved(document, each) for each in schema.get("anyOf", [schema])]
    return [each for each in found if each.get("properties")]


def _resolved(document: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    if "$ref" not in schema:
        return dict(schema)
    found: dict[str, Any] = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return found


def _fields(document: Mapping[str, Any], schema: Mapping[str, Any]) -> list[str]:
    needed = schema.get("required", [])
    rows = [
        f"| `{name}` | {_type(field)} | {_needed(name in needed, field)} | "
        f"{_cell(field.get('description', ''))} |"
        for name, field in schema["properties"].items()
    ]
    title = _cell(_resolved(document, schema).get("title", ""))
    return ["", f"| field of {title} | type | default | |", "|---|---|---|---|", *rows]


def _type(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_type(each) for each in schema["anyOf"])
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    bounds = [
        f"{word} {schema[key]:g}"
        for key, word in (("minimum", "from"), ("exclusiveMinimum", "above"), ("maximum", "to"))
        if key in schema
    ]
    return " ".join([str(schema.get("type", "any")), *bounds])


def _needed(required: bool, schema: Mapping[str, Any]) -> str:
    return "required" if required else f"`{json.dumps(schema.get('default'))}`"


def _responses(operation: Mapping[str, Any]) -> list[str]:
    lines = ["", "| status | |", "|---|---|"]
    example = None
    for status, response in sorted(operation["responses"].items()):
        if status == "422":  # FastAPI's own; ours is a 400
            continue
        lines.append(f"| {status} | {_cell(response['description'])} |")
        shown = response.get("content", {}).get("application/json", {}).get("example")
        example = example or (shown if status.startswith("2") else None)
    if example is not None:
        text = json.dumps(example, indent=1)
        if len(text) <= _MAX_EXAMPLE:
            lines += ["", "```json", text, "```"]
    return lines


def _commands() -> list[str]:
    lines = _text(cli.build_parser().format_help())
    for name, parser in _subparsers(cli.build_parser()):
        lines += [f"### sgl-esft {name}\n", *_text(parser.format_help())]
    return lines


def _subparsers(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def _launcher() -> str:
    parser = flags.build_parser()
    add_flags(parser)
    return parser.format_help()


def _text(text: str) -> list[str]:
    return ["```text", text.strip(), "```", ""]


def _error_table(root: type[Exception]) -> list[str]:
    rows = [_error_row(each, depth) for each, depth in _tree(root, 0)]
    return ["| type | status | |", "|---|---|---|", *rows]


def _tree(root: type[Exception], depth: int) -> Iterator[tuple[type[Exception], int]]:
    yield root, depth
    for each in root.__subclasses__():
        if each.__module__ == root.__module__:
            yield from _tree(each, depth + 1)


def _error_row(error: type[Exception], depth: int) -> str:
    status = getattr(error, "http_status", "")
    first = (error.__doc__ or "").strip().splitlines()[0]
    return f"| {'&ensp;' * depth * 2}`{error.__name__}` | {status} | {_cell(first)} |"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _sentence(text: str) -> str:
    return text if text.endswith(".") else f"{text}."


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
