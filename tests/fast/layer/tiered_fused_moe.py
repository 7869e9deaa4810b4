"""SGLang's int8 FusedMoE with its experts in tiers, against those of merged, quantised checkpoints.

    python -m tests.fast.layer.tiered_fused_moe  ->  JSON, which test_tiered_int8.py judges

As quantised_fused_moe.py, whose plain layers say what is right; the experts are in files, and rows
are filled from them by the server's own parts: plane, tiers, reader. Adapters are in bfloat16, but
for one that is stored quantised.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file

from sgl_esft import hook_ledger
from sgl_esft.config import EsftConfig, TierConfig, current_config
from sgl_esft.formats.adapter_config import EXPERT_CONFIG_NAME, write_expert_config
from sgl_esft.formats.manifest import read_manifest
from sgl_esft.formats.model_spec import PROJS, read_moe_spec
from sgl_esft.offload.reader import ExpertReader
from sgl_esft.offload.tiered_layer import TieredLayer
from sgl_esft.plugin import build, hook_table
from sgl_esft.plugin.tiers import build_tiers
from sgl_esft.quant.adapter_copy import quantise_adapter
from sgl_esft.quant.scheme_settings import settings_of
from sgl_esft.weave.batch_tags import BatchTags
from sgl_esft.weave.plane import AdapterPlane, AdapterSource
from tests.fast.layer.quantised_fused_moe import DTYPE, Case, make_layer
from tests.fast.layer.real_fused_moe import compare, forward, refusal
from tests.fast.layer.test_quantised_layer import (
    HIDDEN,
    LAYER_ID,
    MAX_ADAPTERS,
    MAX_EXPERTS,
    NUM_EXPERTS,
    NUM_TOKENS,
    RANKS,
    SCHEMES,
    TOP_K,
    TUNED,
    WIDTHS,
    slots_of,
)
from tests.fast.layer.test_tiered_int8 import NUM_ROWS, STORED
from tests.support.base_factory import random_base_config
from tests.support.random_layers import RandomExperts, Rank

SCHEME, WIDTH = SCHEMES["int8"], WIDTHS["int8"]


def draws() -> list[RandomExperts]:
    """Of `Case`: the base's, then the adapters'."""
    return [RandomExperts.draw(NUM_EXPERTS, HIDDEN, WIDTH, i, DTYPE) for i in range(5)]


class Files:
    """A base in int8 and adapters, as far as experts in tiers look at them."""

    def __init__(self, folder: Path, case: Case) -> None:
        self.base, self.copies, self._folder = folder / "base", folder / "copies", folder
        self.base.mkdir(parents=True)
        config = random_base_config(
            "DeepseekV2ForCausalLM",
            hidden_size=HIDDEN,
            moe_intermediate_size=WIDTH,
            n_routed_experts=NUM_EXPERTS,
            num_experts_per_tok=TOP_K,
            num_hidden_layers=LAYER_ID + 1,
            first_k_dense_replace=LAYER_ID,
            dtype="bfloat16",
        )
        config["quantization_config"] = settings_of(SCHEME)
        (self.base / "config.json").write_text(json.dumps(config))
        self.spec = read_moe_spec(self.base)
        self._save(self.base, case.base)
        self.adapter = cache(self._adapter)

    def _save(self, folder: Path, experts: Mapping[int, Mapping[Any, Mapping[str, Any]]]) -> None:
        tensors = {
            self.spec.expert_part_name((LAYER_ID, expert, proj), part): parts[proj][part.suffix]
            for expert, parts in experts.items()
            for proj in PROJS
            for part in self.spec.expert_parts(proj)
        }
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})

    def _adapter(self, number: int) -> Path:
        folder = self._folder / f"a{number}"
        folder.mkdir()
        experts = draws()[1 + number]
        tensors = {}
        for expert in TUNED[number]:
            gate, up = experts.w13[expert].chunk(2)
            for proj, weight in zip(PROJS, (gate, up, experts.w2[expert]), strict=True):
                name = self.spec.expert_tensor_name(LAYER_ID, expert, proj)
                tensors[name] = weight.contiguous()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        write_expert_config(folder / EXPERT_CONFIG_NAME, {LAYER_ID: tuple(TUNED[number])})
        if number != STORED:
            return folder
        out = self._folder / f"a{number}-int8"
        quantise_adapter(read_manifest(folder, self.spec), self.spec, out)
        return out


class Tiered:
    """One rank's layer with `num_rows` rows; adapters 0 to 2 have slots."""

    def __init__(
        self,
        case: Case,
        files: Files,
        num_rows: int,
        memory: str = "virtual",
        read_threads: int | None = None,
    ) -> None:
        self.case, self.files = case, files
        config = config_of(files, num_rows, memory, read_threads)
        module = make_layer(case.base, SCHEME, case.rank)
        model = torch.nn.ModuleList([module])
        layers = build.bind_layers(model, files.spec)
        layer = layers[LAYER_ID]
        assert isinstance(layer, TieredLayer)
        self.module, self.layer = module, layer
        self.tiers = build_tiers(model, layers, files.spec, config, str(files.base))
        self.plane = AdapterPlane(layers, files.spec, config, is_resident=False, files=self.tiers)
        self.tags = BatchTags(NUM_TOKENS, "cpu")
        build.attach_rerouting(model, layers, self.tags, "fused", tiers=self.tiers)
        for number in range(MAX_ADAPTERS):
            self.load(number)

    def load(self, number: int) -> None:
        path = str(self.files.adapter(number))
        self.plane.load(AdapterSource(f"id-{number}", f"a{number}", path))
        self.plane.ensure_on_device({f"id-{number}"})

    def run(self, adapters: Sequence[int], batch: Any = None) -> torch.Tensor:
        """Tokens of these adapters, -1 = base."""
        slots = [-1 if n < 0 else self.plane.slot_of(f"id-{n}") for n in adapters]
        self.tags.set(torch.tensor(slots, dtype=torch.int32))
        self.tiers.tier.begin(None)
        return forward(self.module, batch or self.case.batch)

    def compare(self) -> dict[str, Any]:
        case, whole = self.case, NUM_TOKENS
        mixed = slots_of(whole)
        wanted = torch.stack([case.alone[n + 1][t] for t, n in enumerate(mixed)])
        found: dict[str, Any] = {"mixed batch": compare(self.run(mixed), wanted)}
        for number in range(-1, MAX_ADAPTERS):
            seen = self.run([number] * whole)
            found[f"adapter {number}"] = compare(seen, case.expected[number + 1])
        alone = [self.run([n], case.token(t)) for t, n in enumerate(mixed)]
        found["each token alone"] = compare(torch.cat(alone), wanted)
        self.plane.unload("id-1")
        self.load(3)
        found["another adapter"] = compare(self.run([3] * whole), case.expected[4])
        for number in (0, 2, 3):
            self.plane.unload(f"id-{number}")
        found["base alone"] = compare(self.run([-1] * whole), case.expected[0])
        self.plane.check_integrity()
        self.tiers.tier.decisions.check_integrity()
        return found

    def close(self) -> int:
        """Loads on demand since the start."""
        self.tiers.tier.close()
        return self.tiers.tier.totals().num_loads


def config_of(
    files: Files, num_rows: int, memory: str = "virtual", read_threads: int | None = None
) -> EsftConfig:
    config = EsftConfig(
        MAX_ADAPTERS,
        MAX_EXPERTS,
        expert_memory=memory,  # type: ignore[arg-type]
        quantised_adapters=str(files.copies),
        tiers=TierConfig(num_rows, TOP_K, "lfu", read_threads),
    )
    config.export()
    current_config.cache_clear()
    return config


def compare_rows(case: Case, files: Files) -> dict[str, Any]:
    found = {}
    for num_rows in NUM_ROWS:
        tiered = Tiered(case, files, num_rows, "padded" if num_rows == NUM_EXPERTS else "virtual")
        found[str(num_rows)] = {**tiered.compare(), "loads": tiered.close()}
    return found


def with_wrong_scales(case: Case, files: Files) -> dict[str, str]:
    """What comparing says where an expert comes with another's scales, its row's last, or none."""

    def judge(tiered: Tiered) -> str:
        seen = [tiered.run([n] * NUM_TOKENS) for n in range(-1, MAX_ADAPTERS)]
        tiered.close()
        return ", ".join(compare(a, b) for a, b in zip(seen, case.expected, strict=False))

    others = Tiered(case, files, TOP_K)
    places = others.tiers.tier.layers[0].places
    kept = [place.scales for place in places.values()]
    for slot, scales in zip(list(places), [*kept[1:], kept[0]], strict=True):
        places[slot] = replace(places[slot], scales=scales)
    found = {"another's": judge(others)}

    with patch.object(ExpertReader, "_read_scales", lambda *_: None):
        found["none"] = judge(Tiered(case, files, TOP_K))
    found["right"] = judge(Tiered(case, files, TOP_K))
    return found


def counted(case: Case, files: Files) -> dict[str, Any]:
    """Bytes, as the layer says and as its tensors are."""
    tiered = Tiered(case, files, 5, "padded")
    layer, usage = tiered.layer, tiered.layer.memory.usage()
    assert layer.scales is not None
    tensors = (layer.w13, layer.w2, *layer.scales)
    tiered.close()
    return {
        "row_bytes": layer.slot_bytes,
        "of tensors": sum(tensor.nbytes for tensor in tensors) // 5,
        "mapped": usage.mapped_bytes,
        "copies": len([f for f in files.copies.iterdir() if "int8" in f.name]),
    }


def read_by(case: Case, files: Files) -> dict[str, Any]:
    """What the reader asks before each piece; threads for what is on demand, 3 and chosen."""
    found: dict[str, Any] = {}
    for read_threads in (3, None):
        tiered = Tiered(case, files, 5, read_threads=read_threads)
        names = [each.name for each in threading.enumerate()]
        found[str(read_threads)] = sum(name.startswith("expert-read") for name in names)
        found["asks"] = tiered.tiers.reader.before_piece.__qualname__
        tiered.close()
    return found


def refused(files: Files) -> str:
    """What SGLang is told when it creates a layer in another scheme, with --expert-cache."""
    config_of(files, TOP_K)
    return refusal(lambda: make_layer({}, SCHEMES["fp8-tensor"], Rank()))


def main() -> None:
    hook_ledger.install(hook_table.CPU_HOOKS)
    cases = [Case(SCHEME, rank) for group in RANKS.values() for rank in group]
    EsftConfig(MAX_ADAPTERS, MAX_EXPERTS).export()
    hook_ledger.install(hook_table.WEAVE_HOOKS)
    with tempfile.TemporaryDirectory() as root:
        files = Files(Path(root) / "0", cases[0])
        results = {
            "comparisons": {str(case.rank): compare_rows(case, files) for case in cases},
            "differ": len({str(e.float().sum().item()) for e in cases[0].expected}),
            "wrong scales": with_wrong_scales(cases[0], files),
            "counted": counted(cases[0], files),
            "read by": read_by(cases[0], files),
            "refused": refused(files),
        }
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    with torch.no_grad():
        main()
