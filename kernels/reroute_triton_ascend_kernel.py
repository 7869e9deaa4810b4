"""The reroute kernels for Ascend's vector cores; reroute_triton_ascend.py plans and launches them.

    global memory --load--> unified buffer: ids, tags, tiles of the map
    unified buffer: tag -> row -> cell -> slot id, whole vectors at a time --store--> global memory

One lookup for each of the num_tokens * k expert ids, as in the CUDA kernel (reroute_triton.py).
What is different here, and why. "Lowered" is what triton-ascend 3.2.0 makes of it, which
tests/fast/kernels/test_ascend_lowering.py reads; docs/ascend_kernel.md shows it.

- **Grid.** CUDA takes a program for each block and lets the device schedule them. Here a program
  is bound to a core, and more programs than cores wait for each other in rounds. So there are at
  most as many as vector cores, and each walks its blocks with the grid's size as stride.
- **Lookup.** CUDA loads the map at computed addresses. That lowers to a loop with one scalar load
  an element, and the mask is applied after the load, so an id of -1 would read before the map.
  Here the map comes in whole tiles by contiguous copies and is looked up inside the unified
  buffer: `tl.gather` lowers to one call of the compiler's own gather for the whole block.
- **Tags.** CUDA loads the tag of token `element // k` at computed addresses. Here the tags of the
  block's tokens are one contiguous load, a row's first cell is computed once a token, and a
  second gather spreads it over the token's k elements. Blocks begin at a token's first element,
  so which token an element belongs to is the same in every block. It is computed once, by a
  multiplication and a shift: vector cores have no integer division.
- **Masks.** Those of loads and stores are a length (`lane < count`), which shortens the copy; no
  vector of booleans is made. -1 is handled by arithmetic on the sign, because vector cores compare
  int32 for equality only: `x >> 31` is -1 for a negative x, else 0. The one comparison left is an
  equality: whether an element's cell is in this tile.
- **int64 ids.** Converted when they arrive and when they leave. Everything between is int32, the
  widest integer that vector cores compute with.
- **float32 gathers.** `tl.gather` of this compiler takes no int32, so the bits are called float32
  around it. A gather moves bits and computes nothing.
- **Two kernels.** With `where` a slot is looked up a second time, in tiles as the map is. CUDA's
  kernel takes None for a table that is not there; here that is a kernel of its own, with smaller
  blocks, and the one without it keeps its arguments.

Imports triton alone, so that the vendor's compiler can read it without torch.
"""

# ruff: noqa: N803 -- compile-time arguments are in capitals, as usual in Triton

import triton
import triton.language as tl


@triton.jit
def gather_int32(values: tl.tensor, index: tl.tensor) -> tl.tensor:
    """values[index] within the unified buffer. values: [n] int32; index: [m] int32 in 0..n-1."""
    found = tl.gather(values.to(tl.float32, bitcast=True), index, 0)
    return found.to(tl.int32, bitcast=True)


@triton.jit
def look_up(
    cells: tl.tensor,  # [LANES] int32, flat indices into the table
    table_ptr: tl.tensor,  # [NUM_CELLS] int32: the map, or `where`
    NUM_CELLS: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The table's values at these cells, [LANES] int32, tile after tile; -1 for a cell of -1.

    An index is clamped into the tile: a lane whose cell is elsewhere reads some other cell,
    and drops what it read.
    """
    tile_lane = tl.arange(0, TILE)
    slot_ids = tl.full([LANES], -1, tl.int32)
    for first in range(0, NUM_CELLS, TILE):
        is_in_table = tile_lane < NUM_CELLS - first
        tile = tl.load(table_ptr + first + tile_lane, mask=is_in_table, other=-1)
        wanted = cells - first
        index = tl.minimum(tl.maximum(wanted, 0), TILE - 1)
        slot_ids = tl.where(wanted == index, gather_int32(tile, index), slot_ids)
    return slot_ids


@triton.jit
def slots_of_block(
    topk_ids_ptr: tl.tensor,
    token_adapter_slots_ptr: tl.tensor,
    expert_map_ptr: tl.tensor,
    first_token: tl.tensor,
    block_tokens: tl.tensor,  # tokens of this block
    lane: tl.tensor,  # [LANES]
    tag_lane: tl.tensor,  # [TAG_LANES]
    token_of_lane: tl.tensor,  # [LANES]
    NUM_ROWS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    K: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """[LANES] int32: the map's cells for a block's ids, -1 where the id is."""
    tags = tl.load(
        token_adapter_slots_ptr + first_token + tag_lane,
        mask=tag_lane < block_tokens,
        other=-1,
    )
    expert_ids = tl.load(
        topk_ids_ptr + first_token * K + lane, mask=lane < block_tokens * K, other=-1
    ).to(tl.int32)
    rows = tags + ((tags >> 31) & NUM_ROWS)
    cells = gather_int32(rows * NUM_EXPERTS, token_of_lane) + tl.maximum(expert_ids, 0)
    slot_ids = look_up(cells, expert_map_ptr, NUM_ROWS * NUM_EXPERTS, LANES, TILE)
    return slot_ids | (expert_ids >> 31)


# num_tokens changes with each batch: one binary for all of them, a batch of one included.
@triton.jit(do_not_specialize=["num_tokens"])
def reroute_kernel(
    topk_ids_ptr: tl.tensor,  # [num_tokens, K] int32 or int64
    token_adapter_slots_ptr: tl.tensor,  # [num_tokens] int32
    expert_map_ptr: tl.tensor,  # [NUM_ROWS, NUM_EXPERTS] int32
    out_ptr: tl.tensor,  # [num_tokens, K], dtype of topk_ids; may be topk_ids_ptr
    num_tokens: tl.tensor,
    NUM_ROWS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,  # tokens a block
    TAG_LANES: tl.constexpr,  # a power of two; every lane's token is below it
    LANES: tl.constexpr,  # a power of two, at least TOKENS * K
    TILE: tl.constexpr,  # a power of two: cells of the map that are looked up at a time
    MULTIPLIER: tl.constexpr,  # lane // K == (lane * MULTIPLIER) >> SHIFT for every lane
    SHIFT: tl.constexpr,
) -> None:
    """out[t, k] = expert_map[token_adapter_slots[t], topk_ids[t, k]], or -1 where the id is."""
    lane, tag_lane = tl.arange(0, LANES), tl.arange(0, TAG_LANES)
    token_of_lane = (lane * MULTIPLIER) >> SHIFT
    num_blocks = (num_tokens + TOKENS - 1) // TOKENS
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        first_token = block * TOKENS
        block_tokens = tl.minimum(num_tokens - first_token, TOKENS)
        is_ours = lane < block_tokens * K
        slot_ids = slots_of_block(
            topk_ids_ptr, token_adapter_slots_ptr, expert_map_ptr, first_token, block_tokens,
            lane, tag_lane, token_of_lane, NUM_ROWS, NUM_EXPERTS, K, LANES, TILE,
        )  # fmt: skip
        slots_of_lanes = out_ptr + first_token * K + lane
        tl.store(slots_of_lanes, slot_ids.to(out_ptr.dtype.element_ty), mask=is_ours)


@triton.jit(do_not_specialize=["num_tokens"])
def reroute_rows_kernel(
    topk_ids_ptr: tl.tensor,  # [num_tokens, K] int32 or int64
    token_adapter_slots_ptr: tl.tensor,  # [num_tokens] int32
    expert_map_ptr: tl.tensor,  # [NUM_ROWS, NUM_EXPERTS] int32
    where_ptr: tl.tensor,  # [NUM_SLOTS] int32
    out_ptr: tl.tensor,  # [num_tokens, K], dtype of topk_ids; may be topk_ids_ptr
    num_tokens: tl.tensor,
    NUM_ROWS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,  # these as above
    TAG_LANES: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
    WHERE_TILE: tl.constexpr,  # a power of two: slots that are looked up at a time
    MULTIPLIER: tl.constexpr,
    SHIFT: tl.constexpr,
) -> None:
    """The same, with where[slot] for each slot, NOT_HERE too; -1 is in no tile and stays -1."""
    lane, tag_lane = tl.arange(0, LANES), tl.arange(0, TAG_LANES)
    token_of_lane = (lane * MULTIPLIER) >> SHIFT
    num_blocks = (num_tokens + TOKENS - 1) // TOKENS
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        first_token = block * TOKENS
        block_tokens = tl.minimum(num_tokens - first_token, TOKENS)
        is_ours = lane < block_tokens * K
        slot_ids = slots_of_block(
            topk_ids_ptr, token_adapter_slots_ptr, expert_map_ptr, first_token, block_tokens,
            lane, tag_lane, token_of_lane, NUM_ROWS, NUM_EXPERTS, K, LANES, TILE,
        )  # fmt: skip
        rows = look_up(slot_ids, where_ptr, NUM_SLOTS, LANES, WHERE_TILE)
        rows_of_lanes = out_ptr + first_token * K + lane
        tl.store(rows_of_lanes, rows.to(out_ptr.dtype.element_ty), mask=is_ours)
