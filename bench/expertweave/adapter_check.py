"""What looking for NaNs adds to reading an adapter into host memory.

    read_adapter with its check, and with one that looks at nothing -> ratios of pairs

The file is in the page cache, so this is the most that the check can add.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import save_file

from bench.common.pairing import Taken, interleave, ratios, timed
from bench.common.record import write_result
from sgl_esft.formats.adapter_config import write_expert_config
from sgl_esft.formats.finite import FiniteCheck
from sgl_esft.formats.manifest import AdapterManifest, read_manifest
from sgl_esft.formats.model_spec import MoeSpec, expert_keys
from sgl_esft.weave.host_cache import read_adapter
from sgl_esft.weave.moe_layer import ExpertShard

# An expert of DeepSeek-V2-Lite.
SPEC = MoeSpec("DeepseekV2ForCausalLM", 2, (1,), 64, 2048, 1408, "bfloat16")


def write_adapter(folder: Path, num_experts: int) -> AdapterManifest:
    """One layer of random experts."""
    experts = {1: tuple(range(num_experts))}
    write_expert_config(folder / "expert_cfg.json", experts)
    tensors = {
        SPEC.expert_tensor_name(*key): torch.randn(SPEC.expert_tensor_shape(key[2])).bfloat16()
        for key in expert_keys(experts)
    }
    save_file(tensors, folder / "model.safetensors")
    return read_manifest(folder, SPEC)


def readers(manifest: AdapterManifest) -> dict[str, Callable[[], Taken]]:
    """Reading with the check and without it."""
    whole = ExpertShard(range(SPEC.num_experts), range(SPEC.expert_intermediate_size))

    def read() -> Taken:
        return timed(lambda: read_adapter("bench", manifest, {1: whole}))

    def unchecked() -> Taken:
        with mock.patch.object(FiniteCheck, "holds", return_value=True):
            return read()

    return {"checked": read, "unchecked": unchecked}


def main() -> None:
    """Measure and write bench/results/adapter_check.json."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--experts", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        manifest = write_adapter(Path(folder), options.experts)
        taken = interleave(readers(manifest), options.rounds)
    over = ratios(taken["checked"], taken["unchecked"])
    print(f"with the check over without it: {over}")
    write_result(
        "adapter_check",
        {
            "what": "reading an adapter into host memory with the check for NaNs, over without",
            "adapter_bytes": manifest.num_bytes,
            "rounds": options.rounds,
            "over_unchecked": over,
        },
    )


if __name__ == "__main__":
    main()
