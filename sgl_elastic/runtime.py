"""The elastic runtime of one server: every part, put together.

options, launch plan --> [Runtime]: HMM, router
SGLang wants its schedulers --> [start] --> Parts: instances, coordinator
HTTP is up --> [serve]: standbys, watchdog, metrics, autoscaler
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from sgl_elastic import assembly, workdir
from sgl_elastic.autoscale import metrics
from sgl_elastic.autoscale.autoscaler import AutoscaleMetrics, Autoscaler
from sgl_elastic.autoscale.metrics import FaultMetrics, SpareMetrics
from sgl_elastic.autoscale.policy import LoadSample
from sgl_elastic.autoscale.slo import SloTargets, SloWindow
from sgl_elastic.coordinator.coordinator import Coordinator
from sgl_elastic.coordinator.expert_copies import RedundantExperts
from sgl_elastic.coordinator.operations import Operation
from sgl_elastic.coordinator.ports import Wire
from sgl_elastic.coordinator.recovery import Watchdog, WatchdogConfig, Watched
from sgl_elastic.errors import ElasticError, ElasticInternalError
from sgl_elastic.front.dispatcher import FrontListener
from sgl_elastic.front.rank_choice import RankPolicy, RankStrategy
from sgl_elastic.instance.manager import InstanceManager
from sgl_elastic.instance.state import Instance
from sgl_elastic.instance.supervise import EngineSettings
from sgl_elastic.options import ElasticOptions
from sgl_elastic.plan.placement import place
from sgl_elastic.types import AdapterEntry, MemoryShape, Placement, ScaleRequest

logger = logging.getLogger(__name__)

_PARKED_KV_TOKENS = 4096
_RENEW_S = 15.0  # between looks at what copies of experts are worth
_CLOSE_S = 5.0  # for a scale that runs when the server ends; health's STOP_S is for all of it
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0  # between attempts to start a standby


@dataclass(frozen=True)
class Parts:
    """What there is once the first instance serves."""

    manager: InstanceManager
    watched: Watched  # who is lost, and whether that is replaced
    coordinator: Coordinator


class Runtime:
    """Owns everything elastic in the process that serves HTTP. `close` ends all of it."""

    def __init__(
        self,
        options: ElasticOptions,
        wire: Wire,
        *,
        sglang_argv: tuple[str, ...],
        first_argv: tuple[str, ...],
        first_adapters: tuple[AdapterEntry, ...],
        adapter_reserve_bytes: int,
        environment: Callable[[int], Mapping[str, str]],
        page_bytes: int,
        backend: str,
    ) -> None:
        """`sglang_argv` is every instance's; `first_argv` only that of the one that loads.

        `first_adapters` are what that one will load: their pages are counted before it does.
        `adapter_reserve_bytes` of each device are left to adapters, these included.
        """
        self.options = options
        self._sglang_argv, self._first_argv = sglang_argv, first_argv
        self._first_adapters = first_adapters
        self._environment = environment
        self._page_bytes, self._backend = page_bytes, backend
        self._parts: Parts | None = None
        self._wanted = threading.Event()  # standbys are to be looked after
        self._stopping = threading.Event()
        self._ends = ExitStack()  # of each part that there is, the last one first
        for stale in workdir.remove_stale():
            logger.warning("elastic: removed %s, which a killed server left", stale)
        folder = workdir.make()
        self._ends.callback(folder.remove)
        self.directory = folder.path
        try:
            self._cluster = assembly.make_cluster(options, self.directory)
        except ElasticError:
            self.close()
            raise
        if self._cluster is not None:
            self._ends.callback(self._cluster.close)
        self.hmm = assembly.make_memory(options, self.directory, backend, page_bytes, self._cluster)
        self._ends.callback(self.hmm.close)
        self.hmm.reserve_for_adapters(adapter_reserve_bytes)
        self._reserves = adapter_reserve_bytes > 0
        self.spares = assembly.make_spares(options, backend, environment, self._wanted.set)
        self._ends.callback(self.spares.close)
        self.spares.begin()
        self._wire = wire
        self.router = assembly.make_router(
            options,
            wire,
            RankPolicy(strategy=RankStrategy(options.rank_strategy)),
            SloWindow(SloTargets(options.slo_ttft_s, options.slo_tpot_s)),
        )

    @property
    def parts(self) -> Parts:
        """Raises ElasticInternalError before `start` has ended."""
        if self._parts is None:
            raise ElasticInternalError("the elastic runtime has not started")
        return self._parts

    def instances(self) -> tuple[Instance, ...]:
        """All of them, the serving one first; none before the first one serves."""
        return self._parts.manager.instances() if self._parts is not None else ()

    def is_lost(self) -> bool:
        """Whether the instance that serves is gone, and another is to take its place."""
        return self.parts.watched.is_lost()

    def start(self, port_args: Any) -> dict[str, Any]:
        """Start the first instance. Returns what SGLang wants to know of its scheduler."""
        self._wire.answer_at(port_args.tokenizer_ipc_name)
        settings = self._settings(port_args)
        manager = assembly.make_instances(self.options, settings, self.hmm, self.router)
        self._ends.callback(manager.close)
        devices = tuple(range(self.options.dp_size))
        name = manager.start_first(devices, self._first_placement)
        _, placement = manager.serving()
        self.router.begin(name, placement)
        coordinator, watched = assembly.make_coordinator(
            self.options, self.hmm, manager, self.router
        )
        coordinator.listen(self._note_operation)
        self._ends.callback(self._end_scaling, coordinator)
        self._parts = Parts(manager, watched, coordinator)
        tokens = min(placement.kv_tokens)
        return {"max_total_num_tokens": tokens, "max_req_input_len": tokens - 6}

    def serve(self, on_size: Callable[[int], None], on_ended: Callable[[int], None]) -> None:
        """HTTP is up: spares, standbys and the autoscaler may start.

        `on_size` hears each new size at its switch, `on_ended` the size after each operation.
        """
        parts = self.parts
        self._wanted.set()
        threading.Thread(
            target=self._keep_ready,
            args=(parts.manager, metrics.SpareMetrics()),
            name="elastic-standbys",
            daemon=True,
        ).start()
        faults = FaultMetrics()
        self._start_watchdog(parts, faults)
        observed = metrics.ScaleMetrics()
        observed.set_placement(parts.coordinator.serving[1])
        parts.coordinator.listen(observed.observe)
        parts.coordinator.listen(metrics.when_ended(on_ended))
        self.router.listen(
            FrontListener(on_size, observed.observe_held, lambda: faults.count("request"))
        )
        if parts.coordinator.redundancy is not None:
            parts.coordinator.redundancy.on_change = metrics.CopyMetrics().observe
            threading.Thread(
                target=self._renew_copies,
                args=(parts.coordinator, parts.coordinator.redundancy),
                name="elastic-copies",
                daemon=True,
            ).start()
        if self.options.autoscale is not None:
            autoscaler = Autoscaler(
                self.options.autoscale,
                self._sample,
                parts.coordinator.submit,
                metrics=AutoscaleMetrics(),
            )
            autoscaler.start()
            self._ends.callback(autoscaler.stop)

    def _start_watchdog(self, parts: Parts, faults: FaultMetrics) -> None:
        def note(kind: str) -> None:
            faults.count(kind)
            if not parts.watched.is_lost():
                self._wanted.set()  # another standby in place of the lost one

        watchdog = Watchdog(
            parts.watched,
            self.hmm,
            parts.coordinator,
            config=WatchdogConfig(hang_s=self.options.hang_timeout_s),
            on_fault=note,
            on_hopeless=_end_server,
        )
        watchdog.start()
        self._ends.callback(watchdog.stop)

    def close(self) -> None:
        """End instances and workers; remove the sockets. Harmless a second time.

        A scale that runs may end before, for a few seconds: what it works on is not taken from it.
        """
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._wanted.set()
        self._ends.close()

    def _end_scaling(self, coordinator: Coordinator) -> None:
        if not coordinator.close(_CLOSE_S):
            logger.warning("elastic: the server ends while a scale runs; its log ends with errors")

    def _settings(self, port_args: Any) -> EngineSettings:
        settings = EngineSettings(
            directory=self.directory,
            sglang_argv=self._sglang_argv,
            first_argv=self._first_argv,
            tokenizer_ipc=port_args.tokenizer_ipc_name,
            detokenizer_ipc=port_args.detokenizer_ipc_name,
            backend=self._backend,
            page_bytes=self._page_bytes,
            max_kv_tokens=self.options.kv_limit,
            num_sources=self.options.num_sources,
            parked_kv_tokens=min(_PARKED_KV_TOKENS, self.options.kv_limit),
            environment=self._environment,
        )
        return assembly.place_engines(self._cluster, self.spares, settings)

    def _first_placement(self, shape: MemoryShape) -> Placement:
        devices = tuple(range(self.options.dp_size))
        headroom = self.hmm.headroom_pages()
        budgets = {device: self.hmm.budget_pages(device) - headroom for device in devices}
        # A reserve has room for the first adapters; without one their pages are counted.
        adapters = () if self._reserves else self._first_adapters
        return place(shape, devices, None, budgets, adapters, self.options.kv_limit)

    def _note_operation(self, operation: Operation, placement: Placement) -> None:
        self.router.scaling(not operation.finished)
        if operation.finished:
            self._wanted.set()

    def _keep_ready(self, manager: InstanceManager, observed: SpareMetrics) -> None:
        """Spares, then standbys, which are copies of them; again whenever that may have changed."""
        pause_s = _FIRST_PAUSE_S
        while not self._stopping.is_set():
            self._wanted.wait()
            self._wanted.clear()
            has_failed = [self._fails(keep) for keep in (self.spares.fill, manager.keep_standbys)]
            if self._stopping.is_set():
                return
            observed.set(self.spares.seen())
            if any(has_failed) or self._may_not_start():  # something may be left to start
                self._stopping.wait(pause_s)
                self._wanted.set()
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S) if any(has_failed) else _FIRST_PAUSE_S

    def _fails(self, keep: Callable[[Callable[[], bool]], None]) -> bool:
        """Start what is missing of one kind; whether that failed."""
        try:
            keep(self._may_not_start)
        except Exception:  # of the thread's main loop: a standby less is no outage
            if not self._stopping.is_set():  # else it ended with the server
                logger.exception("elastic: a spare or a standby could not be started")
            return True
        return False

    def _may_not_start(self) -> bool:
        """Whether to start nothing that only might be needed: a scale needs the processors."""
        return self._stopping.is_set() or self.parts.coordinator.running() is not None

    def _renew_copies(self, coordinator: Coordinator, redundancy: RedundantExperts) -> None:
        """A scale to what is there renews the copies of experts."""
        while not self._stopping.wait(_RENEW_S):
            try:
                if coordinator.running() is None and redundancy.is_due():
                    serving = coordinator.serving[1]
                    coordinator.submit(ScaleRequest(serving.dp_size, serving.device_ids))
            except ElasticError as error:  # busy, or lost: later
                logger.info("elastic: copies of experts stay as they are: %s", error)

    def _sample(self, now_s: float) -> LoadSample:
        coordinator = self.parts.coordinator
        _, placement = coordinator.serving
        return LoadSample(
            num_devices=placement.dp_size,
            attainment=self.router.attainment(now_s),
            kv_used_tokens=self.router.num_tokens(),
            kv_capacity_tokens=sum(placement.kv_tokens),
            is_scaling=coordinator.running() is not None,
        )


def _end_server() -> None:
    """As SGLang does when a scheduler has failed: better no server than one that never answers."""
    os.kill(os.getpid(), signal.SIGQUIT)
