"""What one would write for CUDA, to show what Ascend's compiler makes of it."""

import triton
import triton.language as tl


@triton.jit
def reroute_from_global_memory(
    ids_ptr, tags_ptr, map_ptr, out_ptr, num_ids, K: tl.constexpr, M: tl.constexpr
):
    lane = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    ids = tl.load(ids_ptr + lane, mask=lane < num_ids, other=-1)
    tags = tl.load(tags_ptr + lane // K, mask=lane < num_ids, other=0)
    slots = tl.load(map_ptr + tags * M + ids, mask=ids >= 0, other=-1)
    tl.store(out_ptr + lane, slots, mask=lane < num_ids)


@triton.jit
def gather_of_int32(values_ptr, index_ptr, out_ptr):
    lane = tl.arange(0, 64)
    values = tl.load(values_ptr + lane)
    tl.store(out_ptr + lane, tl.gather(values, tl.load(index_ptr + lane), 0))
