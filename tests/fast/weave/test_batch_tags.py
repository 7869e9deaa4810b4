"""The batch's tags: one adapter slot a token, base for what is padding, and never a guess."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_esft.errors import InvariantError
from sgl_esft.weave.batch_tags import BASE, MAX_PADDING_ROWS, BatchTags, tag_tokens


def tags_of(*slots: int) -> torch.Tensor:
    return torch.tensor(slots, dtype=torch.int32)


@given(requests=st.lists(st.tuples(st.integers(-1, 15), st.integers(0, 9)), max_size=12))
def test_tokens_are_tagged_in_the_order_of_the_requests(requests: list[tuple[int, int]]) -> None:
    slots, counts = [r[0] for r in requests], [r[1] for r in requests]
    expected = [slot for slot, count in requests for _ in range(count)]
    tags = tag_tokens(slots, counts)
    assert tags.tolist() == expected
    assert tags.dtype == torch.int32


@pytest.mark.parametrize("num_tokens", [0, 2, 5 + MAX_PADDING_ROWS])
def test_a_row_count_that_cannot_be_the_batchs_is_refused(num_tokens: int) -> None:
    tags = BatchTags(4, "cpu")
    tags.set(tags_of(0, 1, 2))
    with pytest.raises(InvariantError, match=f"{num_tokens} tokens, the batch was tagged for 3"):
        tags.token_adapter_slots(num_tokens)
    assert tags.token_adapter_slots(3).tolist() == [0, 1, 2]


def test_the_static_buffer_stays_where_it_is() -> None:
    """A captured graph holds its address, whatever batches come in between."""
    tags = BatchTags(8, "cpu")
    static = tags.token_adapter_slots(8)
    assert static.tolist() == [BASE] * 8
    assert static.dtype == torch.int32
    for slots in ((1, 2, 3), (), (0,) * 8, (4,) * 1000, (5,), (6,) * 3000):
        tags.set(tags_of(*slots))
        if len(slots) <= 8:
            assert tags.token_adapter_slots(8).data_ptr() == static.data_ptr()
            assert static.tolist() == [*slots] + [BASE] * (8 - len(slots))
    tags.reset()
    tags.set(tags_of())
    assert static.tolist() == [BASE] * 8


def test_reserve_comes_before_capture() -> None:
    tags = BatchTags(2, "cpu")
    tags.set(tags_of(1, 1))
    tags.reserve(5000)
    static = tags.token_adapter_slots(5000)
    assert static.unique().tolist() == [BASE]
    tags.set(torch.ones(5000, dtype=torch.int32))
    assert static.unique().tolist() == [1]
    tags.reserve(10)
    assert tags.token_adapter_slots(5000).data_ptr() == static.data_ptr()


def test_a_full_batch_has_room_for_padding() -> None:
    tags = BatchTags(4, "cpu")
    tags.set(tags_of(3, 2, 1, 0))
    assert tags.token_adapter_slots(6).tolist() == [3, 2, 1, 0, -1, -1]
    tags.set(torch.zeros(1 << 14, dtype=torch.int32))
    assert tags.token_adapter_slots((1 << 14) + 2)[-3:].tolist() == [0, -1, -1]


@given(
    capacity=st.integers(1, 4),
    batches=st.lists(st.none() | st.lists(st.integers(-1, 7), max_size=9), max_size=8),
)
def test_only_the_last_batch_shows(capacity: int, batches: list[list[int] | None]) -> None:
    """None is a reset: no earlier batch shines through behind a shorter one."""
    tags = BatchTags(capacity, "cpu")
    for batch in batches:
        if batch is None:
            tags.reset()
        else:
            tags.set(tags_of(*batch))
        shown = batch or []
        room = max(capacity, len(shown))
        padded = tags.token_adapter_slots(room)
        assert padded.tolist() == shown + [BASE] * (room - len(shown))
        assert torch.equal(tags.token_adapter_slots(len(shown)), tags_of(*shown))


def test_the_callers_tensor_is_copied() -> None:
    tags, given_tags = BatchTags(4, "cpu"), tags_of(1, 2)
    tags.set(given_tags)
    given_tags.fill_(9)
    assert tags.token_adapter_slots(2).tolist() == [1, 2]
