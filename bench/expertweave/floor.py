"""The floor under a decode step: the distinct experts it must touch, and the bytes it must read.

    tuned experts, tokens of each owner, selection -> [expected_touched] -> experts a layer
    ModelBytes, experts a layer                    -> [decode_floor_bytes, floor_over_base]

A decode step reads every expert that any of its tokens selects, once. Adapters make a step touch
more of them: a token of an adapter goes to the adapter's own copy of a tuned expert. That cost is
not the software's, so overheads are reported as measured minus floor. Pure; nothing is timed.

An *owner* is the base (row 0) or an adapter (rows 1..N). Selection probabilities are
``[1 + N, M]`` float64: of one token of that owner, the chance that the router selects expert m.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sgl_esft.memory.model_sizes import Config, ModelSizes

Array = NDArray[np.float64]


class FloorError(ValueError):
    """A workload that no batch can have; the message says which number to change."""


@dataclass(frozen=True)
class ModelBytes:
    """What a decode step reads of a model; the defaults are DeepSeek-V2-Lite's in bfloat16."""

    always_read_bytes: int = 2_203_835_392  # all weights but routed experts and the embedding
    expert_bytes: int = 17_301_504  # one routed expert: gate, up and down
    num_moe_layers: int = 26
    kv_bytes_per_token: int = 31_104  # over all layers

    @classmethod
    def from_config(cls, config: Config) -> ModelBytes:
        """Count a parsed config.json, for scaled models. Raises UnsupportedModelError."""
        sizes = ModelSizes.from_config(config)
        spec = sizes.spec
        kv_bytes = sizes.kv_bytes_per_token()
        element_bytes = kv_bytes // sizes.kv_elements_per_token
        # A step looks up a few rows of the embedding, but as the head it is read whole.
        is_tied = bool(config.get("tie_word_embeddings"))
        rows = 0 if is_tied else int(str(config["vocab_size"]))
        embedding_bytes = rows * spec.hidden_size * element_bytes
        return cls(
            always_read_bytes=sizes.trunk_bytes - embedding_bytes,
            expert_bytes=spec.expert_bytes,
            num_moe_layers=len(spec.moe_layer_ids),
            kv_bytes_per_token=kv_bytes,
        )


V2_LITE = ModelBytes()


def uniform_selection(num_owners: int, num_experts: int, top_k: int) -> Array:
    """``[num_owners, num_experts]`` float64, all top_k / num_experts."""
    if not 0 < top_k <= num_experts:
        raise FloorError(f"top_k is {top_k}: a token selects 1 to {num_experts} experts.")
    return np.full((num_owners, num_experts), top_k / num_experts)


def selection_from_scores(scores: Mapping[int, float], num_experts: int, top_k: int) -> Array:
    """One owner's row from ESFT token scores (shares of all selections, expert id -> score).

    ``[num_experts]`` float64 that sums to top_k, but for experts held to a probability of 1.
    """
    row = np.array([scores.get(expert, 0.0) for expert in range(num_experts)])
    if row.min() < 0 or row.sum() <= 0:
        raise FloorError("scores are negative or all zero: give the token scores of one layer.")
    return np.minimum(top_k * row / row.sum(), 1.0)


def expected_touched(
    tuned: Sequence[Collection[int]],
    num_tokens: Sequence[float],
    *,
    num_experts: int,
    top_k: int,
    selection: ArrayLike | None = None,
) -> float:
    """Expected distinct experts that one MoE layer touches in a step of known composition.

    Semantics (ExpertWeave section 5.2's "more diverse expert activation", counted):
    ``sum_m [1 - prod_j (1 - p[j, m]) ** b[j]] + sum_i sum_{m in S_i} [1 - (1 - p[i, m]) ** b[i]]``
    where j runs over the base and the adapters that did not tune m, and S_i is what i tuned.
    With one p for all owners this is ``1 - (1 - p[m]) ** (tokens that use the base's m)``.

    tuned: of each adapter its tuned experts in this layer, ids in [0, num_experts); may be empty.
    num_tokens: tokens in the step of the base, then of each adapter.
    selection: ``[1 + N, M]``, see the module; None is the uniform top_k / num_experts.
    Tokens are taken as independent. At most ``num_experts + sum(len(S_i))``. Raises FloorError.
    """
    own = _own_experts(tuned, num_experts)
    tokens = np.asarray(num_tokens, dtype=np.float64)
    _check_owners(tokens, len(own), "num_tokens")
    missed = (1 - _checked_selection(selection, own.shape, top_k)) ** tokens[:, None]
    base = 1 - np.where(own, 1.0, missed).prod(axis=0)
    return float(base.sum() + np.where(own, 1 - missed, 0.0).sum())


def expected_touched_at_random(
    tuned: Sequence[Collection[int]],
    shares: Sequence[float],
    num_tokens: int,
    *,
    num_experts: int,
    top_k: int,
    selection: ArrayLike | None = None,
) -> float:
    """As `expected_touched`, for a step whose tokens have random owners.

    shares: chance that a token is the base's, then each adapter's; they sum to 1.
    ``sum_m [1 - (1 - sum_j share[j] p[j, m]) ** B]``, and for the tuned experts
    ``1 - (1 - share[i] p[i, m]) ** B``. One token touches exactly top_k. Raises FloorError.
    """
    own = _own_experts(tuned, num_experts)
    share = np.asarray(shares, dtype=np.float64)
    _check_owners(share, len(own), "shares")
    if abs(share.sum() - 1) > 1e-6:
        raise FloorError(f"shares sum to {share.sum():.6g}, not to 1.")
    used = share[:, None] * _checked_selection(selection, own.shape, top_k)
    base = 1 - (1 - np.where(own, 0.0, used).sum(axis=0)).clip(0) ** num_tokens
    return float(base.sum() + np.where(own, 1 - (1 - used) ** num_tokens, 0.0).sum())


def decode_floor_bytes(
    touched: Sequence[float], model: ModelBytes = V2_LITE, *, kv_tokens: int = 0
) -> float:
    """Bytes that one decode step must read: weights, and the KV cache of `kv_tokens` tokens.

    touched: distinct experts, a number for each MoE layer; one number stands for all layers.
    Divided by the memory's bandwidth it bounds the step's time from below. Raises FloorError.
    """
    if len(touched) not in (1, model.num_moe_layers):
        raise FloorError(
            f"touched has {len(touched)} layers, the model {model.num_moe_layers}: "
            "give a number for each layer, or one for all."
        )
    experts = sum(touched) * (model.num_moe_layers // len(touched))
    return (
        model.always_read_bytes
        + experts * model.expert_bytes
        + kv_tokens * model.kv_bytes_per_token
    )


def floor_over_base(
    woven: Sequence[float],
    base: Sequence[float],
    model: ModelBytes = V2_LITE,
    *,
    kv_tokens: int = 0,
) -> float:
    """Ratio of a woven step's floor to that of the same tokens on the base alone.

    1.0 says that weaving must read no more. `woven` and `base` are as `touched` above.
    """
    return decode_floor_bytes(woven, model, kv_tokens=kv_tokens) / decode_floor_bytes(
        base, model, kv_tokens=kv_tokens
    )


def _own_experts(tuned: Sequence[Collection[int]], num_experts: int) -> NDArray[np.bool_]:
    """``[1 + N, M]``: which owner has its own copy of which expert; the base's row is False."""
    own = np.zeros((1 + len(tuned), num_experts), dtype=np.bool_)
    for adapter, experts in enumerate(tuned):
        outside = [m for m in experts if not 0 <= m < num_experts]
        if outside:
            raise FloorError(f"adapter {adapter} tunes {outside}, not in [0, {num_experts}).")
        own[1 + adapter, list(experts)] = True
    return own


def _checked_selection(selection: ArrayLike | None, shape: tuple[int, ...], top_k: int) -> Array:
    if selection is None:
        return uniform_selection(*shape, top_k)
    found = np.asarray(selection, dtype=np.float64)
    if found.shape != shape:
        raise FloorError(f"selection is {found.shape}, not [base and adapters, experts] {shape}.")
    if found.min() < 0 or found.max() > 1:
        raise FloorError(f"selection has {found.min():.3g} to {found.max():.3g}, not in [0, 1].")
    return found


def _check_owners(found: Array, num_owners: int, name: str) -> None:
    if found.shape != (num_owners,) or found.min() < 0:
        raise FloorError(
            f"{name} is {found.tolist()}: give the base's, then one of each of "
            f"{num_owners - 1} adapters, none below 0."
        )
