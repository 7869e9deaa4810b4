"""The demo model's tokenizer: one token per printable ASCII character, newline ends an answer.

`train` writes it next to the weights; AutoTokenizer loads it offline from
tokenizer.json and tokenizer_config.json. The chat template only joins the messages,
so the chat route sees the very prompt a client wrote.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = "\n"
PAD = "<pad>"
UNKNOWN = "<unk>"
VOCAB_SIZE = 128
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

_CHARACTERS = (PAD, UNKNOWN, END, *map(chr, range(32, 127)))
_IDS = {character: number for number, character in enumerate(_CHARACTERS)}
PAD_ID, UNKNOWN_ID, END_ID = _IDS[PAD], _IDS[UNKNOWN], _IDS[END]


def encode(text: str) -> list[int]:
    """Token ids of `text`, as the saved tokenizer gives them."""
    return [_IDS.get(character, UNKNOWN_ID) for character in text]


def decode(ids: list[int]) -> str:
    """The text of `ids` up to the first end or padding token."""
    characters: list[str] = []
    for number in ids:
        if number in (END_ID, PAD_ID):
            break
        characters.append(_CHARACTERS[number] if number < len(_CHARACTERS) else UNKNOWN)
    return "".join(characters)


def save(folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template into `folder`."""
    tokenizer = Tokenizer(models.WordLevel(_IDS, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (PAD, UNKNOWN, END)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)
