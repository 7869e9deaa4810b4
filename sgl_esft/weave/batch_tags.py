"""Which adapter each token of a forward pass belongs to.

    ForwardBatch (requests) -> [token_adapter_slots] -> reroute.py (MoE layers)

One buffer for the whole model, filled before the forward pass and read by every
MoE layer. Its address is stable, so that captured graphs read current tags.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sgl_esft.errors import InvariantError

BASE = -1  # the tag of base requests and of padding rows
PADDING = -2  # of padding rows, where it matters that they are not the base's; never in a buffer
MAX_PADDING_ROWS = 64  # SGLang pads a batch to a multiple of ranks; it has no more of them


def tag_tokens(request_slots: Sequence[int], num_tokens_per_request: Sequence[int]) -> torch.Tensor:
    """[sum(num_tokens_per_request)] int32 on the host: each request's slot, once a token."""
    slots = torch.tensor(request_slots, dtype=torch.int32)
    if max(num_tokens_per_request, default=1) == min(num_tokens_per_request, default=1) == 1:
        return slots  # decoding, where the time that this takes is felt
    repeats = torch.tensor(num_tokens_per_request, dtype=torch.int64)
    return slots.repeat_interleave(repeats)


def rows_of_source(
    tags: torch.Tensor, source: int, num_adapters: int, num_sources: int
) -> torch.Tensor:
    """[num_tokens] int32 adapter slots, -1 for the base -> rows of an expert map with sources.

    Each source rank has a row for each adapter slot, then the base's. The map's very last row is
    called -1, as the only base's is where there is one source: rerouting takes no other name.
    """
    first = source * (num_adapters + 1)
    base = BASE if source == num_sources - 1 else first + num_adapters
    return torch.where(tags < 0, base, tags + first)


class BatchTags:
    """The tags of the batch at hand.

    token_adapter_slots(n): [n] int32 on the device, adapter slot or -1 for base and padding.

    The static buffer holds batches of up to `max_num_tokens` and never moves. A larger
    batch, which no graph was captured for, has another buffer that grows.
    """

    def __init__(self, max_num_tokens: int, device: torch.device | str) -> None:
        self._static = _base_tags(max_num_tokens, device)
        self._large = self._static
        self._buffer = self._static  # of the batch at hand
        self._num_tokens = 0
        self._view = self._static[:0]  # as many rows of it as were asked for last

    def reserve(self, max_num_tokens: int) -> None:
        """Make the static buffer large enough; before a graph holds its address."""
        if _capacity(self._static) < max_num_tokens:
            self._static = _base_tags(max_num_tokens, self._static.device)
            self._begin(self._static, 0)

    def set(self, tags: torch.Tensor) -> None:
        """Take [num_tokens] int32 tags, of the host or the device; rows beyond read as base."""
        num_tokens = tags.shape[0]
        buffer = self._buffer_for(num_tokens)
        if buffer is not self._buffer:
            self.reset()
        elif num_tokens < self._num_tokens:
            buffer[num_tokens : self._num_tokens].fill_(BASE)
        self._begin(buffer, num_tokens)
        self._view.copy_(staged(tags, self._view.device), non_blocking=True)

    def reset(self) -> None:
        """Every token is base."""
        self._buffer[: self._num_tokens].fill_(BASE)
        self._begin(self._buffer, 0)

    def token_adapter_slots(self, num_tokens: int) -> torch.Tensor:
        """The first num_tokens tags. Raises InvariantError if the batch was tagged differently.

        More rows than tags are padding. Fewer would mean that rows and tags do
        not belong together, which must never be guessed at.
        """
        if num_tokens != self._view.shape[0]:  # it is the same for all layers of a forward pass
            self._check_num_rows(num_tokens)
            self._view = self._buffer[:num_tokens]
        return self._view

    def _check_num_rows(self, num_tokens: int) -> None:
        if num_tokens < self._num_tokens or num_tokens > self._buffer.shape[0]:
            raise InvariantError(
                f"the MoE layer has {num_tokens} tokens, the batch was tagged for "
                f"{self._num_tokens} (room for {self._buffer.shape[0]})"
            )

    def _begin(self, buffer: torch.Tensor, num_tokens: int) -> None:
        """A batch of `num_tokens` tags in `buffer`."""
        self._buffer, self._num_tokens = buffer, num_tokens
        self._view = buffer[:num_tokens]

    def _buffer_for(self, num_tokens: int) -> torch.Tensor:
        if num_tokens <= _capacity(self._static):
            return self._static
        if num_tokens > _capacity(self._large):
            self._large = _base_tags(1 << (num_tokens - 1).bit_length(), self._static.device)
        return self._large


def _base_tags(max_num_tokens: int, device: torch.device | str) -> torch.Tensor:
    return torch.full((max_num_tokens + MAX_PADDING_ROWS,), BASE, dtype=torch.int32, device=device)


def _capacity(buffer: torch.Tensor) -> int:
    return buffer.shape[0] - MAX_PADDING_ROWS


def staged(tags: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tags` where a copy to the device does not wait for it, and the scheduler with it.

    From pageable memory it would.
    """
    return tags if tags.device == device else tags.pin_memory()
