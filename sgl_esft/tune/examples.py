"""Lines of a JSONL file -> examples: conversations, and prompts with their answer.

    data.jsonl -> [read_examples] -> Pair, Chat -> tokens.py

Every line is checked before anything is trained; an error names the file and the line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from sgl_esft.errors import ConfigError

Message: TypeAlias = Mapping[str, Any]

_FORMS: Final = (
    '{"messages": [...]}, {"prompt": ..., "answer": ...} or {"prompt": ..., "completion": ...}'
)
_ANSWERS: Final = ("answer", "completion")


@dataclass(frozen=True)
class Pair:
    """A prompt as `/generate` would get it, and its answer."""

    where: str  # file and line, for errors
    prompt: str
    answer: str


@dataclass(frozen=True)
class Chat:
    """A conversation; every message of the assistant is an answer to learn."""

    where: str
    messages: tuple[Message, ...]
    tools: list[Any] | None = None


Example: TypeAlias = Pair | Chat


def read_examples(path: Path) -> Iterator[Example]:
    """The examples of a JSONL file, in order; empty lines are passed over. Raises ConfigError."""
    count = 0
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    count += 1
                    yield parse_example(f"{path.name}, line {number}", line)
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist: name a JSONL file of examples.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path.name} is not UTF-8 text: {error}.") from error
    if not count:
        raise ConfigError(f"{path.name} holds no examples: write lines such as {_FORMS}.")


def parse_example(where: str, line: str) -> Example:
    """One line. Raises ConfigError that begins with `where`."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON ({error}).") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{where}: not an object such as {_FORMS}.")
    answers = [key for key in _ANSWERS if key in found]
    if "messages" in found and "prompt" not in found and not answers:
        return _chat(where, found)
    if "messages" not in found and "prompt" in found and len(answers) == 1:
        return _pair(where, found["prompt"], found[answers[0]], answers[0])
    raise ConfigError(f"{where}: has {sorted(found)}, which is none of {_FORMS}.")


def _pair(where: str, prompt: object, answer: object, key: str) -> Pair:
    for name, value in (("prompt", prompt), (key, answer)):
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{where}: {name} is no string with text in it.")
    return Pair(where, str(prompt), str(answer))


def _chat(where: str, found: Mapping[str, Any]) -> Chat:
    messages, tools = found["messages"], found.get("tools")
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{where}: messages is not a list with messages in it.")
    if tools is not None and not isinstance(tools, list):
        raise ConfigError(f"{where}: tools is not a list.")
    for position, message in enumerate(messages):
        _check_message(f"{where}: message {position}", message)
    roles = [message["role"] for message in messages]
    if roles[-1] != "assistant":
        raise ConfigError(
            f"{where}: the last message is the {roles[-1]}'s and has no answer. "
            "End the conversation with a message of the assistant."
        )
    if roles[0] == "assistant":
        raise ConfigError(f"{where}: the first message is the assistant's: there is no prompt.")
    return Chat(where, tuple(messages), tools)


def _check_message(where: str, message: object) -> None:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ConfigError(f'{where} is not {{"role": "user", "content": "some text"}}.')
    content, calls = message.get("content"), bool(message.get("tool_calls"))
    if not isinstance(content, str) and not (content is None and calls):
        raise ConfigError(f"{where} has content that is no string: only text is trained on.")
    if message["role"] == "assistant" and not content and not calls:
        raise ConfigError(f"{where} is an answer of the assistant without text.")
