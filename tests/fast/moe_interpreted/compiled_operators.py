"""What SGLang's Triton MoE path calls that is compiled for CUDA, in torch, for CPU tensors.

    topk_ids --align_block_size--> blocks of one expert's rows --GEMM, silu_and_mul, GEMM-->
    [num_tokens, k, H] --sum_reduce--> [num_tokens, H]

Each refuses what the compiled operator does not take, and leaves alone what that one leaves alone.
test_compiled_operators.py holds them to the operators' documented contracts.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

MAX_BUCKETS = 8192  # of the alignment: experts and one for -1
ACTIVATION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
VECTOR_BYTES = 16  # of the activation's loads
WARP_SIZE = 32
FLOAT8_MAX = 448.0


class OperatorContractError(Exception):
    """The compiled operator would refuse this, or do what nobody wants."""


def require(condition: bool, message: str) -> None:
    """Raises OperatorContractError unless `condition`."""
    if not condition:
        raise OperatorContractError(message)


def align_block_size(
    topk_ids: torch.Tensor,
    num_experts: int,
    block_size: int,
    sorted_token_ids: torch.Tensor,
    experts_ids: torch.Tensor,
    num_tokens_post_pad: torch.Tensor,
    cumsum_buffer: torch.Tensor,
    pad_sorted_token_ids: bool = False,
    ignore_invalid_expert: bool = False,
) -> None:
    """sgl_kernel's moe_align_block_size: rows by expert, each expert's a whole number of blocks.

    topk_ids: [num_tokens, k] int32 or int64, experts in 0..num_experts-2, -1 = none.
    num_experts: buckets; bucket 0 is that of id -1, bucket e + 1 that of expert e.
    sorted_token_ids: [>= padded rows] int32, written: indices into the flat topk_ids by bucket,
        padding is topk_ids.numel(); with pad_sorted_token_ids up to its end, otherwise not at all.
    experts_ids: [>= blocks] int32, written: the expert of each block, -1 for bucket 0; what lies
        behind the last block is left as it was.
    num_tokens_post_pad: [1] int32, written: the padded rows of all buckets.
    cumsum_buffer: [num_experts + 1] int32 at least: scratch.
    """
    ids, num_rows = topk_ids.reshape(-1).long(), topk_ids.numel()
    _check_alignment(topk_ids, num_experts, block_size, ignore_invalid_expert)
    _check_outputs(sorted_token_ids, experts_ids, num_tokens_post_pad, cumsum_buffer)
    require(cumsum_buffer.numel() > num_experts, f"cumsum_buffer: {cumsum_buffer.numel()} entries")
    counts = torch.bincount(ids + 1, minlength=num_experts)
    blocks = (counts + block_size - 1) // block_size
    total = int(blocks.sum()) * block_size
    require(total <= sorted_token_ids.numel(), f"sorted_token_ids: {total} rows do not fit")
    require(int(blocks.sum()) <= experts_ids.numel(), "expert_ids: too few for the blocks")
    if pad_sorted_token_ids:
        sorted_token_ids.fill_(num_rows)
    starts = (blocks.cumsum(0) - blocks) * block_size
    order = ids.argsort(stable=True)
    rank = torch.arange(num_rows) - (counts.cumsum(0) - counts)[ids[order] + 1]
    sorted_token_ids[starts[ids[order] + 1] + rank] = order.to(torch.int32)
    owners = torch.arange(num_experts).repeat_interleave(blocks) - 1
    experts_ids[: owners.numel()] = owners.to(torch.int32)
    num_tokens_post_pad.fill_(total)


def _check_alignment(
    topk_ids: torch.Tensor, num_experts: int, block_size: int, ignore_invalid_expert: bool
) -> None:
    require(topk_ids.ndim == 2 and topk_ids.is_contiguous(), "topk_ids: not [num_tokens, k]")
    require(topk_ids.dtype in (torch.int32, torch.int64), f"topk_ids: {topk_ids.dtype}")
    require(2 <= num_experts <= MAX_BUCKETS, f"num_experts: {num_experts} buckets")
    require(block_size > 0, f"block_size: {block_size}")
    require(not ignore_invalid_expert, "ignore_invalid_expert: SGLang's MoE layer never asks")
    if topk_ids.numel():
        low, high = int(topk_ids.min()), int(topk_ids.max())
        require(low >= -1 and high < num_experts - 1, f"topk_ids: {low}..{high} has no bucket")


def _check_outputs(*outputs: torch.Tensor) -> None:
    for output in outputs:
        require(output.ndim == 1 and output.dtype is torch.int32, "outputs: not [n] int32")
        require(output.is_contiguous(), "outputs: not contiguous")


def silu_and_mul(
    input: torch.Tensor,
    out: torch.Tensor | None = None,
    expert_ids: torch.Tensor | None = None,
    expert_step: int = 1,
    *,
    sorted_token_ids: torch.Tensor | None = None,
    num_tokens_post_padded: torch.Tensor | None = None,
    num_valid_tokens: int = 0,
) -> torch.Tensor:
    """SGLang's JIT activation: out = silu(gate) * up in float32, gate the first half of a row.

    input: [rows, 2 I] float32, bfloat16 or float16; out: [rows, I] of the same dtype, written.
    expert_ids: [>= rows / expert_step] int32, or int64; a row whose id is -1 is left as it was.
    sorted_token_ids and what follows: the rows are those of align_block_size's blocks; its padding,
    too, is left as it was.
    """
    require(input.ndim == 2 and input.is_contiguous(), "input: not [rows, 2 I]")
    require(input.dtype in ACTIVATION_DTYPES, f"input: {input.dtype}")
    half = input.shape[1] // 2
    is_whole = half * input.element_size() % VECTOR_BYTES == 0 and input.shape[1] == 2 * half
    require(is_whole, f"input: {input.shape[1]} columns are no whole vectors")
    result = input.new_empty(input.shape[0], half) if out is None else out
    require(result.shape == (input.shape[0], half), f"out: {tuple(result.shape)}")
    require(result.dtype is input.dtype and result.is_contiguous(), "out: not like input")
    gate, up = input.float().chunk(2, dim=1)
    values = (F.silu(gate) * up).to(input.dtype)
    live = _live_rows(input.shape[0], expert_ids, expert_step)
    if sorted_token_ids is not None:
        assert num_tokens_post_padded is not None
        is_used = used_rows(sorted_token_ids, num_tokens_post_padded, num_valid_tokens)
        live = live[is_used[live]]
    result[live] = values[live]
    return result


def used_rows(
    sorted_token_ids: torch.Tensor, num_tokens_post_padded: torch.Tensor, num_valid_tokens: int
) -> torch.Tensor:
    """[padded rows] bool: which rows of align_block_size's blocks are tokens and not padding."""
    is_in_blocks = torch.arange(len(sorted_token_ids)) < int(num_tokens_post_padded[0])
    return is_in_blocks & (sorted_token_ids < num_valid_tokens)


def _live_rows(num_rows: int, expert_ids: torch.Tensor | None, step: int) -> torch.Tensor:
    rows = torch.arange(num_rows)
    if expert_ids is None:
        return rows
    require(expert_ids.ndim == 1, f"expert_ids: {expert_ids.ndim} dimensions")
    require(expert_ids.dtype in (torch.int32, torch.int64), f"expert_ids: {expert_ids.dtype}")
    require(expert_ids.numel() * step >= num_rows, f"expert_ids: too few for {num_rows} rows")
    return rows[expert_ids[rows // step] != -1]


def sum_reduce(
    input: torch.Tensor,
    output: torch.Tensor,
    routed_scaling_factor: float = 0,
) -> None:
    """sgl_kernel's moe_sum_reduce: output = routed_scaling_factor * the sum over k, in float32.

    input: [num_tokens, k, H]; output: [num_tokens, H] of the same dtype, written.
    """
    require(input.ndim == 3 and input.is_contiguous(), "input: not [num_tokens, k, H]")
    require(output.shape == (input.shape[0], input.shape[2]), f"output: {tuple(output.shape)}")
    require(output.is_contiguous() and output.dtype is input.dtype, "output: not like input")
    require(input.dtype in ACTIVATION_DTYPES, f"input: {input.dtype}")
    total = torch.zeros(output.shape, dtype=torch.float32)
    for expert_output in input.unbind(1):
        total += expert_output.float()
    output.copy_(total * routed_scaling_factor)


def mask_topk_ids(topk_ids: torch.Tensor, num_token_non_padded: torch.Tensor) -> None:
    """SGLang's JIT mask: ids of tokens from num_token_non_padded on become -1.

    topk_ids: [num_tokens, k <= 32] int32, rows anywhere; num_token_non_padded: one int32.
    """
    require(topk_ids.ndim == 2 and topk_ids.dtype is torch.int32, "topk_ids: not [n, k] int32")
    require(topk_ids.stride(1) == 1, "topk_ids: a row's ids are apart")
    require(topk_ids.shape[1] <= WARP_SIZE, f"topk_ids: {topk_ids.shape[1]} experts a token")
    is_one = num_token_non_padded.numel() == 1 and num_token_non_padded.dtype is torch.int32
    require(is_one, "num_token_non_padded: not one int32")
    topk_ids[int(num_token_non_padded) :] = -1


def per_token_group_quant(
    input: torch.Tensor,
    *,
    group_size: int,
    sorted_token_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
    num_valid_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """SGLang's JIT quantisation of align_block_size's blocks to float8, a scale for each group.

    input: [rows, K]; gives [rows, K] float8_e4m3fn and [rows, K / group_size] float32, by SGLang's
    own Triton kernel; what the product does not read is left unwritten.
    """
    from sglang.kernels.ops.quantization.fp8_kernel import _per_token_group_quant_8bit_raw

    numbers, scales = _per_token_group_quant_8bit_raw(input, group_size)
    is_used = used_rows(sorted_token_ids, num_tokens_post_padded, num_valid_tokens)[: len(input)]
    require(len(is_used) == len(input), f"input: {len(input)} rows, {len(is_used)} of blocks")
    scales[~is_used] = float("nan")
    numbers.view(torch.uint8)[~is_used] = 255
    return numbers, scales


def per_tensor_quant_fp8(
    input: torch.Tensor, output_q: torch.Tensor, output_s: torch.Tensor, is_static: bool = False
) -> None:
    """SGLang's JIT quantisation to float8, one scale for everything: output_q = input / output_s.

    input: any shape, float32, bfloat16 or float16; output_q: as many float8_e4m3fn, written.
    output_s: one float32. Static: read. Otherwise the larger of itself, which is to be zero, and of
    the largest magnitude of input over 448: of an input that nobody has written, whatever it holds.
    """
    require(input.is_contiguous() and input.dtype in ACTIVATION_DTYPES, f"input: {input.dtype}")
    is_like = output_q.numel() == input.numel() and output_q.is_contiguous()
    require(is_like and output_q.dtype is torch.float8_e4m3fn, f"output_q: {output_q.dtype}")
    is_one = output_s.numel() == 1 and output_s.dtype is torch.float32
    require(is_one, f"output_s: {output_s.numel()} of {output_s.dtype}")
    values = input.float()
    if not is_static:
        require(not bool(output_s.any()), "output_s: not zero, and not to be read")
        require(not bool(values.isnan().any()), "input: NaN, so rows that nobody has written")
        output_s.copy_((values.abs().max() / FLOAT8_MAX).reshape(output_s.shape))
    scaled = (values * (1 / output_s)).clamp(-FLOAT8_MAX, FLOAT8_MAX)
    output_q.copy_(scaled.reshape(output_q.shape))
