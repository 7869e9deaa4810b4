"""Which experts to tune: ESFT's top-p rule over expert scores (ExpertWeave paper, 2.2).

    scores file -> [select_experts] -> expert_cfg.json

The published scores are used as they are. Token scores sum to 1 over a layer; gate scores sum to
the routers' average top-k mass, about 0.36 for DeepSeek-V2-Lite. The published configs come out
only without normalising, so a threshold is on the scores' own scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias, get_args

import msgspec

from sgl_esft.errors import ConfigError
from sgl_esft.formats.strict_json import read_object

ScoreKind = Literal["token", "gate"]
SCORE_KINDS: Final[tuple[ScoreKind, ...]] = get_args(ScoreKind)

# Larger than any count of tokens.
_Score: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e30)]
_Id: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"\A(0|[1-9][0-9]{0,8})\Z")]
_LayerScores: TypeAlias = Annotated[dict[_Id, _Score], msgspec.Meta(min_length=1)]

Scores = dict[int, dict[int, float]]


def select_experts(
    scores: Mapping[int, Mapping[int, float]], threshold: float
) -> dict[int, tuple[int, ...]]:
    """Per layer, experts in falling score (ties: lower id) until their sum reaches `threshold`.

    In: layer id -> expert id -> score. Out: layer id -> expert ids, highest score first, always
    at least one. Raises ConfigError for a threshold outside (0, 1] or above a layer's sum.
    """
    if not 0 < threshold <= 1:
        raise ConfigError(f"the threshold is {threshold}: give a number above 0, at most 1.")
    return {layer: _top_p(layer, scores[layer], threshold) for layer in sorted(scores)}


def _top_p(layer: int, scores: Mapping[int, float], threshold: float) -> tuple[int, ...]:
    ranked = sorted(scores, key=lambda expert: (-scores[expert], expert))
    for count in range(1, len(ranked) + 1):
        # fsum, so that scores of 0.05 + 0.15 do reach 0.2.
        if math.fsum(scores[expert] for expert in ranked[:count]) >= threshold:
            return tuple(ranked[:count])
    total = math.fsum(scores.values())
    raise ConfigError(
        f"the scores of layer {layer} sum to {total:.4g}, less than the threshold {threshold}: "
        "give a lower one (gate scores sum to less than 1)."
    )


def read_scores(path: Path, kind: ScoreKind) -> Scores:
    """Read ``{"token_scores": {layer: {expert: score}}, "gate_scores": ...}``; ConfigError if bad.

    Layer and expert ids are decimal strings, scores are finite and not negative.
    """
    found = read_object(path, ConfigError).get(f"{kind}_scores")
    try:
        layers = msgspec.convert(found, dict[_Id, _LayerScores])
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path.name}: {kind}_scores: {error}.") from error
    if not layers:
        raise ConfigError(f"{path.name} has no {kind}_scores.")
    return {
        int(layer): {int(expert): score for expert, score in scores.items()}
        for layer, scores in layers.items()
    }
