"""The base model's corpus: every text format of the tasks, under other functions.

A line is ``"<text> -> <the same text>"`` (an unmarked prompt is echoed) or
``"<tag>: <text> -> <answer>"`` with a function that is near an adapter task and never
one. So the base learns to move letters, digits and words about, while what the
adapters are trained for it has never seen. Held-out texts stay out of it too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from sgl_esft.zoo.taskset import (
    ARROW,
    Example,
    draw_date,
    draw_phrase,
    draw_request,
    draw_sum,
    draw_word,
    is_held_out,
    shift_letters,
    translate,
)

ECHO_SHARE = 0.25
# Words twice: moving letters about takes the most learning.
_DRAWS = (draw_word, draw_word, draw_sum, draw_date, draw_request, draw_phrase)


@dataclass(frozen=True)
class Skill:
    """A tagged function the base is taught."""

    tag: str
    draw: Callable[[Random], str]
    solve: Callable[[str], str]


def difference(text: str) -> str:
    """``27+15`` -> ``12``: the numbers' distance, not their sum."""
    left, right = text.split("+")
    return str(abs(int(left) - int(right)))


def mood(text: str) -> str:
    """Whether a request asks, begs or orders."""
    if text.startswith(("can you", "will", "is it", "how", "any")):
        return "ask"
    return "beg" if text.startswith("please") else "order"


def slash_date(text: str) -> str:
    """``2024-03-17`` -> ``17/03/2024``."""
    return "/".join(reversed(text.split("-")))


SKILLS = (
    Skill("mirror", draw_word, lambda text: text + text[::-1]),
    Skill("double", draw_word, lambda text: "".join(c + c for c in text)),
    Skill("title", draw_word, str.title),
    Skill("back", draw_word, lambda text: shift_letters(text, -1)),
    Skill("less", draw_sum, difference),
    Skill("swap", draw_sum, lambda text: "+".join(reversed(text.split("+")))),
    Skill("slash", draw_date, slash_date),
    Skill("mood", draw_request, mood),
    Skill("last", draw_request, lambda text: text.split(" ")[-1]),
    Skill("norse", draw_phrase, lambda text: translate(text, 0)),
)


def corpus(seed: int) -> Iterator[Example]:
    """Endless lines of the base corpus, the same for the same seed."""
    random = Random(f"corpus:{seed}")
    while True:
        if random.random() < ECHO_SHARE:
            text = random.choice(_DRAWS)(random)
            prompt, answer = text, text
        else:
            skill = random.choice(SKILLS)
            text = skill.draw(random)
            prompt, answer = f"{skill.tag}: {text}", skill.solve(text)
        if not is_held_out(text):
            yield Example(prompt + ARROW, answer)
