"""Examples -> token ids and labels: what the server would be asked, and what it should answer.

    Pair, Chat --[encode]--> TokenRow (ids, labels) --[rows_to_learn, collate]--> padded batch

A prompt becomes tokens as the server makes them, apart from its answer: a token that spans both
would never be a prompt's. Labels are the answers' tokens; -100 elsewhere, which no loss
counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from sgl_esft.errors import ConfigError
from sgl_esft.tune.examples import Chat, Example, Pair

Report = Callable[[str], None]

IGNORED: Final = -100


@dataclass
class TokenRow:
    """One sequence: `labels` are its ids where an answer's token is to be learned, else -100."""

    ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)

    def add(self, ids: Sequence[int], *, learned: bool) -> None:
        self.ids += ids
        self.labels += ids if learned else [IGNORED] * len(ids)

    def cut(self, length: int) -> TokenRow:
        return TokenRow(self.ids[:length], self.labels[:length])

    @property
    def is_learned(self) -> bool:
        """Whether a label is left. The first token has nothing before it to be told from."""
        return any(label != IGNORED for label in self.labels[1:])


class Encoder:
    """`encode` with one base's tokenizer; `ends` are the ids that end an answer."""

    def __init__(self, tokenizer: Any, ends: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._ends = ends

    def encode(self, example: Example) -> Iterator[TokenRow]:
        """One row; more only where a template renders the history otherwise than the answers."""
        if isinstance(example, Pair):
            row = TokenRow()
            row.add(self._tokenizer(example.prompt).input_ids, learned=False)
            row.add(self._answer(example.answer), learned=True)
            yield row
        else:
            yield from self._encode_chat(example)

    def _encode_chat(self, chat: Chat) -> Iterator[TokenRow]:
        row, done = TokenRow(), ""
        for position, message in enumerate(chat.messages):
            if message["role"] != "assistant":
                continue
            prompt = self._render(chat, position, prompt=True)
            whole = self._render(chat, position + 1, prompt=False)
            if not whole.startswith(prompt) or whole == prompt:
                raise ConfigError(
                    f"{chat.where}: the base's chat template does not write message {position} "
                    "after its prompt; give the example as prompt and answer."
                )
            if done and not prompt.startswith(done):
                # Such as Qwen3's, which drops earlier thoughts: this prompt is a row of its own.
                yield row
                row, done = TokenRow(), ""
            row.add(self._plain(prompt[len(done) :]), learned=False)
            row.add(self._answer(whole[len(prompt) :]), learned=True)
            done = whole
        yield row

    def _render(self, chat: Chat, stop: int, *, prompt: bool) -> str:
        if self._tokenizer.chat_template is None:
            raise ConfigError(
                f"{chat.where}: the base has no chat template. Give prompts and answers instead."
            )
        try:
            text = self._tokenizer.apply_chat_template(
                list(chat.messages[:stop]),
                tools=chat.tools,
                tokenize=False,
                add_generation_prompt=prompt,
            )
        except Exception as error:  # whatever the template raises, of any class
            raise ConfigError(
                f"{chat.where}: the base's chat template refuses it: {error}"
            ) from error
        return str(text)

    def _answer(self, text: str) -> list[int]:
        """With the id that ends it, unless the template writes one."""
        ids = self._plain(text)
        return ids if self._ends.intersection(ids) else [*ids, self._tokenizer.eos_token_id]

    def _plain(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False).input_ids) if text else []


def rows_to_learn(
    encoder: Encoder, examples: Iterable[Example], max_length: int, report: Report
) -> list[TokenRow]:
    """All rows, cut to `max_length` tokens; those without an answer after that are left out.

    Raises ConfigError if none is left.
    """
    whole = [row for example in examples for row in encoder.encode(example)]
    rows = [short for row in whole if (short := row.cut(max_length)).is_learned]
    long = sum(len(row.ids) > max_length for row in whole)
    if not rows:
        raise ConfigError(
            f"no example has an answer within --max-length {max_length} tokens: give a larger one."
        )
    learned = sum(label >= 0 for row in rows for label in row.labels)
    report(f"{len(rows):,} rows, {sum(len(r.ids) for r in rows):,} tokens, {learned:,} of answers")
    if long:
        report(
            f"{long:,} rows were cut to {max_length} tokens, {len(whole) - len(rows):,} left out"
        )
    return rows


def collate(rows: Sequence[TokenRow], pad: int) -> dict[str, Tensor]:
    """`input_ids`, `labels` and `attention_mask`, each [rows, length], padded on the right."""
    length = max(len(row.ids) for row in rows)
    blank = (len(rows), length)
    ids = torch.full(blank, pad)
    labels = torch.full(blank, IGNORED)
    mask = torch.zeros(blank, dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row.ids)] = torch.tensor(row.ids)
        labels[i, : len(row.ids)] = torch.tensor(row.labels)
        mask[i, : len(row.ids)] = 1
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}
