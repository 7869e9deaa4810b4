"""One rank with adapters of both kinds, and the manager that SGLang's HTTP process has of it.

    SglangEngine --load, unload--> [BothKinds] -> MixedManager -> our plane over random layers
                                                              -> SGLang's LoRA manager, pool, layers

All of SGLang's LoRA runs here but its kernels: a small model has one linear layer of SGLang's for
each of its decoder layers, and the CPU platform multiplies. What a batch computes is compared with
what its adapters' files say.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file

from sgl_esft import sglang_api
from sgl_esft.config import EsftConfig, LoraLimits
from sgl_esft.formats.adapter_config import kind_of
from sgl_esft.formats.lora_manifest import AnyManifest, check_lora
from sgl_esft.formats.lora_targets import LoraTargets, targets_of
from sgl_esft.formats.manifest import check_loadable
from sgl_esft.formats.model_spec import MoeSpec, read_moe_spec
from sgl_esft.plugin.lora_store import LoraStore
from sgl_esft.plugin.mixed_manager import MixedManager
from sgl_esft.weave.batch_tags import BASE, BatchTags
from tests.fast.lifecycle.fake_manager import FakeManager
from tests.support.lora_factory import LORA_CONFIG, LORA_WEIGHTS, scaling_of
from tests.support.random_layers import Rank
from tests.support.woven_device import Device

ESFT_SLOTS, LORA_SLOTS = 2, 3
CONFIG = EsftConfig(ESFT_SLOTS, 2, lora=LoraLimits(LORA_SLOTS, 8))
TARGET = "o_proj"


@contextmanager
def in_sglangs_context() -> Iterator[None]:
    """SGLang's own settings of a server with one rank, taken away afterwards."""
    from sglang.srt.runtime_context import reset_context

    from tests.fast.layer.real_fused_moe import enter

    with mock.patch.dict("os.environ"):
        enter(Rank())
        try:
            yield
        finally:
            reset_context()


@dataclass(frozen=True)
class Ground:
    """A base, and what is read off it once."""

    base: Path
    spec: MoeSpec
    targets: LoraTargets
    config: Mapping[str, Any]

    @classmethod
    def of(cls, base: Path) -> Ground:
        config = json.loads((base / "config.json").read_text())
        return cls(base, read_moe_spec(base), targets_of(config).only({TARGET}), config)

    def check(self, name: str, folder: str, taken: Sequence[str]) -> AnyManifest:
        """What the process that serves HTTP checks before any rank hears of an adapter."""
        if kind_of(Path(folder)) == "lora":
            return check_lora(name, folder, taken, self.targets, CONFIG)
        return check_loadable(name, folder, taken, self.spec, CONFIG)


class BothKinds(FakeManager):
    """A TokenizerManager whose one rank is real. `told`: what SGLang's messages asked of it."""

    def __init__(self, ground: Ground) -> None:
        super().__init__()
        self.ground = ground
        self.enable_lora = True
        self._lora_release_tasks: set[asyncio.Task[Any]] = set()
        self.unloads: Counter[str] = Counter()  # adapter id -> unloads that a rank has carried out
        self.device = Device(ground.spec, CONFIG, Rank(), is_resident=False)
        self.layers, inner = make_lora(ground)
        self.rank = MixedManager(
            self.device.plane,
            BatchTags(16, "cpu"),
            sglang_api.make_lora_result,
            None,
            lora=make_store(ground, inner),
        )

    @property
    def inner(self) -> Any:
        """SGLang's LoRA manager."""
        return self.rank.lora.inner

    async def update_lora_adapter_communicator(self, message: Any) -> list[Any]:
        await asyncio.sleep(0)
        if hasattr(message, "lora_path"):
            return [self.rank.load_lora_adapter(message.to_ref())]
        answer = self.rank.unload_lora_adapter(message.to_ref())
        if answer.success:
            self.unloads[message.lora_id] += 1
        return [answer]

    # ---- what a batch computes ----

    def run(self, batch: Sequence[tuple[str | None, Sequence[tuple[str, Path]]]]) -> None:
        """One step. batch: each request's id and (adapter id, folder) of its adapters."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        ids = [lora_id for lora_id, _ in batch]
        self.rank.fetch_new_loras(set(ids))
        lengths = [1 + place % 2 for place in range(len(ids))]
        self.rank.prepare_lora_batch(
            SimpleNamespace(
                forward_mode=ForwardMode.EXTEND,
                lora_ids=ids,
                extend_seq_lens_cpu=lengths,
                batch_size=len(ids),
            )
        )
        folders = [{kind_of(path): (i, path) for i, path in parts} for _, parts in batch]
        self._check_tags(folders, lengths)
        self._check_lora(folders, lengths)

    def _check_tags(self, folders: Sequence[Mapping[str, Any]], lengths: Sequence[int]) -> None:
        slots = []
        for parts in folders:
            adapter_id, folder = parts.get("esft", (None, None))
            if folder is not None:
                self.device.check(folder, adapter_id)
            slots.append(BASE if folder is None else self.device.plane.slot_of(adapter_id))
        expected = [slot for slot, n in zip(slots, lengths, strict=True) for _ in range(n)]
        assert self.rank.tags.token_adapter_slots(len(expected)).tolist() == expected

    def _check_lora(self, folders: Sequence[Mapping[str, Any]], lengths: Sequence[int]) -> None:
        paths = [parts.get("lora", (None, None))[1] for parts in folders]
        of_token = [path for path, n in zip(paths, lengths, strict=True) for _ in range(n)]
        for layer in self.layers:
            x = torch.linspace(-1, 1, layer.base_layer.input_size).repeat(len(of_token), 1)
            x *= torch.arange(1, len(of_token) + 1)[:, None]
            plain = x @ layer.base_layer.weight.T
            changed = [
                torch.zeros_like(plain[0]) if path is None else change_of(path, layer.path) @ row
                for path, row in zip(of_token, x, strict=True)
            ]
            expected = plain + torch.stack(changed)
            found = layer(x)[0]
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def change_of(folder: Path, path: str) -> torch.Tensor:
    """scaling * B A of one layer, [out, in], by the adapter's files."""
    tensors = load_file(folder / LORA_WEIGHTS)
    a, b = (tensors[f"base_model.model.{path}.lora_{side}.weight"] for side in "AB")
    return scaling_of(json.loads((folder / LORA_CONFIG).read_text())) * b @ a


def make_lora(ground: Ground) -> tuple[list[Any], Any]:
    """The layers that SGLang's LoRA manager has wrapped, and the manager."""
    from sglang.srt.layers.linear import ReplicatedLinear

    from sgl_esft.plugin import lora_layers

    generator = torch.Generator().manual_seed(0)
    model, leaves = torch.nn.Module(), []
    model.config = SimpleNamespace(**ground.config)  # type: ignore[assignment]
    model.model = torch.nn.Module()
    model.model.layers = torch.nn.ModuleList()
    for module in ground.targets.modules:
        sizes = (module.in_features, module.out_features)
        linear = ReplicatedLinear(*sizes, bias=False, params_dtype=torch.float32)
        linear.weight.data.normal_(generator=generator).div_(math.sqrt(sizes[0]))
        layer = torch.nn.Module()
        layer.self_attn = torch.nn.Module()
        layer.self_attn.o_proj = linear
        model.model.layers.append(layer)
        leaves.append(layer.self_attn)
    runner = SimpleNamespace(
        model=model,
        model_config=SimpleNamespace(hf_config=model.config),
        load_config=None,
        dtype=torch.float32,
        server_args=None,
        device="cpu",
    )
    assert CONFIG.lora is not None
    inner = lora_layers.make_lora_manager(runner, CONFIG.lora, ground.targets)
    layers = [leaf.o_proj for leaf in leaves]
    for layer, module in zip(layers, ground.targets.modules, strict=True):
        layer.path = module.path
    return layers, inner


def make_store(ground: Ground, inner: Any) -> LoraStore:
    """As plugin/mixed_manager.py makes it of a loaded model."""
    from sgl_esft.plugin import lora_layers

    return LoraStore(
        inner,
        lambda name, folder: check_lora(name, folder, (), ground.targets, CONFIG),
        lambda i, name, path, pinned: sglang_api.make_adapter_ref(name, path, pinned, i),
        lora_layers.load_tensors,
    )
