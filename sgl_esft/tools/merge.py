"""Base checkpoint + adapter -> the merged checkpoint that any engine serves.

    base folder, adapter folder -> [merge_adapter] -> Hugging Face checkpoint

The merged model is what an adapter's answers are measured against. Only expert bytes change, with
those of shared experts where the adapter has them: a shard keeps its name, its header and the place
of every tensor in it. Over a quantised base, the experts are quantised first, as the base's were:
to the byte what quantising the merged model gives.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from sgl_esft.errors import UnsupportedModelError
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

_COPY_NAME: Final = ".adapter"


def merge_adapter(base_dir: Path, adapter_dir: Path, out_dir: Path) -> None:
    """Write `out_dir`: the base checkpoint with the adapter's experts in place of its own.

    Config, tokenizer and other files of the base's top folder come along. Needs the base's size
    in disk space, over a quantised one the adapter's besides for a while, and little memory. Raises
    as `read_manifest` and `open_checkpoint` do, and ConfigError if `out_dir` exists and is not
    empty; nothing is left behind then.
    """
    base = open_checkpoint(base_dir, may_be_quantised=True)
    manifest = read_manifest(adapter_dir, base.spec)
    _check_shared(base, manifest)
    with new_folder(out_dir) as folder, _as_the_base(manifest, base.spec, folder) as fitting:
        tuned = _tuned_tensors(base.spec, fitting)
        for file in companions(base_dir, keeps_index=True):
            shutil.copyfile(file, folder / file.name)
        for shard in base.shards:
            shutil.copyfile(shard, folder / shard.name)
            _overwrite(folder / shard.name, shard, base, tuned)


def _check_shared(base: Checkpoint, manifest: AdapterManifest) -> None:
    """Opening a base checks its routed experts. Raises UnsupportedModelError."""
    for key in manifest.shared:
        name, part = base.spec.shared_tensor_name(*key), base.spec.shared_part(key[1])
        info = base.tensors[name].info if name in base.tensors else None
        if info is None or (info.dtype, info.shape) != (part.dtype, part.shape):
            raise UnsupportedModelError(
                f"{base.path} has tensor {name} as "
                f"{'none' if info is None else f'{info.dtype} {list(info.shape)}'}, but its "
                f"config.json says {part.dtype} {list(part.shape)}."
            )


def _tuned_tensors(spec: MoeSpec, manifest: AdapterManifest) -> dict[str, TensorBytes]:
    """Base tensor name -> the adapter's bytes for it; both have the same dtype and shape."""
    headers = {file: read_header(file) for file in manifest.files}
    numbers, *scales = spec.expert_parts("gate")
    stored = [(numbers, manifest.tensors), *((part, manifest.scales) for part in scales)]
    tuned = {
        spec.expert_part_name(key, part): location
        for part, locations in stored
        for key, location in locations.items()
    }
    tuned |= {spec.shared_tensor_name(*key): where for key, where in manifest.shared.items()}
    return {
        name: TensorBytes(location.file, location.info_in(headers[location.file]))
        for name, location in tuned.items()
    }


@contextmanager
def _as_the_base(
    manifest: AdapterManifest, spec: MoeSpec, folder: Path
) -> Iterator[AdapterManifest]:
    """The adapter as the base's experts are stored: itself, or a copy that lies in `folder`."""
    if manifest.scheme == spec.scheme:
        yield manifest
        return
    # Here, so that no other command waits for torch.
    from sgl_esft.quant.adapter_copy import write_quantised

    copy = folder / _COPY_NAME
    copy.mkdir()
    write_quantised(manifest, spec, copy, lambda num_bytes: None)
    yield read_manifest(copy, spec)
    shutil.rmtree(copy)


def _overwrite(copy: Path, shard: Path, base: Checkpoint, tuned: Mapping[str, TensorBytes]) -> None:
    """Put the tuned bytes where the base's were in `shard`, of which `copy` is a copy."""
    with copy.open("r+b") as stream:
        for name, source in tuned.items():
            here = base.tensors[name]
            if here.file == shard:
                stream.seek(here.info.start)
                copy_to(source, stream)
