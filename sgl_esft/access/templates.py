"""A chat template is the server's; a request gives values to it.

    chat_template_kwargs --> [check_values] --> transformers' apply_chat_template

The values are passed on as arguments, and one of those is another template: a program, which runs
in the process that serves HTTP and need not end. SGLang looks for it on some of its routes only.
"""

from __future__ import annotations

from typing import Final

from sgl_esft.errors import BadBodyError

FIELD: Final = "chat_template_kwargs"
_TEMPLATE: Final = "chat_template"
# The other arguments that are no values of a template.
_INTERNAL: Final = frozenset(
    {
        "add_generation_prompt",
        "conversation",
        "max_length",
        "padding",
        "processor_kwargs",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


def check_values(values: object, *, takes_templates: bool) -> None:
    """Raises BadBodyError for arguments that are no values of the template."""
    if not isinstance(values, dict):
        return  # the route refuses it
    if not values.keys().isdisjoint(_INTERNAL):
        raise BadBodyError(f"{FIELD} holds values of the template, no other arguments")
    if _TEMPLATE in values and not takes_templates:
        raise BadBodyError(
            f"{_TEMPLATE} is code: it needs a server with --trust-request-chat-template"
        )
