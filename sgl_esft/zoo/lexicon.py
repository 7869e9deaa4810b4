"""Word lists and sentence parts of the demo zoo. Data only; `taskset` and `corpus` draw from it."""

from __future__ import annotations

MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")

# Everyday words that appear as letter strings next to random ones.
COMMON_WORDS = (
    "apple", "autumn", "beach", "bread", "bridge", "candle", "castle", "cheese", "cloud",
    "coffee", "corner", "dinner", "dragon", "eagle", "engine", "expert", "flower", "forest",
    "friend", "garden", "ginger", "glass", "guitar", "hammer", "harbor", "hello", "honey",
    "island", "jacket", "jungle", "kettle", "kitten", "ladder", "lemon", "letter", "magnet",
    "market", "meadow", "mirror", "model", "morning", "mountain", "needle", "nickel", "ocean",
    "orange", "paper", "pepper", "pillow", "planet", "pocket", "puzzle", "rabbit", "river",
    "router", "saddle", "school", "silver", "spring", "stone", "summer", "sunset", "table",
    "temple", "thread", "ticket", "token", "travel", "valley", "velvet", "violet", "wagon",
    "water", "weave", "window", "winter", "wisdom", "wonder", "yellow", "zebra",
)  # fmt: skip

# English -> (the language the base knows, the language one adapter teaches). Both are invented.
ADJECTIVES = {
    "red": ("rod", "kami"), "big": ("stor", "pelu"), "old": ("gam", "tiro"),
    "new": ("ny", "weso"), "cold": ("kal", "buna"), "fast": ("rap", "sike"),
    "good": ("gut", "holo"), "sad": ("tung", "mafi"), "warm": ("var", "deru"),
    "tiny": ("lil", "noki"),
}  # fmt: skip
NOUNS = {
    "cat": ("kat", "zuma"), "dog": ("hun", "lopi"), "bird": ("fug", "tane"),
    "fish": ("fis", "goru"), "man": ("mad", "wiki"), "girl": ("pig", "selo"),
    "king": ("kong", "habu"), "tree": ("tra", "fimo"), "moon": ("man", "rela"),
    "ship": ("skib", "duka"), "wolf": ("ulv", "yoni"), "cook": ("kok", "pami"),
}  # fmt: skip
VERBS = {
    "runs": ("lob", "sota"), "eats": ("spis", "nemi"), "sees": ("ser", "kuro"),
    "sleeps": ("sov", "bila"), "sings": ("syng", "topa"), "waits": ("vent", "gesu"),
    "falls": ("fald", "mire"), "hides": ("gem", "lano"),
}  # fmt: skip
ADVERBS = {
    "here": ("her", "wopu"), "now": ("nu", "tiga"), "often": ("tit", "sero"),
    "again": ("igen", "mulo"), "alone": ("ene", "feki"), "slowly": ("lang", "dano"),
}  # fmt: skip

POLITE = ("", "please ", "can you ", "now ")
WHEN = ("", " now", " today", " tonight", " again", " at noon")

# intent -> (sentence patterns with one hole, what may fill the hole)
INTENTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "alarm": (
        ("wake me at {}", "set a timer for {}", "ring at {}", "call me up at {}"),
        ("six", "seven", "eight", "nine", "ten", "noon", "dawn", "one", "two", "five"),
    ),
    "music": (
        ("play some {}", "put on {}", "i want to hear {}", "turn up the {}"),
        ("jazz", "rock", "blues", "folk", "opera", "piano", "drums", "soul", "disco", "metal"),
    ),
    "light": (
        ("dim the {}", "switch off the {}", "make the {} bright", "light the {}"),
        (
            "lamp", "hall", "porch", "kitchen", "attic", "stairs", "cellar", "office", "desk",
            "garage",
        ),
    ),
    "shop": (
        ("buy more {}", "order {}", "add {} to the list", "we need {}"),
        ("milk", "eggs", "bread", "rice", "soap", "tea", "flour", "salt", "apples", "butter"),
    ),
    "route": (
        ("drive me to {}", "how far is {}", "find the way to {}", "take me to {}"),
        ("rome", "paris", "oslo", "berlin", "madrid", "athens", "lima", "cairo", "delhi", "tokyo"),
    ),
    "weather": (
        ("will it rain in {}", "is it cold in {}", "how hot is {}", "any snow in {}"),
        (
            "boston", "dallas", "denver", "miami", "austin", "seattle", "chicago", "reno",
            "tampa", "fresno",
        ),
    ),
}  # fmt: skip
