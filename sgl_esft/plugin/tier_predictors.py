"""The predictor of a rank, by `--expert-policy`, and what it keeps in a file.

ExpertPolicy, TierConfig, the loaded model, its folder -> [make_predictor] -> offload/predictors/
what one has learned --every now and then--> [StoreKeeper] -> --expert-map-file
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from pathlib import Path
from typing import Final, Protocol

import torch

from sgl_esft import sglang_api
from sgl_esft.config import TierConfig
from sgl_esft.errors import ConfigError, UnsupportedModelError
from sgl_esft.formats.model_spec import MoeSpec
from sgl_esft.formats.strict_json import read_object
from sgl_esft.offload.policies import ExpertPolicy
from sgl_esft.offload.predictors.counts import RequestCountsPredictor
from sgl_esft.offload.predictors.finemoe import FineMoEPredictor
from sgl_esft.offload.predictors.learned import LearnedPredictor
from sgl_esft.offload.predictors.map_store import MapStore
from sgl_esft.offload.predictors.moments import RouterMoments
from sgl_esft.offload.predictors.next_gate import NextGatePredictor
from sgl_esft.offload.predictors.predictor import Predictor
from sgl_esft.offload.predictors.regression import RegressionPredictor
from sgl_esft.plugin.decoded_tokens import EMBEDDING_SIZE

logger = logging.getLogger(__name__)

SAVE_PERIOD_S: Final = 10.0
_SAYS_WHO_WROTE_IT: Final = ("_name_or_path", "transformers_version", "_commit_hash")
_DIGITS: Final = 16


def make_predictor(
    policy: ExpertPolicy, config: TierConfig, spec: MoeSpec, model: torch.nn.Module, base: Path
) -> Predictor | None:
    """None for a policy that fetches nothing ahead. base: the checkpoint's folder.

    Raises ConfigError, UnsupportedModelError.
    """
    num_layers, num_experts = len(spec.moe_layer_ids), spec.num_experts
    if policy.predictor == "finemoe":
        return _finemoe(config, num_layers, num_experts, base_line(base))
    if policy.predictor == "regression":
        return _regression(config, num_layers, num_experts, base_line(base))
    if policy.predictor == "request-counts":
        reach = min(config.prefetch_distance, num_layers)
        return RequestCountsPredictor(num_layers, num_experts, config.top_k, reach=reach)
    if policy.predictor == "next-gate":
        gates = [weight.detach().float().cpu().numpy() for weight in _gates(model, spec)]
        return NextGatePredictor(gates, config.top_k)
    if policy.predictor == "learned":
        return _learned(config, num_layers, num_experts)
    return None


def _finemoe(config: TierConfig, num_layers: int, num_experts: int, base: str) -> FineMoEPredictor:
    distance = min(config.prefetch_distance, num_layers)
    sizes = num_layers, num_experts, EMBEDDING_SIZE
    store = MapStore(*sizes, distance, config.map_store_bytes, base=base)
    _keep(store, config)
    by_adapter = config.store_by == "adapter"
    return FineMoEPredictor(store, config.top_k, distance, by_adapter=by_adapter)


def _regression(
    config: TierConfig, num_layers: int, num_experts: int, base: str
) -> RegressionPredictor:
    moments = RouterMoments(num_layers, num_experts, config.map_store_bytes, base=base)
    _keep(moments, config)
    return RegressionPredictor(moments, config.top_k)


def base_line(base: Path) -> str:
    """Which base expert maps are of, in one line: by its config.json, less what says who wrote it.

    Weights are not looked at: two bases of one configuration are one.
    """
    config = dict(read_object(base / "config.json", UnsupportedModelError))
    names = config.get("architectures")
    for key in _SAYS_WHO_WROTE_IT:
        config.pop(key, None)
    text = json.dumps(config, sort_keys=True).encode()
    digest = hashlib.sha256(text).hexdigest()[:_DIGITS]
    return f"{names[0] if isinstance(names, list) and names else 'unnamed'} {digest}"


class Kept(Protocol):
    """What a predictor has learned."""

    num_added: int  # tokens since the start

    def save(self, path: Path) -> None:
        """Whole or not at all; on any thread."""

    def load(self, path: Path) -> None:
        """Raises ConfigError for a file that is damaged or of another model."""


def _keep(store: Kept, config: TierConfig) -> None:
    """Begin with what was kept; one rank of the server writes. Raises ConfigError."""
    if config.map_store_file is None:
        return
    path = Path(config.map_store_file)
    if path.exists():
        store.load(path)
        logger.info("what was learned of routing: from %s", path)
    elif not path.parent.is_dir():
        raise ConfigError(f"--expert-map-file {path}: there is no folder {path.parent}")
    if sglang_api.rank_in_server() == 0:
        StoreKeeper(store, path).start()


class StoreKeeper:
    """Writes a store to its file when it has changed. A rank is ended by a signal, so not then."""

    def __init__(self, store: Kept, path: Path, period_s: float = SAVE_PERIOD_S) -> None:
        self._store = store
        self._path = path
        self._period_s = period_s
        self._saved = store.num_added
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="expert-maps", daemon=True)

    def start(self) -> None:
        """Until the process ends, or `stop`."""
        self._thread.start()

    def stop(self) -> None:
        """Write what is new, and end."""
        self._stop.set()
        self._thread.join()
        self.save()

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            self.save()

    def save(self) -> None:
        """Write, if there is anything new. A disk that is full is no reason to stop serving."""
        num_added = self._store.num_added
        if num_added == self._saved:
            return
        try:
            self._store.save(self._path)
        except OSError as error:
            logger.warning("what was learned of routing is not kept in %s: %s", self._path, error)
            return
        self._saved = num_added


def _learned(config: TierConfig, num_layers: int, num_experts: int) -> LearnedPredictor:
    if config.probe_file is None:
        raise ConfigError(
            "--expert-policy learned needs --expert-probe FILE: `sgl-esft offload train` makes one "
            "from a trace"
        )
    return LearnedPredictor.load(Path(config.probe_file), num_layers, num_experts, config.top_k)


def _gates(model: torch.nn.Module, spec: MoeSpec) -> list[torch.Tensor]:
    """[J, H] of each MoE layer, in order. Raises UnsupportedModelError."""
    found = dict(sglang_api.gates(model))
    missing = [layer_id for layer_id in spec.moe_layer_ids if layer_id not in found]
    if missing:
        raise UnsupportedModelError(
            f"layers {missing} of {type(model).__name__} show no router weights: use "
            "--expert-policy finemoe"
        )
    return [found[layer_id] for layer_id in spec.moe_layer_ids]
