"""SGLang's adapter registry, with what it lacks: a swap, an idle adapter's removal, times of use.

    requests --acquire/release--> [LoRARegistry] <--put/take-- sglang_engine.py

The registry maps a name to a LoRARef and counts requests by the ref's id. `acquire` here is called
in place of SGLang's, which looks a name up and counts the request in two steps, between which the
adapter could leave.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from sgl_esft.errors import EsftError, TooManyAdaptersError, UnknownAdapterError
from sgl_esft.formats.adapter_config import AdapterKind
from sgl_esft.http.adapter_names import BESIDE, parts_of

_POLL_S = 0.02
# From the registry to the table of requests a request takes as long as its text to be tokenised.
_ON_ITS_WAY_S = 10.0


class AdapterGoneError(UnknownAdapterError, ValueError):
    """A name that is not registered (now); SGLang answers ValueErrors of a request with 400."""

    status_code = UnknownAdapterError.http_status  # some of its routes look at this


class AdapterRefusedError(ValueError):
    """An adapter that a request names cannot be loaded for it now: `error` says why."""

    def __init__(self, error: EsftError) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.status_code = error.http_status


# LoRARef -> which kind of adapter it is
KindOf = Callable[[Any], AdapterKind]


async def acquire(
    registry: Any, lora_name: str | Sequence[str | None], kind_of: KindOf | None = None
) -> Any:
    """Names -> ids, each counted as in use before any other change of the registry.

    Two names of one request are joined by BESIDE, and so are their ids, the ESFT adapter's first.
    kind_of: None on a server with one kind. Raises AdapterGoneError, and AdapterRefusedError for
    two of one kind, with nothing counted.
    """
    names = [lora_name] if isinstance(lora_name, str) else list(lora_name)
    async with registry._registry_lock.writer_lock:
        ids = [None if name is None else _id_of(registry, name, kind_of) for name in names]
        for joined in ids:
            for adapter_id in () if joined is None else parts_of(joined):
                await registry._counters[adapter_id].increment(notify_all=False)
                _uses(registry)[adapter_id] = time.time()
    return ids[0] if isinstance(lora_name, str) else ids


async def give_back(registry: Any, lora_id: str | Sequence[str | None]) -> None:
    """What `acquire` has counted, in place of SGLang's `release`, which knows no joined ids."""
    ids = [lora_id] if isinstance(lora_id, str) else list(lora_id)
    for joined in ids:
        if joined is not None:
            await registry.release(list(parts_of(joined)))


def _id_of(registry: Any, name: str, kind_of: KindOf | None) -> str:
    refs = [_look_up(registry, each) for each in parts_of(name)]
    if len(refs) == 1:
        return str(refs[0].lora_id)
    kinds = [None if kind_of is None else kind_of(ref) for ref in refs]
    if sorted(map(str, kinds)) != ["esft", "lora"]:
        raise AdapterRefusedError(
            TooManyAdaptersError(
                f"a request may name one ESFT and one LoRA adapter, and {name!r} are of kinds "
                f"{', '.join(map(str, kinds))}"
            )
        )
    first, second = refs if kinds[0] == "esft" else reversed(refs)
    return f"{first.lora_id}{BESIDE}{second.lora_id}"


def _look_up(registry: Any, name: str) -> Any:
    ref = registry._registry.get(name)
    if ref is None:
        # Whoever asks may not be allowed to know of the others.
        raise AdapterGoneError(f"UnknownAdapterError: adapter {name!r} is not loaded")
    registry._registry.move_to_end(name)
    return ref


def _uses(registry: Any) -> dict[str, float]:
    uses: dict[str, float] = registry.__dict__.setdefault("esft_last_used_s", {})
    return uses


class Registry:
    """The registry of one TokenizerManager, for the one who changes it.

    Which requests use an adapter is read off the manager's own table of requests: the registry's
    counter keeps a request that was aborted while it waited, and loses one of parallel samples.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._registry = manager.lora_registry

    def refs(self) -> dict[str, Any]:
        """Name -> LoRARef, least recently used first."""
        return dict(self._registry._registry)

    def num_references(self) -> Counter[str]:
        """Adapter id -> requests that use it now."""
        states = self._manager.rid_to_state.values()
        ids = (getattr(state.obj, "lora_id", None) for state in states)
        return Counter(part for each in ids if isinstance(each, str) for part in parts_of(each))

    def is_busy(self, adapter_id: str) -> bool:
        """Whether a request uses the adapter, or has just asked for it and is on its way."""
        if self.num_references()[adapter_id]:
            return True
        counter = self._registry._counters.get(adapter_id)
        last_used_s = self.last_used_s(adapter_id)
        if counter is None or counter.value() <= 0 or last_used_s is None:
            return False
        return time.time() - last_used_s < _ON_ITS_WAY_S

    def last_used_s(self, adapter_id: str) -> float | None:
        """Unix time of the last request; None = never."""
        return _uses(self._registry).get(adapter_id)

    async def put(self, ref: Any) -> Any | None:
        """From now on the name means `ref`. Returns what it meant before, which may be in use."""
        async with self._registry._registry_lock.writer_lock:
            old = self._registry._registry.pop(ref.lora_name, None)
            self._registry._register_adapter(ref)
            return old

    async def change(self, ref: Any) -> None:
        """Exchange a ref for one of the same name and id; requests in flight keep their count."""
        async with self._registry._registry_lock.writer_lock:
            self._registry._registry[ref.lora_name] = ref

    async def take(self, name: str, *, only_idle: bool = False) -> Any | None:
        """The name means nothing from now on. Returns its ref; None if there is none (idle)."""
        async with self._registry._registry_lock.writer_lock:
            ref = self._registry._registry.get(name)
            if ref is None or (only_idle and self.is_busy(ref.lora_id)):
                return None
            del self._registry._registry[name]
            return ref

    async def forget_when_idle(self, adapter_id: str) -> None:
        """Wait until the last request of an adapter that was taken has ended."""
        while self.is_busy(adapter_id):
            await asyncio.sleep(_POLL_S)
        self._registry._counters.pop(adapter_id, None)
        _uses(self._registry).pop(adapter_id, None)
