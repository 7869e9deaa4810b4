"""One engine rank in the elastic runtime: it does what the instance manager says.

    load:   RankHello, Declared --> Attach (real memory) or Park (scratch) --> model bound
    freeze: pause arrives --> retract, publish (Frozen) --> [parking place] --> Run
    live:   between two batches --> poll --> ResizeKv (growing)

The parking place is a blocking receive inside SGLang's pause: no collective is pending there, no
processor time is used, and the rank's graphs, groups and addresses stay as they are.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from sgl_elastic import wire
from sgl_elastic.engine import kv_handover, requests, sglang_api
from sgl_elastic.engine.idle import WakefulSleeper
from sgl_elastic.engine.memory import EngineMemory, heat_of, place_copies
from sgl_elastic.errors import ElasticError, ElasticInternalError, EngineFailedError
from sgl_elastic.instance import rank_messages as m
from sgl_elastic.instance.engine_config import EngineConfig
from sgl_elastic.memory.client import DeviceClient
from sgl_elastic.memory.kv_rows import copy_rows
from sgl_elastic.memory.runs import Runs, difference
from sgl_elastic.plan.redundancy import copies_by_layer
from sgl_elastic.types import AdapterEntry, MemoryShape
from sgl_esft.lifecycle.folders import fingerprint
from sgl_esft.weave.plane import AdapterSource, PlacedAdapter

logger = logging.getLogger(__name__)

_SEND_TIMEOUT_S = 30.0
_MEMORY_TIMEOUT_S = 60.0
_HEAT_PERIOD_S = 5.0
_DECODER: msgspec.msgpack.Decoder[m.Told] = msgspec.msgpack.Decoder(m.Told)


class EngineRank:
    """The rank of this process; one a process, made when the model is built."""

    def __init__(self, config: EngineConfig, rank: int, device: torch.device) -> None:
        self.config = config
        self.rank = rank
        self.memory = EngineMemory(config, device, self._woven)
        self.attached: m.Attach | None = None
        self.read_disk: Callable[[m.Attach], int] | None = None  # the loader's, once there is one
        self._resumed: dict[str, m.RequestState] = {}
        self._sleeper: WakefulSleeper | None = None
        self._num_received = 0
        self._next_heat_s = 0.0  # of the monotonic clock
        self._channel = _connect(config)
        self._channel.send(m.RankHello(config.instance, rank, os.getpid()))

    # ---- loading ----

    def declare(self, shape: MemoryShape) -> m.Attach | m.Park:
        """Tell what memory must look like; returns what to map."""
        self._channel.send(m.Declared(shape))
        instruction = self._receive()
        if not isinstance(instruction, m.Attach | m.Park):
            raise ElasticInternalError(f"{type(instruction).__name__} while loading")
        return instruction

    def map(self, instruction: m.Attach | m.Park) -> None:
        """Map real memory, or the scratch page."""
        if isinstance(instruction, m.Park):
            self.memory.required_mapping().park()
            self.attached = None
            return
        self._use_worker(instruction.socket)
        wanted = self._wanted(instruction)
        self.memory.required_mapping().attach(self.memory.required_client(), wanted)
        self.memory.note_mapped(wanted)
        self.attached = instruction

    def loaded(self, num_disk_bytes: int) -> None:
        """What `must_load` asked for is in memory; waits until the whole device is filled."""
        self._channel.send(m.Loaded(num_disk_bytes))
        instruction = self._receive()
        if not isinstance(instruction, m.Run):
            raise ElasticInternalError(f"{type(instruction).__name__} while loading")

    def mark_loaded(self, *, trunk: bool) -> None:
        """The weights of the attached placement are in memory."""
        if self.attached is None:
            raise ElasticInternalError("nothing is attached")
        wanted = self._wanted(self.attached)
        names = [n for n in wanted if n.startswith("experts.") or (trunk and n.startswith("trunk"))]
        self.memory.required_client().mark_loaded({name: wanted[name] for name in names})

    def _wanted(self, attach: m.Attach) -> dict[str, Runs]:
        return self.memory.slots_for(
            attach.expert_ids, attach.kv_tokens, attach.adapters, attach.copies
        )

    def _use_worker(self, socket_path: str) -> None:
        """A connection for as long as the rank is attached: a device may leave and come back."""
        if self.memory.client is None:
            self.memory.client = DeviceClient(Path(socket_path), timeout_s=_MEMORY_TIMEOUT_S)

    def _leave_worker(self) -> None:
        client, self.memory.client = self.memory.client, None
        if client is not None:
            client.forget_pages()
            client.close()

    # ---- weaving ----

    def _woven(self) -> None:
        """The EsftManager is there: it loads the first adapters, or learns what is there."""
        attach = self.attached
        self.adopt_adapters()
        if attach is not None and attach.must_load:
            self.memory.manager.load_initial(sglang_api.initial_adapters())
            self.report_adapters()

    def adopt_adapters(self) -> None:
        """The expert maps and the adapter table become what is mapped."""
        attach, manager = self.attached, self.memory.manager
        if manager is None:
            return
        if attach is None:  # parked: everything is scratch, and may be read
            num_experts = self.memory.shape.num_experts if self.memory.shape else 0
            manager.plane.adopt([], range(num_experts))
            return
        manager.plane.adopt([_placed(adapter) for adapter in attach.adapters], attach.expert_ids)

    def report_adapters(self) -> None:
        """Tell the manager what is in memory now, and the worker that its content is valid."""
        manager, attach = self.memory.manager, self.attached
        if manager is None or attach is None:
            return
        known = {adapter.adapter_id: adapter.content for adapter in attach.adapters}
        table = tuple(_told(adapter, known) for adapter in manager.plane.placed())
        self.attached = msgspec.structs.replace(attach, adapters=table)
        wanted = self._wanted(self.attached)
        experts = {name: runs for name, runs in wanted.items() if name.startswith("experts.")}
        self.memory.required_client().mark_loaded(experts)
        self._channel.send(m.AdapterTable(table))

    # ---- serving ----

    def started(self, scheduler: Any) -> None:
        """The event loop is about to begin."""
        self._sleeper = sglang_api.replace_sleeper(scheduler, self._channel.fileno())
        if self.attached is not None:
            self._set_capacity(scheduler, self.attached.kv_tokens)
        self._channel.send(m.Started())

    def poll(self, scheduler: Any) -> None:
        """Between two batches: do what was asked meanwhile, if anything."""
        self._report_heat()
        if not select.select([self._channel.fileno()], [], [], 0)[0]:
            return
        match self._read():
            case None:
                pass
            case m.Wake():
                self._stay_awake()
            case m.Ping():
                self._channel.send(m.Pong())
            case m.Run():  # a second time
                self._answer(m.RankDone)
            case m.ResizeKv(num_tokens):
                self._answer(lambda: self._grow_kv(scheduler, num_tokens))
            case other:
                name = type(other).__name__
                self._channel.send(
                    m.Failed("EngineFailedError", f"{name} while serving", self._num_received)
                )

    def park(self, scheduler: Any) -> None:
        """Publish KV and requests, then wait for instructions until one says Run."""
        self._report_heat(at_once=True)
        self._channel.send(
            m.Frozen(
                sequences=kv_handover.sequences_of(scheduler),
                requests=(
                    *(
                        requests.state_of(req)
                        for req in sglang_api.waiting_requests(scheduler)
                        if len(req.output_ids) > 0
                    ),
                    *self._resumed.values(),  # the front has not sent these yet
                ),
                num_kv_slots=kv_handover.num_slots(scheduler),
            )
        )
        while True:
            instruction = self._receive()
            if isinstance(instruction, m.Run):
                break
            if isinstance(instruction, m.Wake):
                continue
            if isinstance(instruction, m.Ping):
                self._channel.send(m.Pong())
                continue
            if isinstance(instruction, m.Exit):
                logger.info("elastic: rank %d of %s ends", self.rank, self.config.instance)
                sys.stdout.flush()
                os._exit(0)
            self._answer(lambda todo=instruction: self._carry_out(scheduler, todo))  # type: ignore[misc]
        self._channel.send(m.RankDone(number=self._num_received))
        self._stay_awake()
        sglang_api.resume_paused(scheduler)

    def _report_heat(self, *, at_once: bool = False) -> None:
        """What redundant experts are chosen by: every few seconds, and before others take over."""
        now_s = time.monotonic()
        is_due = self.rank == 0 and self.config.num_sources > 1 and self.attached is not None
        if is_due and (at_once or now_s >= self._next_heat_s):
            self._next_heat_s = now_s + _HEAT_PERIOD_S
            heat = heat_of(self.memory)
            if heat is not None:
                self._channel.send(m.HeatReport(heat))

    def _stay_awake(self) -> None:
        if self._sleeper is not None:
            self._sleeper.stay_awake()

    def resume_request(self, req: Any) -> None:
        """A request has arrived: if it ran elsewhere before, it goes on from there."""
        state = self._resumed.pop(req.rid, None)
        if state is not None:
            requests.restore(req, state)

    def _carry_out(self, scheduler: Any, instruction: m.ToRank) -> m.RankDone:
        match instruction:
            case m.Attach():
                return self._attach(scheduler, instruction)
            case m.Detach():
                self._detach(scheduler)
            case m.Activate():
                return self._activate(scheduler, instruction)
            case m.PlaceCopies():
                self._place_copies(instruction)
            case m.ResizeKv():
                return self._resize_frozen(scheduler, instruction.num_tokens)
            case _:
                raise ElasticInternalError(f"{type(instruction).__name__} while parked")
        return m.RankDone()

    def _attach(self, scheduler: Any, attach: m.Attach) -> m.RankDone:
        self.map(attach)
        self.adopt_adapters()
        self.memory.forget_heat()
        num_bytes = 0
        is_incomplete = attach.disk_experts or attach.disk_parts or attach.loads_trunk
        if self.read_disk is not None and is_incomplete:
            num_bytes = self.read_disk(attach)
            self.mark_loaded(trunk=attach.loads_trunk)
        self._set_capacity(scheduler, attach.kv_tokens)
        return m.RankDone(num_bytes=num_bytes)

    def _detach(self, scheduler: Any) -> None:
        sglang_api.forget_requests(scheduler)
        sglang_api.drop_pending_input(scheduler)
        self._resumed.clear()
        sglang_api.reset_prefix_cache(scheduler)
        sglang_api.set_free_slots(scheduler, kv_handover.used_slots(scheduler))  # none
        self.memory.required_mapping().park()
        self._leave_worker()
        self.attached = None
        self.adopt_adapters()

    def _activate(self, scheduler: Any, activate: m.Activate) -> m.RankDone:
        sglang_api.forget_requests(scheduler)
        sglang_api.drop_pending_input(scheduler)
        num_kept, num_copied = kv_handover.take_over(scheduler, activate.sequences), 0
        for move in activate.moves:
            num_copied += kv_handover.take_moved(
                scheduler,
                move.sequences,
                partial(self._copy_kv, source_socket=move.source_socket, by_bytes=move.by_bytes),
            )
        self._resumed = {state.rid: state for state in activate.requests}
        return m.RankDone(num_kept_slots=num_kept, num_copied_slots=num_copied)

    def _copy_kv(
        self, pairs: list[tuple[int, int]], source_socket: str = "", *, by_bytes: bool = False
    ) -> None:
        copy_rows(self.memory.required_mapping(), pairs, source_socket, by_bytes=by_bytes)

    def _set_capacity(self, scheduler: Any, num_tokens: int) -> None:
        sglang_api.set_kv_capacity(scheduler, num_tokens)
        sglang_api.set_free_slots(scheduler, kv_handover.used_slots(scheduler))

    def _resize_frozen(self, scheduler: Any, num_tokens: int) -> m.RankDone:
        old = sglang_api.kv_capacity(scheduler)
        if num_tokens >= old:
            return self._grow_kv(scheduler, num_tokens)
        num_moved = kv_handover.compact(scheduler, num_tokens, self._copy_kv)
        self._set_capacity(scheduler, num_tokens)
        lost = self.memory.kv_run(num_tokens + 1, old - num_tokens)
        self.memory.required_mapping().shrink(lost)
        self.memory.required_client().unmap_slots(lost)
        self._note_capacity(num_tokens)
        return m.RankDone(num_copied_slots=num_moved)

    def _grow_kv(self, scheduler: Any, num_tokens: int) -> m.RankDone:
        old = sglang_api.kv_capacity(scheduler)
        if num_tokens <= old:
            return m.RankDone()
        gained = self.memory.kv_run(old + 1, num_tokens - old)
        self.memory.required_client().map_slots(gained)
        self.memory.required_mapping().extend(self.memory.required_client(), gained)
        sglang_api.set_kv_capacity(scheduler, num_tokens)
        sglang_api.add_free_slots(scheduler, old + 1, num_tokens)
        self._note_capacity(num_tokens)
        return m.RankDone()

    def _place_copies(self, told: m.PlaceCopies) -> None:
        """Map the device's copies in place of former ones; who computes what changes with them."""
        if self.attached is None:
            raise ElasticInternalError("nothing is attached")
        before = self._wanted(self.attached)
        copies = copies_by_layer(told.copies, told.placement.device_ids[self.rank])
        self.attached = msgspec.structs.replace(self.attached, copies=copies)
        wanted = self._wanted(self.attached)
        mapping = self.memory.required_mapping()
        mapping.extend(self.memory.required_client(), difference(wanted, before))
        place_copies(self.memory, told.placement, told.copies, self.rank)
        mapping.shrink(difference(before, wanted))
        self.memory.note_mapped(wanted)

    def _note_capacity(self, num_tokens: int) -> None:
        if self.attached is not None:
            self.attached = msgspec.structs.replace(self.attached, kv_tokens=num_tokens)

    # ---- the channel ----

    def _receive(self) -> m.ToRank:
        while (message := self._read()) is None:
            pass
        return message

    def _read(self) -> m.ToRank | None:
        """The next message; None for one that has come before."""
        self._channel.wait()
        try:
            told, fds = self._channel.receive(_SEND_TIMEOUT_S)
        except EngineFailedError as error:  # the front has ended, or has given this rank up
            logger.info("elastic: rank %d of %s ends: %s", self.rank, self.config.instance, error)
            os._exit(0)
        fds.close()
        if told.number <= self._num_received:
            logger.warning("elastic: %s came a second time", told.message)
            return None
        self._num_received = told.number
        return told.message

    def _answer(self, action: Callable[[], m.RankDone]) -> None:
        started = time.monotonic()
        try:
            done = action()
        except ElasticError as error:
            logger.exception("elastic: an instruction failed")
            self._channel.send(m.Failed(type(error).__name__, str(error), self._num_received))
            return
        seconds = time.monotonic() - started
        self._channel.send(
            msgspec.structs.replace(done, seconds=seconds, number=self._num_received)
        )


def _connect(config: EngineConfig) -> wire.Channel[m.Told]:
    sock = wire.connect(config.front_socket, EngineFailedError, _SEND_TIMEOUT_S)
    return wire.Channel(
        sock,
        _DECODER,
        peer="the instance manager",
        failure=EngineFailedError,
        timeout_s=_SEND_TIMEOUT_S,
    )


def _placed(adapter: AdapterEntry) -> PlacedAdapter:
    source = AdapterSource(adapter.adapter_id, adapter.name, adapter.path, adapter.pinned)
    return PlacedAdapter(source, adapter.adapter_slot, adapter.experts)


def _told(adapter: PlacedAdapter, known: Mapping[str, str]) -> AdapterEntry:
    """`known`: contents of adapters that were loaded before, by id."""
    source = adapter.source
    content = known.get(source.adapter_id) or fingerprint(Path(source.path)) or ""
    return AdapterEntry(
        adapter_id=source.adapter_id,
        name=source.name,
        path=source.path,
        adapter_slot=adapter.adapter_slot,
        pinned=source.pinned,
        experts={layer: _ids(ids) for layer, ids in adapter.experts.items()},
        content=content,
    )


def _ids(expert_ids: Iterable[int]) -> tuple[int, ...]:
    return tuple(int(expert_id) for expert_id in expert_ids)


_rank: EngineRank | None = None


def current() -> EngineRank:
    """This process's rank. Raises ElasticInternalError before the model is built."""
    if _rank is None:
        raise ElasticInternalError("this process is no elastic rank yet")
    return _rank


def start(config: EngineConfig, device: torch.device) -> EngineRank:
    """Connect this process to the runtime, once."""
    global _rank
    if _rank is None:
        _rank = EngineRank(config, sglang_api.tp_rank(), device)
    return _rank
