"""What a launch will start, worked out and checked before anything is started.

LaunchFlags -> plan_launch -> LaunchPlan (weaving, SGLang's arguments, environment)
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from sgl_esft import env, platform, zoo
from sgl_esft.config import DEFAULT_MAX_OVERTAKES, DEFAULT_SLOT_OVERTAKES, EsftConfig
from sgl_esft.errors import ConfigError, UnsupportedModelError, UserError
from sgl_esft.formats.adapter_paths import resolve_adapter_path, validate_adapter_name
from sgl_esft.formats.expert_scheme import ExpertScheme
from sgl_esft.formats.finite import check_weights
from sgl_esft.formats.lora_manifest import served_targets
from sgl_esft.formats.lora_targets import LoraTargets, targets_of
from sgl_esft.formats.manifest import read_manifest
from sgl_esft.formats.model_spec import MoeSpec, read_moe_spec
from sgl_esft.formats.strict_json import read_object
from sgl_esft.platform.device_ledger import DeviceLedger
from sgl_esft.ports import check_port_free
from sgl_esft.support import QUANTISED_DEVICES, WEAVING_DEVICES
from sgl_esft_launch import console, lora, resolved, tiers
from sgl_esft_launch.access import AccessPlan, plan_access
from sgl_esft_launch.arguments import last_value
from sgl_esft_launch.flags import LaunchFlags
from sgl_esft_launch.health import HealthFlags
from sgl_esft_launch.models import served_name

DEFAULT_MAX_ADAPTERS = 4
DEFAULT_MAX_EXPERTS = 13  # the most any adapter of the paper's table 1 has in a layer

_REFUSED_SGLANG_FLAGS = {
    "--lora-backend": "LoRA's layers are computed by the one that was shown",
    "--ep-num-redundant-experts": "the expert map is in the model's own expert ids",
    "--init-expert-location": "the expert map is in the model's own expert ids",
    "--speculative-algorithm": "draft models are not woven",
    "--tokenizer-worker-num": "adapter names are resolved in one tokenizer process",
    "--moe-a2a-backend": "weaving works with SGLang's standard dispatcher",
    **resolved.switches(resolved.WEAVING),
}

# SGLang has deprecated it: it makes --dp-size what --attn-dp-size is.
_OLD_DP_ATTENTION = "--enable-dp-attention"
# SGLang's model file splits attention's heads over all ranks.
_NO_DP_ATTENTION = frozenset({"MixtralForCausalLM"})

# Otherwise SGLang would take most of the machine's memory for the KV cache.
_CPU_KV_TOKENS = 65536

# Of a device with a byte budget: the rest is for activations, and for adapters that come later.
# SGLang would leave some gigabytes, whatever the device has.
_DEVICE_FRACTION = 0.9

_CPU_DEFAULTS = (
    ("--device", "cpu"),
    ("--attention-backend", "torch_native"),
    ("--sampling-backend", "pytorch"),
    ("--sleep-on-idle",),
)


@dataclass(frozen=True)
class LaunchPlan:
    """A checked launch."""

    model_path: str
    adapters: Mapping[str, Path]  # name -> folder, of ESFT adapters
    config: EsftConfig | None  # None = weaving off
    sglang_argv: tuple[str, ...]
    environment: Mapping[str, str]  # set where the user has not
    device_environment: Mapping[str, str]  # set whatever the user has
    device: str  # as torch calls it: cpu, cuda, npu; rocm
    host: str
    port: int
    access: AccessPlan
    health: HealthFlags
    log_format: str = "text"  # or json
    scheme: ExpertScheme | None = None  # how a woven base's experts are quantised
    loras: Mapping[str, Path] = field(default_factory=dict)  # name -> folder, of LoRA adapters

    @property
    def all_adapters(self) -> dict[str, Path]:
        """Those of both kinds that are loaded at start."""
        return {**self.adapters, **self.loras}


def plan_launch(flags: LaunchFlags, sglang_argv: Sequence[str]) -> LaunchPlan:
    """Check everything that can be checked without starting. Raises ConfigError, Adapter*."""
    _refuse(sglang_argv, flags.weave)
    _check_sizes(flags)
    check_port_free(flags.host, flags.port)
    access = plan_access(flags.access, flags.host, sglang_argv, weave=flags.weave)
    device_environment = _device_environment(flags)
    model_path = flags.model_path or str(zoo.base_path())
    adapters, loras = _named_adapters(flags), _named_loras(flags)
    config = scheme = None
    device = device_type()
    if flags.weave:
        _check_device(device)
        spec = base_spec(model_path)
        scheme = spec.scheme
        _check_parallelism(spec, sglang_argv)
        _check_scheme(scheme, device)
        _check_schedule(flags, sglang_argv)
        lora.check_served(flags.lora, spec, device, has_dp_attention=has_dp_attention(sglang_argv))
        config = _weaving(flags, model_path, spec, adapters, sglang_argv)
        config = _with_lora(config, flags, model_path, loras)
        if config.tiers is not None:
            tiers.check_device(device, config.tiers)
        if has_dp_attention(sglang_argv):
            check_resident(config, adapters)
    return LaunchPlan(
        model_path=model_path,
        adapters=adapters,
        config=config,
        sglang_argv=(
            *_own_argv(flags, model_path),
            *(_weave_argv(config, {**adapters, **loras}) if config else ()),
            *(tiers.argv(sglang_argv) if config and config.tiers else ()),
            *_scheme_argv(scheme),
            *_platform_argv(sglang_argv, Path(model_path), has_budget=bool(device_environment)),
            *console.level_argv([*sglang_argv, *(("--verbose",) if flags.verbose else ())]),
            *sglang_argv,
        ),
        environment=platform_environment(_num_ranks(flags, sglang_argv)),
        device_environment=device_environment,
        device=device,
        host=flags.host,
        port=flags.port,
        access=access,
        log_format=flags.log_format,
        scheme=scheme,
        loras=loras,
        health=flags.health,
    )


def known_adapters(launch: LaunchPlan) -> frozenset[str]:
    """What requests may name from the start: what is loaded, and what lies below the root."""
    from sgl_esft.lifecycle.catalogue import names_below

    root = None if launch.config is None else launch.config.adapter_root_path
    below: list[str] = []
    if launch.config is not None and root is not None and root.is_dir():
        below = names_below(root, launch.config.adapter_files)
    return frozenset([*launch.all_adapters, *below])


def has_dp_attention(argv: Sequence[str]) -> bool:
    """Whether a command line asks SGLang for it: by its flag or by the one it had before."""
    return _OLD_DP_ATTENTION in argv or last_value(argv, "--attn-dp-size") not in (None, "1")


def _refuse(sglang_argv: Sequence[str], weave: bool) -> None:
    for arg in sglang_argv:
        reason = _REFUSED_SGLANG_FLAGS.get(arg.split("=")[0])
        if weave and reason is not None:
            name = arg.split("=")[0]
            raise ConfigError(f"{name} cannot be used while weaving: {reason}; leave it out")


def device_type() -> str:
    """What engines of this machine run on: cpu (the CPU platform), npu, rocm or cuda."""
    if platform.is_active():
        return "cpu"
    import torch

    npu = getattr(torch, "npu", None)
    if npu is not None and npu.is_available():
        return "npu"
    return "cuda" if torch.version.hip is None else "rocm"


def _check_device(device: str) -> None:
    if device not in WEAVING_DEVICES:
        raise ConfigError(
            f"a device of type {device} cannot be used: weaving was not shown on it "
            f"(docs/{'ascend' if device == 'npu' else 'cuda'}.md); ESFT_PLATFORM=cpu takes the "
            "CPU, --no-esft serves the base model as plain SGLang does"
        )


def _check_scheme(scheme: ExpertScheme | None, device: str) -> None:
    if scheme is not None and device not in QUANTISED_DEVICES:
        raise UnsupportedModelError(
            f"the base's experts are quantised ({scheme.label}), which was not shown to be woven "
            f"on a device of type {device}: name the base that it was made of, or use --no-esft"
        )


def _scheme_argv(scheme: ExpertScheme | None) -> list[str]:
    """Where it does not follow from the checkpoint alone; a later one wins."""
    if scheme is None or scheme.name != "int4":
        return []
    return ["--quantization", resolved.QUANTIZATIONS[scheme.name]]


def _check_sizes(flags: LaunchFlags) -> None:
    for flag, size in (("--tp-size", flags.tp_size), ("--dp-size", flags.dp_size)):
        if size < 1:
            raise ConfigError(f"{flag} {size}: must be at least 1")
    if not 0 < flags.port < 1 << 16:
        raise ConfigError(f"--port {flags.port}: must be between 1 and 65535")


def _named_adapters(flags: LaunchFlags) -> dict[str, Path]:
    if flags.weave and flags.model_path is None and not flags.esft_adapters:
        return dict(zoo.adapter_paths())
    return _named_folders("--esft-adapters", flags.esft_adapters, flags.adapter_root)


def _named_loras(flags: LaunchFlags) -> dict[str, Path]:
    if not flags.weave:
        return {}
    found = _named_folders("--lora-paths", flags.lora.paths, flags.adapter_root)
    for name in found.keys() & _named_adapters(flags).keys():
        raise ConfigError(
            f"--lora-paths and --esft-adapters both name {name!r}: a name means one adapter"
        )
    return found


def _named_folders(flag: str, entries: Sequence[str], adapter_root: str | None) -> dict[str, Path]:
    root = None if adapter_root is None else Path(adapter_root)
    adapters: dict[str, Path] = {}
    for entry in entries:
        name, separator, folder = entry.partition("=")
        if not separator:
            raise ConfigError(f"{flag} {entry!r}: write NAME=DIR")
        validate_adapter_name(name)
        if name in adapters:
            raise ConfigError(f"{flag} names {name!r} twice")
        with _naming(name):
            adapters[name] = resolve_adapter_path(folder, root)
    return adapters


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """What is wrong with one of several adapters says with which."""
    try:
        yield
    except UserError as error:
        raise type(error)(f"adapter {name!r}: {error}") from error


def _check_parallelism(spec: MoeSpec, sglang_argv: Sequence[str]) -> None:
    if has_dp_attention(sglang_argv) and spec.architecture in _NO_DP_ATTENTION:
        raise UnsupportedModelError(
            f"SGLang's {spec.architecture} has no DP attention: leave --attn-dp-size and "
            f"{_OLD_DP_ATTENTION} out"
        )


def _check_schedule(flags: LaunchFlags, sglang_argv: Sequence[str]) -> None:
    """--max-overtakes reorders first come, first served; by default other orders stand."""
    if flags.max_overtakes and not _is_first_come_first_served(sglang_argv):
        raise ConfigError(
            f"--max-overtakes {flags.max_overtakes} reorders requests that are served first come, "
            "first served: leave it out, or --schedule-policy and --enable-priority-scheduling"
        )


def _is_first_come_first_served(argv: Sequence[str]) -> bool:
    policy = last_value(argv, "--schedule-policy")
    return policy in (None, "fcfs") and "--enable-priority-scheduling" not in argv


def check_resident(config: EsftConfig, adapters: Mapping[str, Path]) -> None:
    """Under DP attention, so also with --elastic, every loaded adapter keeps a slot."""
    if len(adapters) > config.max_adapters:
        raise ConfigError(
            f"{len(adapters)} adapters under DP attention need as many slots: set "
            f"--max-adapters {len(adapters)}, or leave some to --adapter-root"
        )


def _weaving(
    flags: LaunchFlags,
    model_path: str,
    spec: MoeSpec,
    adapters: Mapping[str, Path],
    sglang_argv: Sequence[str],
) -> EsftConfig:
    reads_weights = flags.tiers is None  # in tiers they are looked at when they are routed to
    needed = None
    if adapters:
        needed = _max_experts_needed(adapters, spec, reads_weights=reads_weights)
    config = EsftConfig(
        max_adapters=_given(flags.max_adapters, len(adapters) or DEFAULT_MAX_ADAPTERS),
        max_experts_per_adapter=_given(
            flags.max_experts_per_adapter, needed or DEFAULT_MAX_EXPERTS
        ),
        expert_memory=flags.expert_memory,
        expert_page_bytes=flags.expert_page_bytes,
        adapter_memory_bytes=flags.adapter_memory_bytes,
        adapter_host_bytes=flags.adapter_host_bytes,
        quantised_adapters=None
        if flags.quantised_adapters is None
        else str(Path(flags.quantised_adapters).resolve()),
        quantised_adapters_bytes=flags.quantised_adapters_bytes,
        reroute=flags.reroute,
        max_overtakes=_given(flags.max_overtakes, DEFAULT_MAX_OVERTAKES),
        slot_overtakes=_given(flags.max_overtakes, DEFAULT_SLOT_OVERTAKES),
        heat_every=flags.heat_every,
        tiers=None
        if flags.tiers is None
        else tiers.plan_tiers(flags.tiers, model_path, spec, flags.tp_size, sglang_argv),
        record=flags.record,
        adapter_root=None
        if flags.adapter_root is None
        else str(Path(flags.adapter_root).resolve()),
    )
    if needed is not None and needed > config.max_experts_per_adapter:
        raise ConfigError(
            f"an adapter has {needed} experts in one layer: set --max-experts-per-adapter {needed}"
        )
    return config


def _with_lora(
    config: EsftConfig, flags: LaunchFlags, model_path: str, loras: Mapping[str, Path]
) -> EsftConfig:
    """Every first LoRA adapter is checked in full, as ESFT adapters are."""
    if not flags.lora.is_on:
        return config
    ranks = []
    for name, folder in loras.items():
        with _naming(name):
            ranks.append(lora.rank_of(folder))
    targets = targets_of(base_config(model_path))
    config = replace(config, lora=lora.plan_lora(flags.lora, targets, ranks))
    served = base_targets(model_path, config)
    for name, folder in loras.items():
        with _naming(name):
            lora.check_first(name, folder, served, config)
    return config


def base_targets(model_path: str, config: EsftConfig) -> LoraTargets:
    """The layers that LoRA adapters may change; none on a server that takes none."""
    if config.lora is None:
        return LoraTargets(())
    return served_targets(base_config(model_path), config.lora)


def base_spec(model_path: str) -> MoeSpec:
    """From the folder, or from the hub or its cache. Raises ConfigError, UnsupportedModelError."""
    if Path(model_path).is_dir():
        return read_moe_spec(Path(model_path))
    return MoeSpec.from_config(base_config(model_path))


def base_config(model_path: str) -> Mapping[str, object]:
    """The base's config.json. Raises ConfigError."""
    if Path(model_path).is_dir():
        return read_object(Path(model_path) / "config.json", ConfigError)
    if model_path.startswith(("/", ".", "~")) or model_path.count("/") > 1:
        raise ConfigError(
            f"--model-path {model_path}: there is no such folder; looked for "
            f"{Path(model_path).absolute() / 'config.json'}"
        )
    from transformers import PretrainedConfig

    try:
        config, _ = PretrainedConfig.get_config_dict(model_path)
    except OSError as error:
        raise ConfigError(f"--model-path {model_path}: {error}") from error
    return dict(config)


def _max_experts_needed(adapters: Mapping[str, Path], spec: MoeSpec, *, reads_weights: bool) -> int:
    """Every first adapter is checked in full, weights too: no process is started in vain."""
    needed = []
    for name, path in adapters.items():
        with _naming(name):
            manifest = read_manifest(path, spec)
            if reads_weights:
                check_weights(name, manifest)
            needed.append(manifest.max_experts_per_layer)
    return max(needed)


def _given(value: int | None, default: int) -> int:
    return default if value is None else value


def _own_argv(flags: LaunchFlags, model_path: str) -> list[str]:
    name = served_name(model_path)
    return [
        *(() if name is None else ("--served-model-name", name)),  # a later one wins
        *("--model-path", model_path, "--host", flags.host, "--port", str(flags.port)),
        *("--tp-size", str(flags.tp_size), "--dp-size", str(flags.dp_size)),
    ]


def _weave_argv(config: EsftConfig, adapters: Mapping[str, Path]) -> list[str]:
    """Open LoRA's place. The rank and target module only satisfy a check of SGLang's."""
    rank = 1 if config.lora is None else config.lora.max_rank
    argv = ["--enable-lora", "--max-lora-rank", str(rank), "--lora-target-modules", "gate_proj"]
    argv += ["--max-loras-per-batch", str(config.max_adapters)]
    if adapters:
        argv += ["--lora-paths", *(f"{name}={path}" for name, path in adapters.items())]
    return argv


def _device_environment(flags: LaunchFlags) -> dict[str, str]:
    """A device's byte budget, by flags or by the environment. Raises ConfigError."""
    num_bytes = flags.device_memory_bytes or env.device_memory()
    ledger = env.device_ledger()
    if flags.device_ledger is not None:
        ledger = Path(flags.device_ledger).absolute()
    if num_bytes is None:
        if ledger is not None:
            raise ConfigError(f"--device-ledger {ledger}: give the devices' --device-memory too")
        return {}
    if not platform.is_active():
        raise ConfigError("--device-memory is for the CPU platform; an accelerator has its own")
    if ledger is None:
        return {env.DEVICE_MEMORY: f"{num_bytes}B"}
    DeviceLedger(ledger).check(num_bytes)
    return {env.DEVICE_MEMORY: f"{num_bytes}B", env.DEVICE_LEDGER: str(ledger)}


def _platform_argv(sglang_argv: Sequence[str], model_path: Path, *, has_budget: bool) -> list[str]:
    """Defaults of the CPU platform, where the user has not chosen."""
    if not platform.is_active():
        return []
    defaults: list[tuple[str, ...]] = [*_CPU_DEFAULTS]
    if has_budget:
        defaults.append(("--mem-fraction-static", str(_DEVICE_FRACTION)))
    else:
        defaults.append(("--max-total-tokens", str(_CPU_KV_TOKENS)))
    defaults += _model_defaults(model_path)
    given = {arg.split("=")[0] for arg in sglang_argv}
    return [part for flag, *value in defaults if flag not in given for part in (flag, *value)]


def _model_defaults(model_path: Path) -> list[tuple[str, str]]:
    """SGLang would cast float32 to float16, which a CPU computes slowly and less exactly.

    It takes no float32 where experts are quantised, and has no other method for int4 on a CPU.
    """
    try:
        spec = read_moe_spec(model_path)
    except UnsupportedModelError:  # not a model of ours, or not a local folder
        return []
    found = [("--quantization", flag) for flag in _scheme_argv(spec.scheme)[1:]]
    if spec.dtype == "float32":
        found.append(("--dtype", "float32" if spec.scheme is None else "bfloat16"))
    return found


def _num_ranks(flags: LaunchFlags, sglang_argv: Sequence[str]) -> int:
    """Each replica has the ranks of --tp-size; under DP attention there is one replica."""
    is_shared = has_dp_attention(sglang_argv)
    return flags.tp_size * (1 if is_shared else flags.dp_size)


def platform_environment(num_ranks: int) -> dict[str, str]:
    """Threads and cores for each rank; no compiling, which costs more than it gives here.

    OpenMP's threads spin while they wait for each other, so one thread too many
    slows everything down by factors. One core is left to the HTTP, tokenizer and
    detokenizer processes.
    """
    if not platform.is_active():
        return {}
    cores = sorted(os.sched_getaffinity(0))
    threads = max(1, (len(cores) - 1) // num_ranks)
    groups = [
        [cores[(r * threads + t) % len(cores)] for t in range(threads)] for r in range(num_ranks)
    ]
    return {
        "SGLANG_PLATFORM": platform.PLATFORM_NAME,
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": str(threads),
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, g)) for g in groups),
    }
