"""The AdapterEngine over SGLang, in the process that serves HTTP.

    load, replace --> check, digest --> make room --> ranks --> name means the new id
    unload        --> name means nothing --> last request ends --> ranks forget it

One adapter id is one version of one adapter: it keys the prefix cache and the ranks' tables, and a
request keeps the id that its name meant when it came. So versions never mix, and an old one leaves
when its last request has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import cache, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from sgl_esft import sglang_api
from sgl_esft.config import EsftConfig, required_config
from sgl_esft.errors import (
    AdapterExistsError,
    NoFreeSlotError,
    OutOfExpertMemoryError,
    TooManyAdaptersError,
    UnknownAdapterError,
)
from sgl_esft.formats.adapter_config import AdapterKind, kind_of
from sgl_esft.formats.adapter_paths import resolve_adapter_path
from sgl_esft.formats.lora_manifest import AnyManifest, check_lora, served_targets
from sgl_esft.formats.manifest import check_loadable
from sgl_esft.formats.model_spec import MoeSpec
from sgl_esft.lifecycle.adapter_engine import (
    LoadedAdapter,
    LoadPhase,
    OnProgress,
    Residency,
    nobody_looks,
)
from sgl_esft.lifecycle.content import (
    AdapterContent,
    check_unchanged,
    read_content,
)
from sgl_esft.lifecycle.ranks import Ranks
from sgl_esft.lifecycle.registry import AdapterGoneError, Registry
from sgl_esft.lifecycle.room import HostLimits, LoadTimeouts, Room
from sgl_esft.lifecycle.tenants import Tenants, log_failure, start
from sgl_esft.lifecycle.transfer import Reading, reading_of, transfer
from sgl_esft.observe.tier_metrics import EngineCounters
from sgl_esft.weave.adapter_pages import check_pin

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_DRAIN_POLL_S = 0.1
_SLOT_FLAGS: Mapping[AdapterKind, str] = {"esft": "--max-adapters", "lora": "--max-loras"}

# (name, folder, names in use) -> manifest; raises one of the Adapter* errors
Check = Callable[[str, str, Sequence[str]], AnyManifest]
# Returns once a request may use all these adapters. Raises EsftError.
Ensure = Callable[[Collection[str]], Awaitable[None]]


def _to_the_end(change: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """A caller that gives up stops nothing: ranks and registry must agree.

    The work keeps its locks to its end, too, so that the next load waits for it.
    """

    @wraps(change)
    async def shielded(*args: P.args, **kwargs: P.kwargs) -> T:
        task = start(change(*args, **kwargs))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(log_failure)  # nobody else will hear of it
            raise

    return shielded


class SglangEngine:
    """`AdapterEngine` of one TokenizerManager. All methods belong to its event loop."""

    def __init__(
        self,
        manager: Any,
        ranks: Ranks,
        check: Check,
        limits: HostLimits,
        timeouts: LoadTimeouts | None = None,
        slots: Mapping[AdapterKind, int] | None = None,
    ) -> None:
        """slots: on the device, of a kind whose adapters take turns in them."""
        self._slots = slots or {}
        self._counters = EngineCounters()
        self._manager = manager
        self._registry = Registry(manager)
        self._ranks = ranks
        self._check = check
        self._tenants = Tenants(self._registry, ranks)
        self._room = Room(self._registry, self._tenants, limits, timeouts or LoadTimeouts())
        self._name_locks: dict[str, asyncio.Lock] = {}
        self._ensure: Ensure = self._bring_known

    @property
    def counters(self) -> EngineCounters:
        """As of now."""
        return replace(self._counters, num_evictions=self._room.num_evictions)

    # ---- for requests ----

    def load_by(self, ensure: Ensure) -> None:
        """From now on `ensure` loads what requests ask for; nobody loads the same beside it."""
        self._ensure = ensure

    async def bring(self, names: Collection[str]) -> None:
        """Return once a request may use all of these. Raises EsftError, AdapterGoneError."""
        most = self._room.max_names
        if most is not None and len(names) > most:
            raise TooManyAdaptersError(
                f"the request names {len(names)} adapters, and at most {most} are loaded at a time"
            )
        await self._ensure(names)

    async def _bring_known(self, names: Collection[str]) -> None:
        """Where nobody else loads: what has left for others comes back from where it came."""
        for name in sorted(set(names) - set(self._registry.refs())):
            known = self._manager.lora_ref_cache.get(name)
            if known is None:
                raise AdapterGoneError(f"UnknownAdapterError: adapter {name!r} is not loaded")
            with contextlib.suppress(AdapterExistsError):  # another request has brought it
                folder, pinned = Path(known.lora_path), bool(known.pinned)
                await self.load(name, folder, pinned=pinned, on_progress=nobody_looks)

    # ---- AdapterEngine: changes, one at a time for a name ----

    @_to_the_end
    async def load(
        self, name: str, folder: Path, *, pinned: bool, on_progress: OnProgress
    ) -> LoadedAdapter:
        async with self._lock_of(name):
            names = list(self._registry.refs())
            return await self._bring(name, folder, names, pinned, on_progress)

    @_to_the_end
    async def replace(
        self, name: str, folder: Path, *, pinned: bool, on_progress: OnProgress
    ) -> LoadedAdapter:
        async with self._lock_of(name):
            if name not in self._registry.refs() and name not in self._manager.lora_ref_cache:
                raise UnknownAdapterError(
                    f"adapter {name!r} is not loaded, so nothing can take its place: load it"
                )
            return await self._bring(name, folder, [], pinned, on_progress)

    @_to_the_end
    async def unload(self, name: str) -> None:
        async with self._lock_of(name):
            known = self._manager.lora_ref_cache.pop(name, None)
            ref = await self._registry.take(name)
            if ref is not None:
                await self._tenants.unload_when_idle(ref)
            elif known is None:
                raise UnknownAdapterError(f"adapter {name!r} is not loaded")
            while any(ref.lora_name == name for ref in self._tenants.draining_refs()):
                await asyncio.sleep(_DRAIN_POLL_S)  # it left for another while it was in use

    @_to_the_end
    async def set_pinned(self, name: str, pinned: bool) -> None:
        async with self._lock_of(name):
            ref = self._registry.refs().get(name)
            if ref is None:
                raise UnknownAdapterError(f"adapter {name!r} is not loaded: load it first")
            if bool(ref.pinned) != pinned:
                await self._repin(ref, pinned)

    # ---- AdapterEngine: questions ----

    def kind_of(self, ref: Any) -> AdapterKind:
        """Of an adapter that a name means."""
        return self._tenants.kind_of(ref)

    def loaded(self) -> Sequence[LoadedAdapter]:
        return self._tenants.loaded()

    def draining(self) -> Sequence[LoadedAdapter]:
        return self._tenants.draining()

    async def residency(self) -> Mapping[str, tuple[Residency, ...]]:
        found: dict[str, tuple[Residency, ...]] = {}
        for report in await self._ranks.report():
            for adapter_id, (slot, num_bytes) in report.slots.items():
                place = Residency(report.rank, slot, num_bytes)
                found[adapter_id] = (*found.get(adapter_id, ()), place)
        return found

    # ---- loading ----

    async def _bring(
        self,
        name: str,
        folder: Path,
        taken: Sequence[str],
        pinned: bool,
        on_progress: OnProgress,
    ) -> LoadedAdapter:
        started = time.monotonic()
        try:
            on_progress(LoadPhase.VALIDATING, 0.0)
            manifest = await asyncio.to_thread(self._check, name, str(folder), taken)
            content = await asyncio.to_thread(read_content, manifest)
            on_progress(LoadPhase.VALIDATING, 1.0)
            if pinned:
                self._check_pin(name, content.kind)
            ref = sglang_api.make_adapter_ref(name, str(content.folder), pinned)
            async with (
                reading_of(self._ranks, ref) as reading,
                self._room.taken_by(name, content.num_bytes, reading.begin),
            ):
                await self._admit(reading, manifest, content, on_progress)
        except BaseException:
            self._counters.num_failed_loads += 1
            raise
        self._counters.num_loads += 1
        self._counters.load_seconds += time.monotonic() - started
        return self._tenants.described(ref, Counter())

    def _check_pin(self, name: str, kind: AdapterKind) -> None:
        """The ranks' own rule, asked before anybody leaves for a load that they would refuse."""
        others = self._registry.refs().items()
        pinned = [ref for other, ref in others if other != name and ref.pinned]
        num_pinned = sum(self._tenants.kind_of(ref) == kind for ref in pinned)
        if kind in self._slots:
            check_pin(name, num_pinned, self._slots[kind], _SLOT_FLAGS[kind])

    async def _admit(
        self,
        reading: Reading,
        manifest: AnyManifest,
        content: AdapterContent,
        on_progress: OnProgress,
    ) -> None:
        ref = reading.ref
        while True:
            try:
                await transfer(reading, on_progress, lambda: check_unchanged(manifest, content))
                break
            except (NoFreeSlotError, OutOfExpertMemoryError):
                # Where slots are permanent, pages may be short while a slot is free.
                if not self._room.keeps_slots or not await self._room.evict_one(ref.lora_name):
                    raise
        self._tenants.note_came(ref, content)
        await self._publish(ref)

    async def _publish(self, ref: Any) -> None:
        name = ref.lora_name
        old = await self._registry.put(ref)
        if old is not None:
            self._counters.num_replacements += 1
            self._tenants.unload_when_idle(old)
        elif name in self._manager.lora_ref_cache:
            self._counters.num_reloads += 1
        self._manager.lora_ref_cache[name] = ref

    async def _repin(self, ref: Any, pinned: bool) -> None:
        changed = sglang_api.make_adapter_ref(ref.lora_name, ref.lora_path, pinned, ref.lora_id)
        async with self._room.loading:  # so that nobody evicts it meanwhile
            current = self._registry.refs().get(ref.lora_name)
            if current is None or current.lora_id != ref.lora_id:
                raise UnknownAdapterError(f"adapter {ref.lora_name!r} has just left: load it first")
            await self._ranks.admit(changed)
            await self._registry.change(changed)
        self._manager.lora_ref_cache[ref.lora_name] = changed

    def _lock_of(self, name: str) -> asyncio.Lock:
        return self._name_locks.setdefault(name, asyncio.Lock())


@cache
def engine_of(manager: Any) -> SglangEngine:
    """The engine of this process's TokenizerManager, one each."""
    config = required_config()
    base = sglang_api.base_config(*sglang_api.served_model())
    spec = MoeSpec.from_config(base)
    targets = None if config.lora is None else served_targets(base, config.lora)

    def check(name: str, folder: str, taken: Sequence[str]) -> AnyManifest:
        if targets is not None:
            path = resolve_adapter_path(folder, config.adapter_root_path)
            if kind_of(path) == "lora":
                return check_lora(name, folder, taken, targets, config)
        return check_loadable(name, folder, taken, spec, config)

    limits = HostLimits(
        budget_bytes=config.adapter_host_bytes,
        max_names=sglang_api.max_loaded_adapters(),
    )
    return SglangEngine(manager, Ranks(manager), check, limits, slots=_slots_of(config))


def _slots_of(config: EsftConfig) -> Mapping[AdapterKind, int]:
    """Under DP attention ESFT adapters keep their slots, pinned or not."""
    found: dict[AdapterKind, int] = {}
    if not sglang_api.is_dp_attention():
        found["esft"] = config.max_adapters
    if config.lora is not None:
        found["lora"] = config.lora.max_loras
    return found
