"""Base checkpoint + adapter -> the merged checkpoint that any engine serves.

    base folder, adapter folder -> [merge_adapter] -> Hugging Face checkpoint

The merged model is what an adapter's answers are measured against. Only expert bytes change: a
shard keeps its name, its header and the place of every tensor in it.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from sgl_esft.formats.checkpoint import (
    Checkpoint,
    TensorBytes,
    companions,
    copy_to,
    new_folder,
    open_checkpoint,
)
from sgl_esft.formats.manifest import AdapterManifest, read_manifest
from sgl_esft.formats.model_spec import MoeSpec
from sgl_esft.formats.safetensors_header import read_header


def merge_adapter(base_dir: Path, adapter_dir: Path, out_dir: Path) -> None:
    """Write `out_dir`: the base checkpoint with the adapter's experts in place of its own.

    Config, tokenizer and other files of the base's top folder come along. Needs the base's size
    in disk space and a few megabytes of memory. Raises as `read_manifest` and `open_checkpoint`
    do, and ConfigError if `out_dir` exists and is not empty; nothing is left behind then.
    """
    base = open_checkpoint(base_dir)
    manifest = read_manifest(adapter_dir, base.spec)
    tuned = _tuned_tensors(base.spec, manifest)
    with new_folder(out_dir) as folder:
        for file in companions(base_dir, keeps_index=True):
            shutil.copyfile(file, folder / file.name)
        for shard in base.shards:
            shutil.copyfile(shard, folder / shard.name)
            _overwrite(folder / shard.name, shard, base, tuned)


def _tuned_tensors(spec: MoeSpec, manifest: AdapterManifest) -> dict[str, TensorBytes]:
    """Base tensor name -> the adapter's bytes for it; both have the same dtype and shape."""
    headers = {file: read_header(file) for file in manifest.files}
    return {
        spec.expert_tensor_name(*key): TensorBytes(
            location.file, headers[location.file].tensors[location.name]
        )
        for key, location in manifest.tensors.items()
    }


def _overwrite(copy: Path, shard: Path, base: Checkpoint, tuned: Mapping[str, TensorBytes]) -> None:
    """Put the tuned bytes where the base's were in `shard`, of which `copy` is a copy."""
    with copy.open("r+b") as stream:
        for name, source in tuned.items():
            here = base.tensors[name]
            if here.file == shard:
                stream.seek(here.info.start)
                copy_to(source, stream)
