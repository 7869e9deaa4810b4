"""A base checkpoint with its routed experts quantised: what SGLang reads, and adapters fit.

    base folder -> [quantise_checkpoint] -> checkpoint folder, all or nothing
      every tensor's place is known from headers alone, so files are written from front to back of
      the base: one projection is read, rounded and written at a time, all else copied in chunks

Only routed experts change: SGLang 0.5.23 lets every scheme here leave the other layers alone, and
what is left alone is the same in the base and in a checkpoint that an adapter was merged into.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, Final

import torch

from sgl_esft.errors import UnsupportedModelError
from sgl_esft.formats.checkpoint import (
    INDEX_NAME,
    Checkpoint,
    TensorBytes,
    all_experts,
    companions,
    copy_to,
    new_folder,
    open_checkpoint,
)
from sgl_esft.formats.expert_scheme import ExpertPart, ExpertScheme, read_scheme
from sgl_esft.formats.model_spec import ExpertTensorKey, expert_keys
from sgl_esft.formats.strict_json import read_object
from sgl_esft.quant.rounding import quantise
from sgl_esft.quant.scheme_settings import choose_scheme, settings_of, unquantised_linears
from sgl_esft.quant.tensor_file import (
    check_room,
    file_header,
    raw_bytes,
    told_of_room,
    write_json,
)

FILE_BYTES: Final = 4_000_000_000
"""The most tensor bytes in one file, but for a tensor that is larger by itself."""

OnProgress = Callable[[int, int], None]
"""Bytes of tensors written so far, and in all."""


@dataclass(frozen=True)
class QuantisedCheckpoint:
    """What was written: bytes of tensors, before and after."""

    scheme: ExpertScheme
    base_bytes: int
    num_bytes: int


@dataclass(frozen=True)
class _Job:
    """One tensor of the base, and what becomes of it; `key` is None for one that is copied."""

    source: str
    key: ExpertTensorKey | None
    tensors: Mapping[str, ExpertPart]  # by name

    @cached_property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.tensors.values())


def quantise_checkpoint(
    base_dir: Path,
    scheme_name: str,
    out_dir: Path,
    on_progress: OnProgress = lambda done, total: None,
) -> QuantisedCheckpoint:
    """Write `out_dir`: the base, its routed experts in the scheme of this name.

    Takes memory of a few times one projection. Tokenizer and other files of the base's top folder
    come along. Raises UnsupportedModelError for a base that is quantised already, that SGLang
    cannot read in this scheme, or that holds a NaN; ConfigError for an unknown scheme, for an
    `out_dir` that exists and is not empty, and when there is no room. Whatever it raises, nothing
    is left.
    """
    config = read_object(base_dir / "config.json", UnsupportedModelError)
    if read_scheme(config) is not None:
        raise UnsupportedModelError(f"{base_dir} is quantised already: name an unquantised base.")
    base = open_checkpoint(base_dir)
    scheme = choose_scheme(scheme_name, base.spec, config)
    jobs = _jobs(base, scheme)
    num_bytes = sum(job.num_bytes for job in jobs)
    check_room(out_dir, num_bytes)
    writer = _Writer(base, scheme, num_bytes, on_progress)
    with told_of_room(out_dir, num_bytes), new_folder(out_dir) as folder:
        for file in companions(base_dir, keeps_index=False):
            shutil.copyfile(file, folder / file.name)
        writer.write(folder, jobs)
        settings = settings_of(scheme, unquantised_linears(_linears(base)))
        write_json(folder / "config.json", {**config, "quantization_config": settings})
    base_bytes = sum(tensor.info.num_bytes for tensor in base.tensors.values())
    return QuantisedCheckpoint(scheme, base_bytes, num_bytes)


def _jobs(base: Checkpoint, scheme: ExpertScheme) -> list[_Job]:
    """In the order in which the base's tensors lie in its files."""
    spec = replace(base.spec, scheme=scheme)
    routed = {spec.expert_tensor_name(*key): key for key in expert_keys(all_experts(spec))}
    jobs = []
    for name, tensor in sorted(base.tensors.items(), key=lambda item: _place(item[1])):
        key, info = routed.get(name), tensor.info
        if key is None:
            tensors = {name: ExpertPart("", info.dtype, info.shape)}
        else:
            tensors = {spec.expert_part_name(key, p): p for p in spec.expert_parts(key[2])}
        jobs.append(_Job(name, key, tensors))
    return jobs


def _place(tensor: TensorBytes) -> tuple[str, int, int]:
    return tensor.file.name, tensor.info.start, tensor.info.stop


def _files(jobs: Sequence[_Job]) -> list[list[_Job]]:
    """Runs of jobs with at most FILE_BYTES, or with one job."""
    files: list[list[_Job]] = [[]]
    num_bytes = 0
    for job in jobs:
        if files[-1] and num_bytes + job.num_bytes > FILE_BYTES:
            files.append([])
            num_bytes = 0
        files[-1].append(job)
        num_bytes += job.num_bytes
    return files


class _Writer:
    """Fills a folder with files of tensors and their index."""

    def __init__(
        self, base: Checkpoint, scheme: ExpertScheme, num_bytes: int, on_progress: OnProgress
    ) -> None:
        self._base, self._scheme = base, scheme
        self._num_bytes, self._num_done = num_bytes, 0
        self._on_progress = on_progress

    def write(self, folder: Path, jobs: Sequence[_Job]) -> None:
        files = _files(jobs)
        weight_map: dict[str, str] = {}
        for number, content in enumerate(files, 1):
            name = f"model-{number:05}-of-{len(files):05}.safetensors"
            weight_map |= {tensor: name for job in content for tensor in job.tensors}
            self._write_file(folder / name, content)
        index = {"metadata": {"total_size": self._num_bytes}, "weight_map": weight_map}
        write_json(folder / INDEX_NAME, index)

    def _write_file(self, path: Path, jobs: Sequence[_Job]) -> None:
        header, places = file_header({n: t for job in jobs for n, t in job.tensors.items()})
        with path.open("xb") as stream:
            stream.write(header)
            for job in jobs:
                self._write_job(stream, job, places)
                self._num_done += job.num_bytes
                self._on_progress(self._num_done, self._num_bytes)
            stream.flush()
            os.fsync(stream.fileno())

    def _write_job(self, stream: BinaryIO, job: _Job, places: dict[str, int]) -> None:
        if job.key is None:
            stream.seek(places[job.source])
            copy_to(self._base.tensors[job.source], stream)
            return
        parts = self._quantised(job.source, job.key)
        for name, part in job.tensors.items():
            stream.seek(places[name])
            stream.write(raw_bytes(parts[part.suffix]))

    def _quantised(self, name: str, key: ExpertTensorKey) -> dict[str, torch.Tensor]:
        layer, expert, proj = key
        partner, other = self._scheme.partner(proj), None
        if partner is not None:
            other = _load(self._base, self._base.spec.expert_tensor_name(layer, expert, partner))
        return quantise(_load(self._base, name), self._scheme, other, f"tensor {name}")


def _load(base: Checkpoint, name: str) -> torch.Tensor:
    tensor = base.tensors[name]
    buffer = bytearray()
    for chunk in tensor.chunks():
        buffer += chunk
    dtype = getattr(torch, tensor.info.dtype)
    return torch.frombuffer(buffer, dtype=dtype).reshape(tensor.info.shape)


def _linears(base: Checkpoint) -> set[str]:
    """Matrices of decoder layers that are no routed expert's: ``self_attn.q_proj``."""
    found = set()
    for name, tensor in base.tensors.items():
        if name.startswith("model.layers.") and name.endswith(".weight"):
            layer, _, module = name.removeprefix("model.layers.").partition(".")
            is_decoder = layer.isdecimal() and int(layer) < base.spec.num_layers
            if is_decoder and len(tensor.info.shape) == 2 and ".experts." not in module:
                found.add(module.removesuffix(".weight"))
    return found
