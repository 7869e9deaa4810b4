"""The demo zoo for quantised experts: in bfloat16, experts wide enough for blocks of 128.

    zoo (float32, experts 64 wide) -> [QuantisedZoo] -> base, adapters (bfloat16, 256 wide)
                                                     -> base, merged, adapters, in a scheme

The rows and columns that are added to an expert are zeros, so it computes what it did. Trained
models have margins: their greedy answers do not hang on the last bit of a bfloat16.
"""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from sgl_esft import zoo
from sgl_esft.formats.manifest import read_manifest
from sgl_esft.formats.model_spec import read_moe_spec
from sgl_esft.quant.adapter_copy import quantise_adapter
from sgl_esft.quant.write import quantise_checkpoint
from sgl_esft.tools.merge import merge_adapter

WIDTH = 256  # a block for each of two ranks: on a CPU, SGLang pads what has fewer


class QuantisedZoo:
    """Each folder is made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.base = cache(self._base)
        self.adapter = cache(self._adapter)
        self.merged = cache(self._merged)
        self.quantised = cache(self._quantised)
        self.stored = cache(self._stored)

    def _base(self) -> Path:
        out = self._folder / "base"
        shutil.copytree(zoo.base_path(), out)
        config = json.loads((out / "config.json").read_text())
        config |= {"dtype": "bfloat16", "moe_intermediate_size": WIDTH}
        (out / "config.json").write_text(json.dumps(config))
        widen(out)
        return out

    def _adapter(self, name: str) -> Path:
        out = self._folder / "adapters" / name
        shutil.copytree(zoo.adapter_paths()[name], out)
        widen(out)
        return out

    def _merged(self, name: str) -> Path:
        out = self._folder / "merged" / name
        merge_adapter(self.base(), self.adapter(name), out)
        return out

    def _quantised(self, name: str | None, scheme: str) -> Path:
        """The base, or an adapter's merged checkpoint, in this scheme."""
        out = self._folder / scheme / (name or "base")
        quantise_checkpoint(self.base() if name is None else self.merged(name), scheme, out)
        return out

    def _stored(self, name: str, scheme: str) -> Path:
        """The adapter, stored quantised."""
        out = self._folder / scheme / "adapters" / name
        spec = read_moe_spec(self.quantised(None, scheme))
        quantise_adapter(read_manifest(self.adapter(name), spec), spec, out)
        return out


def widen(folder: Path) -> None:
    """Rewrite the folder's tensors in bfloat16, experts' with zeros behind what they had."""
    (file,) = folder.glob("*.safetensors")
    tensors = {name: _wide(name, tensor) for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def _wide(name: str, tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.bfloat16()
    if "experts." not in name:
        return tensor
    missing = WIDTH - tensor.shape[1 if "down_proj" in name else 0]
    padding = (0, missing, 0, 0) if "down_proj" in name else (0, 0, 0, missing)
    return F.pad(tensor, padding).contiguous()
