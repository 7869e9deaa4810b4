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


def tag_tokens(request_slots: Sequence[int], num_tokens_per_request: Sequence[int]) -> torch.Tensor:
    """[sum(num_tokens_per_request)] int32 on the host: each request's slot, once a token."""
    slots = torch.tensor(request_slots, dtype=torch.int32)
    repeats = torch.tensor(num_tokens_per_request, dtype=torch.int64)
    return slots.repeat_interleave(repeats)


class BatchTags:
    """The tags of the batch at hand.

    token_adapter_slots(n): [n] int32 on the device, adapter slot or -1 for base and padding.
    all_base: no token of the batch has an adapter, so rerouting may be left out
        (known on the host; False when it is not known).
    """

    def __init__(self, max_num_tokens: int, device: torch.device | str) -> None:
        self._buffer = torch.full((max_num_tokens,), BASE, dtype=torch.int32, device=device)
        self._num_tokens = 0
        self.all_base = True

    def set(self, tags: torch.Tensor, *, all_base: bool) -> None:
        """Take [num_tokens] int32 tags; rows beyond them read as base."""
        num_tokens = tags.shape[0]
        if num_tokens > self._buffer.shape[0]:
            self._grow(num_tokens)
        self._buffer[:num_tokens].copy_(tags)
        self._buffer[num_tokens : max(num_tokens, self._num_tokens)].fill_(BASE)
        self._num_tokens = num_tokens
        self.all_base = all_base

    def reset(self) -> None:
        """Every token is base."""
        self._buffer[: self._num_tokens].fill_(BASE)
        self._num_tokens = 0
        self.all_base = True

    def token_adapter_slots(self, num_tokens: int) -> torch.Tensor:
        """The first num_tokens tags. Raises InvariantError if the batch was tagged differently.

        More rows than tags are padding. Fewer would mean that rows and tags do
        not belong together, which must never be guessed at.
        """
        if num_tokens < self._num_tokens or num_tokens > self._buffer.shape[0]:
            raise InvariantError(
                f"the MoE layer has {num_tokens} tokens, the batch was tagged for "
                f"{self._num_tokens} (room for {self._buffer.shape[0]})"
            )
        return self._buffer[:num_tokens]

    def _grow(self, num_tokens: int) -> None:
        capacity = 1 << (num_tokens - 1).bit_length()
        self._buffer = self._buffer.new_full((capacity,), BASE)
