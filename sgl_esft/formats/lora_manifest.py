"""A LoRA adapter folder, checked in full before a byte is allocated for it.

    folder + LoraTargets -> [read_lora_manifest] -> LoraManifest -> plugin/lora_store.py

In: `adapter_config.json` and ``*.safetensors`` (headers only). Out: where the matrices of each
layer lie. A manifest exists only for an adapter that fits the base model exactly.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from sgl_esft.config import EsftConfig, LoraLimits
from sgl_esft.errors import (
    AdapterExistsError,
    AdapterFormatError,
    AdapterMismatchError,
    AdapterNotFiniteError,
    InvariantError,
    UnsupportedAdapterError,
)
from sgl_esft.formats.adapter_config import LORA_CONFIG_NAME, AdapterKind, kind_of
from sgl_esft.formats.adapter_paths import (
    adapter_weight_files,
    resolve_adapter_path,
    validate_adapter_name,
)
from sgl_esft.formats.checkpoint import TensorBytes
from sgl_esft.formats.finite import FiniteCheck
from sgl_esft.formats.lora_config import LoraConfig, read_lora_config
from sgl_esft.formats.lora_targets import LoraModule, LoraTargets, targets_of
from sgl_esft.formats.manifest import AdapterManifest
from sgl_esft.formats.model_spec import DTYPE_BYTES
from sgl_esft.formats.safetensors_header import SafetensorsHeader, TensorInfo, read_header

Side: TypeAlias = Literal["A", "B"]
# (module, which of its parts, side)
LoraKey: TypeAlias = tuple[LoraModule, int, Side]

# PEFT's names: of the model within its wrapper, and of a single adapter within that.
_NAME: Final = re.compile(
    r"(?:base_model\.model\.)?(?P<projection>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight"
)
_LAYER: Final = re.compile(r"model\.layers\.[0-9]+\.(?P<rest>.+)")
# The end of a projection's name -> why it takes no LoRA here.
_NO_LORA: Final = (
    (
        re.compile(r".*\.experts(\..+)?"),
        "routed experts take no LoRA beside ESFT: SGLang would wrap the whole MoE layer, whose "
        "experts are woven. Train attention and dense layers, or tune whole experts by ESFT "
        "(docs/guide_adapters.md)",
    ),
    (re.compile(r".*\.(gate|shared_expert_gate)"), "the router is shared by all adapters"),
    (
        re.compile(r"(.*\.)?(embed_tokens|lm_head)"),
        "embeddings and the head take no LoRA beside ESFT",
    ),
)


@dataclass(frozen=True)
class LoraTensor:
    """One matrix: which file, under which name, where in it. A is [rank, in], B is [out, rank]."""

    file: Path
    name: str
    info: TensorInfo


@dataclass(frozen=True)
class LoraManifest:
    """A validated LoRA adapter: each layer that it changes has both matrices."""

    path: Path
    config: LoraConfig
    tensors: Mapping[LoraKey, LoraTensor]
    num_bytes: int  # of its matrices, as stored

    kind: AdapterKind = "lora"
    num_experts: int = 0  # it replaces none

    @property
    def files(self) -> tuple[Path, ...]:
        """The safetensors files that hold matrices, in the order of their names."""
        return tuple(sorted({tensor.file for tensor in self.tensors.values()}))

    @property
    def modules(self) -> tuple[LoraModule, ...]:
        """The layers that it changes."""
        return tuple(dict.fromkeys(module for module, _, _ in self.tensors))

    @property
    def targets(self) -> tuple[str, ...]:
        """What adapter_config.json calls them, sorted."""
        return tuple(sorted({module.parts[place].target for module, place, _ in self.tensors}))


def read_lora_manifest(path: Path, targets: LoraTargets, max_rank: int) -> LoraManifest:
    """Validate the folder against the base model; reads JSON and safetensors headers only.

    Raises AdapterFormatError, UnsupportedAdapterError or AdapterMismatchError; the message names
    the file or tensor, the value seen and the value expected.
    """
    if kind_of(path) != "lora":
        raise AdapterFormatError(f"the folder holds no {LORA_CONFIG_NAME}: it is no LoRA adapter.")
    files = adapter_weight_files(path)
    config = read_lora_config(path)
    if config.rank > max_rank:
        raise AdapterMismatchError(
            f"the adapter has rank {config.rank}, and the server has room for rank {max_rank}: "
            f"start it with --max-lora-rank {config.rank} or more."
        )
    tensors: dict[LoraKey, LoraTensor] = {}
    for header, name, info in _tensors_of(files):
        key = _key_of(name, targets)
        if key in tensors:
            raise AdapterFormatError(f"{name[:200]} is there twice: in {header.path.name} too.")
        _check_shape(name, info, key, config.rank)
        tensors[key] = LoraTensor(header.path, name, info)
    _check_complete(tensors, config)
    num_bytes = sum(tensor.info.num_bytes for tensor in tensors.values())
    return LoraManifest(path, config, tensors, num_bytes)


def _tensors_of(files: tuple[Path, ...]) -> Iterator[tuple[SafetensorsHeader, str, TensorInfo]]:
    for file in files:
        header = read_header(file)
        for name, info in header.tensors.items():
            yield header, name, info


def _key_of(name: str, targets: LoraTargets) -> LoraKey:
    found = _NAME.fullmatch(name)
    if found is None:
        raise UnsupportedAdapterError(
            f"tensor {name[:200]!r} is no LoRA matrix of a linear layer: only those can be served."
        )
    known = targets.by_projection.get(found["projection"])
    if known is None:
        raise _unknown(found["projection"], targets)
    module, place = known
    return module, place, "A" if found["side"] == "A" else "B"


def _unknown(
    projection: str, targets: LoraTargets
) -> UnsupportedAdapterError | AdapterMismatchError:
    """A layer that takes no LoRA, or that this base does not have."""
    for pattern, reason in _NO_LORA:
        if pattern.fullmatch(projection):
            return UnsupportedAdapterError(f"the adapter changes {projection[:200]}: {reason}.")
    inner = _LAYER.fullmatch(projection)
    served = {name.split(".", 3)[3] for name in targets.by_projection}
    if inner is not None and inner["rest"] in served:
        return AdapterMismatchError(
            f"the adapter changes {projection[:200]}, which the base model does not have there. "
            "Was the adapter made for another model?"
        )
    return UnsupportedAdapterError(
        f"the adapter changes {projection[:200]}, and this base takes LoRA in "
        f"{', '.join(targets.names)}. Train these, or name more by --lora-target-modules."
    )


def _check_shape(name: str, info: TensorInfo, key: LoraKey, rank: int) -> None:
    module, place, side = key
    is_a = side == "A"
    shape = (rank, module.in_features) if is_a else (module.parts[place].out_features, rank)
    if info.shape != shape:
        raise AdapterMismatchError(
            f"tensor {name[:200]} has shape {list(info.shape)}; for r = {rank} and this base model "
            f"it is {list(shape)}. Was the adapter made for another model?"
        )
    if info.dtype not in DTYPE_BYTES:
        raise AdapterMismatchError(
            f"tensor {name[:200]} has dtype {info.dtype}: save it as one of "
            f"{', '.join(DTYPE_BYTES)}."
        )


def _check_complete(tensors: Mapping[LoraKey, LoraTensor], config: LoraConfig) -> None:
    if not tensors:
        raise AdapterFormatError("the adapter holds no LoRA matrix: it is empty.")
    for (module, place, side), tensor in tensors.items():
        other: Side = "B" if side == "A" else "A"
        if (module, place, other) not in tensors:
            raise AdapterFormatError(f"{tensor.name[:200]} has no lora_{other} beside it.")
    held = {module.parts[place].name for module, place, _ in tensors}
    for target in config.targets or ():
        if not any(f".{name}".endswith(f".{target}") for name in held) and "." not in target:
            raise AdapterFormatError(
                f"{LORA_CONFIG_NAME} lists {target[:100]!r} in target_modules, and the files have "
                "no such matrix: they are not whole, or list what there is."
            )


# A validated adapter of either kind.
AnyManifest: TypeAlias = AdapterManifest | LoraManifest

# Everything that is checked of a LoRA adapter before it is read.
#
# config.json, --lora-target-modules -> [served_targets] -> name, folder -> [check_lora] -> manifest


def served_targets(base_config: Mapping[str, object], limits: LoraLimits) -> LoraTargets:
    """The layers of a base that this server's LoRA adapters may change.

    Raises ConfigError for unknown --lora-target-modules, UnsupportedModelError.
    """
    targets = targets_of(base_config)
    return targets if limits.targets is None else targets.only(limits.targets)


def check_lora(
    name: str, folder: str, loaded: Collection[str], targets: LoraTargets, config: EsftConfig
) -> LoraManifest:
    """Everything that is checked before an adapter is read; `loaded` are the names in use.

    Raises one of the Adapter* errors.
    """
    validate_adapter_name(name)
    if name in loaded:
        raise AdapterExistsError(
            f"adapter {name!r} is already loaded: unload it first, or choose another name"
        )
    if config.lora is None:
        raise InvariantError(f"adapter {name!r} is checked as LoRA on a server without LoRA")
    path = resolve_adapter_path(folder, config.adapter_root_path)
    return read_lora_manifest(path, targets, config.lora.max_rank)


def read_matrix(
    adapter: str, tensor: LoraTensor, on_read: Callable[[int], None] = lambda num_bytes: None
) -> bytearray:
    """One matrix's bytes; `on_read` is told of each few megabytes.

    Raises AdapterNotFiniteError, and AdapterFormatError when a file changed or broke after it was
    validated.
    """
    check, raw = FiniteCheck(tensor.info.dtype), bytearray()
    try:
        for chunk in TensorBytes(tensor.file, tensor.info).chunks():
            if not check.holds(chunk):
                raise AdapterNotFiniteError(
                    f"adapter {adapter!r} has a NaN or an infinity in {tensor.name[:200]}: save it "
                    "from a checkpoint before its loss diverged, or train it with a lower "
                    "learning rate."
                )
            raw += chunk
            on_read(len(chunk))
    except OSError as error:
        raise AdapterFormatError(f"{tensor.file.name} cannot be read: {error}.") from error
    return raw
