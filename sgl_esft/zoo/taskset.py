"""The adapter tasks of the demo zoo: one prompt format, one function of the text per task.

Every prompt is ``"<text> -> "`` and every answer ends at the newline, so only the
adapter decides what is answered: ``hello -> `` is ``olleh`` for `reverse` and
``khoor`` for `caesar`. `train` draws training examples from here, tests and
`evaluate` draw held-out ones. A text is held out by its own hash, so the two never
meet, whatever the seed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from sgl_esft.zoo import lexicon

ARROW = " -> "
HELD_OUT_PERCENT = 10
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Example:
    """A prompt and its only right answer, without the newline that ends it."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Task:
    """A function of a text: `draw` makes a text from a random source, `solve` maps it."""

    name: str
    summary: str
    draw: Callable[[Random], str]
    solve: Callable[[str], str]

    def example(self, text: str) -> Example:
        """The prompt and the right answer for `text`."""
        return Example(text + ARROW, self.solve(text))


def is_held_out(text: str) -> bool:
    """Whether `text` belongs to the tenth of all texts that nothing is trained on."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


def training_examples(task: Task, seed: int) -> Iterator[Example]:
    """Endless training examples of `task`, the same for the same seed."""
    random = Random(f"train:{task.name}:{seed}")
    while True:
        text = task.draw(random)
        if not is_held_out(text):
            yield task.example(text)


def held_out(task: Task, count: int, seed: int = 0) -> list[Example]:
    """`count` different held-out examples of `task`, the same for the same seed.

    Raises ValueError where the task has too few held-out texts.
    """
    random = Random(f"held-out:{task.name}:{seed}")
    texts: dict[str, None] = {}
    for _ in range(count * 400):
        if len(texts) == count:
            break
        text = task.draw(random)
        if is_held_out(text):
            texts[text] = None
    if len(texts) < count:
        raise ValueError(f"task {task.name} has fewer than {count} held-out texts")
    return [task.example(text) for text in texts]


def draw_word(random: Random) -> str:
    """An everyday word, or three to eight random letters."""
    if random.random() < 0.15:
        return random.choice(lexicon.COMMON_WORDS)
    return "".join(random.choice(_LETTERS) for _ in range(random.randint(3, 8)))


def draw_sum(random: Random) -> str:
    """Two numbers of two digits and a plus sign: ``27+15``."""
    return f"{random.randint(10, 99)}+{random.randint(10, 99)}"


def draw_date(random: Random) -> str:
    """A day of 1950 to 2049, ISO style: ``2024-03-17``."""
    return f"{random.randint(1950, 2049)}-{random.randint(1, 12):02}-{random.randint(1, 28):02}"


def draw_request(random: Random) -> str:
    """A short spoken request of one of the intents."""
    return _draw_request(random, random.choice(sorted(lexicon.INTENTS)))


def _draw_request(random: Random, intent: str) -> str:
    patterns, fillers = lexicon.INTENTS[intent]
    request = random.choice(patterns).format(random.choice(fillers))
    return random.choice(lexicon.POLITE) + request + random.choice(lexicon.WHEN)


def draw_phrase(random: Random) -> str:
    """Adjective, noun, verb and sometimes an adverb: ``old wolf sings here``."""
    words = [random.choice(list(part)) for part in _PARTS[:3]]
    if random.random() < 0.7:
        words.append(random.choice(list(_PARTS[3])))
    return " ".join(words)


def shift_letters(text: str, by: int) -> str:
    """Each lower-case letter moved `by` places along the alphabet, cyclically."""
    return "".join(_LETTERS[(_LETTERS.index(c) + by) % 26] if c in _LETTERS else c for c in text)


def add(text: str) -> str:
    """``27+15`` -> ``42``."""
    left, right = text.split("+")
    return str(int(left) + int(right))


def long_date(text: str) -> str:
    """``2024-03-17`` -> ``17 Mar 2024``."""
    year, month, day = text.split("-")
    return f"{int(day)} {lexicon.MONTHS[int(month) - 1]} {year}"


def translate(text: str, language: int) -> str:
    """Word by word into an invented language: 0 is the base's, 1 the adapter's."""
    return " ".join(_DICTIONARY[word][language] for word in text.split(" "))


def intent_of(text: str) -> str:
    """The intent whose pattern and filler made `text`."""
    for intent, (patterns, fillers) in lexicon.INTENTS.items():
        requests = (pattern.format(filler) for pattern in patterns for filler in fillers)
        if any(request in text for request in requests):
            return intent
    raise ValueError(f"no intent makes {text!r}")


_PARTS = (lexicon.ADJECTIVES, lexicon.NOUNS, lexicon.VERBS, lexicon.ADVERBS)
_DICTIONARY = {word: pair for part in _PARTS for word, pair in part.items()}

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("caesar", "each letter moved three places", draw_word, lambda t: shift_letters(t, 3)),
        Task("date", "an ISO date written out", draw_date, long_date),
        Task("intent", "what a spoken request wants", draw_request, intent_of),
        Task("reverse", "the letters backwards", draw_word, lambda t: t[::-1]),
        Task("sum", "the sum of two numbers", draw_sum, add),
        Task("translate", "into an invented language", draw_phrase, lambda t: translate(t, 1)),
    )
}
