"""Bodies and answers of the adapter routes: strict, bounded, with examples for the OpenAPI page.

JSON --> [LoadBody | ChangeBody | VllmLoadBody | ...] --> api.py
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_PATH_LENGTH: Final = 4096

# What is legal in a name is said by validate_adapter_name, whose error names the rule.
Name: TypeAlias = Annotated[
    str, Field(max_length=256, description="1 to 64 of the characters A-Z a-z 0-9 . _ -")
]
FolderPath: TypeAlias = Annotated[
    str,
    Field(
        min_length=1,
        max_length=MAX_PATH_LENGTH,
        description="The adapter's folder on the server's machine; a relative one counts from "
        "--adapter-root, or from where the server was started.",
    ),
]


class StrictBody(BaseModel):
    """A body in which unknown fields, and values of another type, are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class LoadBody(StrictBody):
    """What to load."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"name": "math"}, {"name": "law", "path": "law-v2", "pinned": True}]
        }
    )

    name: Name
    path: FolderPath | None = None
    pinned: bool = Field(default=False, description="Never evicted while it is loaded.")


class ChangeBody(StrictBody):
    """What to change of a loaded adapter. One of the fields at least."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"pinned": True}, {"reload": True}, {"path": "math-v2", "pinned": False}]
        }
    )

    pinned: bool | None = Field(default=None, description="Whether it may be evicted.")
    path: FolderPath | None = None
    reload: bool = Field(default=False, description="Replace it by what its folder holds now.")

    @model_validator(mode="after")
    def _names_a_change(self) -> Self:
        if self.pinned is None and self.path is None and not self.reload:
            raise ValueError('name a change: "pinned", "path" or "reload": true')
        return self

    @property
    def replaces(self) -> bool:
        return self.path is not None or self.reload


class ForeignBody(BaseModel):
    """A body of another server's clients, who may send more than is looked at."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


_FOLDER_EXAMPLE = ConfigDict(
    json_schema_extra={"examples": [{"lora_name": "math", "lora_path": "math"}]}
)


class VllmLoadBody(ForeignBody):
    """vLLM's body."""

    model_config = _FOLDER_EXAMPLE

    lora_name: Name
    lora_path: FolderPath
    load_inplace: bool = Field(default=False, description="Replace it if it is loaded.")


class SglangLoadBody(ForeignBody):
    """SGLang's body."""

    model_config = _FOLDER_EXAMPLE

    lora_name: Name
    lora_path: FolderPath
    pinned: bool | None = Field(default=False, description="Never evicted while it is loaded.")


class UnloadBody(ForeignBody):
    """vLLM's body, and SGLang's."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"lora_name": "math"}]})

    lora_name: Name


ADAPTER_EXAMPLE: Final[dict[str, Any]] = {
    "name": "math",
    "kind": "esft",
    "state": "on_device",
    "folder": "math",
    "digest": "0c5f1e9a7b2148d09bb1f6c1f2a1d0e7",
    "pinned": False,
    "num_experts": 17,
    "num_bytes": 1671168,
    "devices": [{"rank": 0, "adapter_slot": 1, "mapped_bytes": 1703936}],
    "num_references": 2,
    "last_used": "2026-03-02T09:14:05.120+00:00",
    "load": None,
    "error": None,
    "draining_versions": [],
    "changed_on_disk": False,
    "on_demand": True,
}
LOADING_EXAMPLE: Final[dict[str, Any]] = {
    **ADAPTER_EXAMPLE,
    "state": "loading",
    "digest": None,
    "devices": [],
    "num_references": 0,
    "last_used": None,
    "load": {"phase": "reading", "progress": 0.4, "replaces": False},
    "changed_on_disk": None,
}
LISTING_EXAMPLE: Final[dict[str, Any]] = {
    "adapters": [ADAPTER_EXAMPLE],
    "slots": {"total": 3, "used": 2},
    "lora_slots": None,
    "host": {"budget_bytes": None, "used_bytes": 1671168},
}


def example(description: str, value: dict[str, Any]) -> dict[str, Any]:
    """An OpenAPI response with an example."""
    return {"description": description, "content": {"application/json": {"example": value}}}


def error_example(description: str, name: str, status: int, message: str) -> dict[str, Any]:
    """An OpenAPI response that is an error."""
    error = {"message": message, "type": name, "param": None, "code": status}
    return example(description, {"error": error})
