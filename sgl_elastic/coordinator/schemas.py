"""Bodies of the scaling routes: strict, bounded, and with examples for the OpenAPI page.

JSON --> [ScaleBody | VllmScaleBody | SglangScaleBody] --> ScaleRequest --> coordinator
"""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from sgl_elastic.errors import BadScaleError
from sgl_elastic.types import ScaleRequest

MAX_DEVICES: Final = 1024
MAX_KEY_LENGTH: Final = 128
MAX_WAIT_S: Final = 3600.0
MAX_BODY_BYTES: Final = 64 << 10  # every list full is below 16 KiB

Size: TypeAlias = Annotated[int, Field(ge=1, le=MAX_DEVICES)]
DeviceId: TypeAlias = Annotated[int, Field(ge=0, lt=MAX_DEVICES)]
DeviceIds: TypeAlias = Annotated[list[DeviceId], Field(max_length=MAX_DEVICES)]
Key: TypeAlias = Annotated[str, Field(max_length=MAX_KEY_LENGTH)]


class StrictBody(BaseModel):
    """A body in which unknown fields, and values of another type, are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ScaleBody(StrictBody):
    """What to scale to."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"dp_size": 3},
                {"dp_size": 2, "leave": [1], "key": "repair-17"},
                {"dp_size": 4, "device_ids": [0, 1, 4, 5], "dry_run": True},
            ]
        }
    )

    dp_size: Size = Field(description="Ranks to end up with: DP = EP = this.")
    device_ids: DeviceIds = Field(
        default_factory=list,
        description="Devices to end up with; none named: the planner's choice.",
    )
    leave: DeviceIds = Field(default_factory=list, description="Devices that must leave.")
    dry_run: bool = Field(default=False, description="Only say what would be done.")
    drain: bool = Field(
        default=False,
        description="Hold new requests until running ones have ended, for a bounded time, before "
        "the switch. Otherwise running requests are handed over and go on.",
    )
    key: Key = Field(
        default="",
        description="Idempotency key, also taken from the header Idempotency-Key: the same key "
        "with the same body gives the same operation.",
    )

    def to_request(self, header_key: str | None) -> ScaleRequest:
        """The request. Raises BadScaleError when header and body name different keys."""
        if header_key and self.key and header_key != self.key:
            raise BadScaleError(
                f"the header says key {header_key!r}, the body {self.key!r}: send one of them"
            )
        return ScaleRequest(
            dp_size=self.dp_size,
            device_ids=tuple(self.device_ids),
            leave=tuple(self.leave),
            dry_run=self.dry_run,
            key=self.key or header_key or "",
            drain=self.drain,
        )


class VllmScaleBody(StrictBody):
    """vLLM's body. The answer comes when the scale has ended, or at the time-out."""

    new_data_parallel_size: Size
    drain_timeout: Annotated[float, Field(gt=0, le=MAX_WAIT_S)] = Field(
        default=120.0,
        description="Seconds to wait for the end of the scale. Nothing is drained: running "
        "requests go on on the new ranks.",
    )


class SglangScaleBody(StrictBody):
    """SGLang's body. The answer comes when the scale has been planned."""

    new_ep_size: Size


def example(description: str, value: dict[str, Any]) -> dict[str, Any]:
    """An OpenAPI response with an example."""
    return {"description": description, "content": {"application/json": {"example": value}}}


def error_example(description: str, name: str, status: int, message: str) -> dict[str, Any]:
    """An OpenAPI response that is an error."""
    error = {"message": message, "type": name, "param": None, "code": status}
    return example(description, {"error": error})
