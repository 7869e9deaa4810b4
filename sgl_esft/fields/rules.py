"""What a server takes of clients' bodies: by its flags, and by the model that it serves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

DEFAULT_MAX_BODY_BYTES: Final = 2 << 20


@dataclass(frozen=True)
class ModelBounds:
    """What depends on the model that is served."""

    vocab_size: int
    context_length: int


@dataclass(frozen=True)
class BodyRules:
    """What this server takes."""

    max_bytes: int = DEFAULT_MAX_BODY_BYTES
    takes_logit_processors: bool = False  # they are unpickled code
    takes_templates: bool = False  # they are programs, which need not end
    takes_stop_regex: bool = False  # some take for ever to search for, in every client's scheduler
    takes_media: bool = False  # SGLang would fetch it from wherever the client says
