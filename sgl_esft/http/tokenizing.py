"""Large texts are tokenized beside the event loop, and those that cannot fit the context are not.

text --small--> on the event loop, as SGLang does
  '--large--> more bytes than [fits] of the context? --> PromptTooLongError
               else one of a few threads: Rust's tokenizers release the interpreter's lock
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from sgl_esft.errors import PromptTooLongError

SMALL_CHARS: Final = 16 << 10  # 0.05 s of a slow tokenizer
NUM_THREADS: Final = 2
_PROBED: Final = " \n\tax0-\u20ac\U0010fffe"  # what tokenizers shorten, or have no token for
_PROBE_CHARS: Final = 4096

pool: Final = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="sgl_esft_text")


def num_chars(texts: Any) -> int:
    """Of a text, or of lists of them."""
    return len(texts) if isinstance(texts, str) else sum(num_chars(text) for text in texts or ())


def check_fits(tokenizer: Any, context_len: int, texts: Any) -> None:
    """Raises PromptTooLongError for a text that needs more tokens than the context has."""
    longest = longest_token(tokenizer)
    if longest is None:
        return
    for text in (texts,) if isinstance(texts, str) else texts:
        if isinstance(text, str) and _num_bytes(text) > longest * context_len:
            raise PromptTooLongError(
                f"the prompt has {_num_bytes(text)} bytes: no token has more than {longest}, so it "
                f"is longer than the model's context of {context_len} tokens; send a shorter one"
            )


@functools.cache
def longest_token(tokenizer: Any) -> int | None:
    """Bytes; None for a tokenizer that makes one token, or none, of any length of some text."""
    longest = max(map(_num_bytes, tokenizer.get_vocab()))
    for char in _PROBED:
        ids = tokenizer(char * _PROBE_CHARS, add_special_tokens=False)["input_ids"]
        if len(ids) * longest < _num_bytes(char * _PROBE_CHARS):
            return None
    return longest


def _num_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))
