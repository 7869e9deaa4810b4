"""`python -m sgl_esft.launch_server --elastic`: the elastic server, checked before it is started.

argv -> options, launch plan (checked) -> [ElasticPlan] -> elastic_serve.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sgl_elastic.baselines.strategies import ScaleStrategy
from sgl_elastic.coordinator.schemas import MAX_BODY_BYTES
from sgl_elastic.errors import BadScaleError, ElasticConfigError, ElasticError
from sgl_elastic.options import ElasticOptions, parse
from sgl_elastic.types import AdapterEntry
from sgl_esft import platform
from sgl_esft.formats.manifest import read_manifest, refused_shared
from sgl_esft.formats.model_spec import MoeSpec, read_moe_spec, refuse_quantised
from sgl_esft.http.routes import Endpoint, ErrorAnswers, Route, add_routes
from sgl_esft.support import ELASTIC_DEVICES
from sgl_esft.weave.expert_memory import choose_page_bytes
from sgl_esft_launch import arguments, flags, plan
from sgl_esft_launch.plan import LaunchPlan

if TYPE_CHECKING:
    from fastapi import FastAPI

    from sgl_elastic.coordinator.coordinator import Coordinator
    from sgl_elastic.instance.spares import SpareMemory
    from sgl_elastic.instance.state import Instance

_ENGINE_ARGV = ("--radix-cache-backend", "sgl_elastic", "--skip-server-warmup")
# A CPU computes a batch before the call returns. Nothing overlaps, but each token would come a step
# late, and so the first ones after a switch too.
_CPU_ENGINE_ARGV = ("--disable-overlap-schedule",)
# Models of which everything but the routed experts can be the same on any number of ranks.
_SAME_AT_ANY_SIZE = frozenset(
    {"DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Qwen3MoeForCausalLM"}
)
_BACKENDS = {"cpu": "host", "npu": "acl", "cuda": "cuda"}
_ACCELERATOR_PAGE_BYTES = 2 << 20  # the least that CUDA and Ascend map
PROGRAM = "sgl_elastic"  # in front of what is refused


@dataclass(frozen=True)
class ElasticPlan:
    """A checked elastic launch."""

    options: ElasticOptions
    launch: LaunchPlan
    page_bytes: int
    backend: str
    engine_argv: tuple[str, ...]  # of every instance
    first_argv: tuple[str, ...]  # of the first one besides
    first_adapters: tuple[AdapterEntry, ...]
    adapter_reserve_bytes: int


def plan_elastic(argv: Sequence[str]) -> ElasticPlan:
    """Check everything that can be checked without starting. Raises ElasticError, EsftError."""
    options, rest = parse(argv)
    launch_flags, sglang_argv = flags.parse(rest)
    arguments.check_known(sglang_argv, flags.build_parser())
    if launch_flags.lora.is_on:
        raise ElasticConfigError(
            "--enable-lora and --elastic: LoRA's slots are not handed over when a server scales; "
            "leave one of them out"
        )
    _check(launch_flags, sglang_argv)
    _check_heat(launch_flags, options)
    # The launcher's own flag, with another default: here a rank that hangs is replaced.
    health = replace(launch_flags.health, hang_timeout_s=options.hang_timeout_s)
    launch = plan.plan_launch(replace(launch_flags, health=health), sglang_argv)
    if launch.config is not None:
        plan.check_resident(launch.config, launch.adapters)
    spec = read_moe_spec(Path(launch.model_path))
    refuse_quantised(spec, "--elastic")
    _check_model(spec, options)
    backend = choose_backend()
    _check_shown(launch.device)
    _check_devices(options, backend)
    return ElasticPlan(
        options=options,
        launch=launch,
        page_bytes=_page_bytes(launch_flags, spec, backend),
        backend=backend,
        engine_argv=(
            *_without_adapters(launch.sglang_argv),
            *_ENGINE_ARGV,
            *(_CPU_ENGINE_ARGV if platform.is_active() else ()),
        ),
        first_argv=_adapters_argv(launch),
        first_adapters=_adapters(launch, spec),
        adapter_reserve_bytes=_reserve_bytes(launch, spec),
    )


def choose_backend() -> str:
    """sgl_vmm's backend for this machine's devices: host, acl or cuda."""
    return _BACKENDS[plan.device_type()]


def num_cuda_devices() -> int:
    """CUDA devices that this process sees; none of them is opened."""
    import torch

    return torch.cuda.device_count()


def _check_devices(options: ElasticOptions, backend: str) -> None:
    """What only the CPU platform has, and how many devices there are."""
    if backend == "host":
        return
    if options.spans_nodes:
        raise ElasticConfigError(
            "--nodes ray: for the CPU platform only so far; leave it out on an accelerator"
        )
    if options.spare_ranks:
        raise ElasticConfigError(
            f"--spare-ranks {options.spare_ranks}: for the CPU platform only; a process that may "
            "have opened an accelerator cannot be copied. Leave it out, and use --standby-ranks"
        )
    if options.strategy is ScaleStrategy.COLOCATED or not options.ablation.shared_allocator:
        raise ElasticConfigError(
            "--scale-strategy colocated, --ablate no_shared_allocator: for the CPU platform only, "
            "where a device can have a second memory worker"
        )
    if backend == "cuda" and options.max_devices > (seen := num_cuda_devices()):
        raise ElasticConfigError(
            f"--max-devices {options.max_devices}: torch sees {seen}; lower it"
        )


def _check_shown(device: str) -> None:
    """Scaling is refused where it was not shown (sgl_esft/support.py)."""
    if device not in ELASTIC_DEVICES:
        raise ElasticConfigError(
            f"--elastic cannot be used on a device of type {device}: it was not shown there; "
            "leave it out, or set ESFT_PLATFORM=cpu"
        )


def _check_model(spec: MoeSpec, options: ElasticOptions) -> None:
    if options.max_devices > 1 and spec.architecture not in _SAME_AT_ANY_SIZE:
        raise ElasticConfigError(
            f"{spec.architecture}: SGLang splits more than its experts over ranks, or has no DP "
            f"attention for it; on several devices there are {', '.join(sorted(_SAME_AT_ANY_SIZE))}"
        )


def _check(launch_flags: flags.LaunchFlags, sglang_argv: Sequence[str]) -> None:
    if not launch_flags.weave:
        raise ElasticConfigError("--no-esft: the elastic runtime moves experts by weaving them")
    if launch_flags.tp_size != 1:
        raise ElasticConfigError(f"--tp-size {launch_flags.tp_size}: elastic ranks have TP 1")
    if launch_flags.expert_memory != "virtual":
        raise ElasticConfigError("--expert-memory padded: elastic experts are pages")
    if launch_flags.tiers is not None:
        raise ElasticConfigError(
            "--expert-cache: that devices come and go while experts are in tiers was not shown; "
            "leave one of them out"
        )
    refused = {"--attn-dp-size", "--enable-dp-attention", "--ep-size", "--load-format"}
    given = {*refused, "--radix-cache-backend"} & {arg.split("=")[0] for arg in sglang_argv}
    if given:
        raise ElasticConfigError(f"{', '.join(sorted(given))}: --elastic decides that itself")


def _check_heat(launch_flags: flags.LaunchFlags, options: ElasticOptions) -> None:
    is_counted = launch_flags.heat_every > 0 and launch_flags.reroute != "router"
    if options.redundant_experts and not is_counted:
        raise ElasticConfigError(
            "--redundant-experts: copies are chosen by heat, which --heat-every 0 and --reroute "
            "router do not count"
        )


def _page_bytes(launch_flags: flags.LaunchFlags, spec: MoeSpec, backend: str) -> int:
    """The device's page: on a CPU the one that weaving would choose."""
    if backend != "host":
        return _ACCELERATOR_PAGE_BYTES
    if launch_flags.expert_page_bytes is not None:
        return launch_flags.expert_page_bytes
    element = {"float32": 4}.get(spec.dtype, 2)
    w2 = spec.hidden_size * spec.expert_intermediate_size * element
    return choose_page_bytes([2 * w2, w2])


def _without_adapters(argv: Sequence[str]) -> tuple[str, ...]:
    """Adapters are the first instance's to load; the others find them in memory."""
    kept: list[str] = []
    is_paths = False
    for arg in argv:
        is_paths = arg == "--lora-paths" or (is_paths and not arg.startswith("--"))
        if not is_paths:
            kept.append(arg)
    return tuple(kept)


def _adapters_argv(launch: LaunchPlan) -> tuple[str, ...]:
    if not launch.adapters:
        return ()
    return ("--lora-paths", *(f"{name}={path}" for name, path in launch.adapters.items()))


def _adapters(launch: LaunchPlan, spec: MoeSpec) -> tuple[AdapterEntry, ...]:
    """What the first instance will load, in the order of its slots."""
    entries = []
    for slot, (name, path) in enumerate(launch.adapters.items()):
        manifest = read_manifest(path, spec)
        if manifest.shared:
            raise refused_shared(name, "with experts that move: leave --elastic out")
        entries.append(AdapterEntry(name, name, str(path), slot, False, manifest.experts))
    return tuple(entries)


def _reserve_bytes(launch: LaunchPlan, spec: MoeSpec) -> int:
    """--adapter-memory; otherwise all slots where no adapter is named, as without --elastic."""
    config = launch.config
    if config is None or (launch.adapters and config.adapter_memory_bytes is None):
        return 0
    if config.adapter_memory_bytes is not None:
        return config.adapter_memory_bytes
    slots = config.max_adapters * config.max_experts_per_adapter * len(spec.moe_layer_ids)
    return slots * spec.expert_bytes


def add_scale_routes(
    app: FastAPI,
    coordinator: Coordinator,
    list_instances: Callable[[], Iterable[Instance]],
    protect: Callable[[Endpoint], Endpoint] = lambda endpoint: endpoint,
    list_spares: Callable[[], Iterable[SpareMemory]] = tuple,
) -> None:
    """Add the routes of scaling to an application, in place of SGLang's of the same paths.

    Their errors are the elastic runtime's own; `protect` is as in sgl_esft.http.routes.add_routes.
    """
    from sgl_elastic.coordinator import app as scaling

    added = [
        Route(**vars(route), tag="elastic", max_body_bytes=MAX_BODY_BYTES)
        for route in scaling.ROUTES
    ]
    errors = ErrorAnswers(ElasticError, scaling.answer_error, BadScaleError)
    add_routes(app, added, protect, errors)
    app.state.elastic = scaling.Backing(coordinator, list_instances, list_spares)
