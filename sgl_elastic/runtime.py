"""The elastic runtime of one server: every part, put together.

options, launch plan --> [Runtime] --> HMM, instances, router, coordinator, autoscaler
                             ^-- start() when SGLang wants its schedulers
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any

from sgl_elastic import assembly, workdir
from sgl_elastic.autoscale import metrics
from sgl_elastic.autoscale.autoscaler import AutoscaleMetrics, Autoscaler
from sgl_elastic.autoscale.metrics import FaultMetrics
from sgl_elastic.autoscale.policy import LoadSample
from sgl_elastic.autoscale.slo import SloTargets, SloWindow
from sgl_elastic.coordinator.coordinator import Coordinator
from sgl_elastic.coordinator.operations import Operation
from sgl_elastic.coordinator.ports import Wire
from sgl_elastic.coordinator.recovery import Watchdog, WatchdogConfig
from sgl_elastic.errors import ElasticError
from sgl_elastic.front.rank_choice import RankPolicy, RankStrategy
from sgl_elastic.instance.manager import EngineSettings, HandedOver, InstanceManager
from sgl_elastic.options import ElasticOptions
from sgl_elastic.plan.placement import place
from sgl_elastic.types import AdapterEntry, MemoryShape, Placement

logger = logging.getLogger(__name__)

_PARKED_KV_TOKENS = 4096
_CLOSE_S = 5.0  # for a scale that runs when the server ends; health's STOP_S is for all of it
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0  # between attempts to start a standby


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
        for stale in workdir.remove_stale():
            logger.warning("elastic: removed %s, which a killed server left", stale)
        self._workdir = workdir.make()
        self.directory = self._workdir.path
        try:
            self._cluster = assembly.make_cluster(options, self.directory)
        except ElasticError:
            self._workdir.remove()
            raise
        self.hmm = assembly.make_memory(options, self.directory, backend, page_bytes, self._cluster)
        self.hmm.reserve_for_adapters(adapter_reserve_bytes)
        self._reserves = adapter_reserve_bytes > 0
        self.window = SloWindow(SloTargets(options.slo_ttft_s, options.slo_tpot_s))
        self.router = assembly.router_type_of(options)(
            wire,
            handed_over=self._handed_over,
            on_switch=self._note_switch,
            wake=self._wake,
            go_on=self._go_on,
            on_held=self._note_held,
            policy=RankPolicy(strategy=RankStrategy(options.rank_strategy)),
            window=self.window,
        )
        self.manager: InstanceManager | None = None
        self.coordinator: Coordinator | None = None
        self.autoscaler: Autoscaler | None = None
        self._watchdog: Watchdog | None = None
        self._metrics: metrics.ScaleMetrics | None = None
        self._on_size: Callable[[int], None] = lambda _: None
        self._stopping = threading.Event()
        self._wanted = threading.Event()  # standbys are to be looked after

    def start(self, port_args: Any) -> dict[str, Any]:
        """Start the first instance. Returns what SGLang wants to know of its scheduler."""
        manager = self.manager = assembly.make_instances(
            self.options, self._settings(port_args), self.hmm, self.router
        )
        devices = tuple(range(self.options.dp_size))
        name = manager.start_first(devices, self._first_placement)
        _, placement = manager.serving()
        self.router.begin(name, placement)
        self.coordinator = assembly.make_coordinator(self.options, self.hmm, manager, self.router)
        self.coordinator.listen(self._note_operation)
        tokens = min(placement.kv_tokens)
        return {"max_total_num_tokens": tokens, "max_req_input_len": tokens - 6}

    def serve(self, on_size: Callable[[int], None], on_ended: Callable[[int], None]) -> None:
        """HTTP is up: standbys and the autoscaler may start.

        `on_size` hears each new size at its switch, `on_ended` the size after each operation.
        """
        self._on_size = on_size
        threading.Thread(target=self._keep_standbys, name="elastic-standbys", daemon=True).start()
        self._wanted.set()
        self._start_watchdog()
        self._start_metrics(on_ended)
        if self.options.autoscale is not None and self.coordinator is not None:
            self.autoscaler = Autoscaler(
                self.options.autoscale,
                self._sample,
                self.coordinator.submit,
                metrics=AutoscaleMetrics(),
            )
            self.autoscaler.start()

    def _start_metrics(self, on_ended: Callable[[int], None]) -> None:
        if self.coordinator is None:
            raise RuntimeError("metrics of a coordinator that is not there")
        self._metrics = metrics.ScaleMetrics()
        self._metrics.set_placement(self.coordinator.serving[1])
        self.coordinator.listen(self._metrics.observe)
        self.coordinator.listen(metrics.when_ended(on_ended))

    def _note_held(self, seconds: float) -> None:
        if self._metrics is not None:
            self._metrics.observe_held(seconds)

    def _start_watchdog(self) -> None:
        if self.manager is None or self.coordinator is None:
            raise RuntimeError("the watchdog starts before what it watches")
        faults = FaultMetrics()

        def note(kind: str) -> None:
            faults.count(kind)
            if self.manager is not None and not self.manager.is_lost():
                self._wanted.set()  # another standby in place of the lost one

        self._watchdog = Watchdog(
            self.manager,
            self.hmm,
            self.coordinator.recover,
            config=WatchdogConfig(hang_s=self.options.hang_timeout_s),
            on_fault=note,
            on_hopeless=_end_server,
        )
        self._watchdog.start()

    def close(self) -> None:
        """End instances and workers; remove the sockets. Harmless a second time.

        A scale that runs may end before, for a few seconds: what it works on is not taken from it.
        """
        if self._stopping.is_set():
            return
        self._stopping.set()
        if self._watchdog is not None:
            self._watchdog.stop()
        self._wanted.set()
        if self.autoscaler is not None:
            self.autoscaler.stop()
        if self.coordinator is not None and not self.coordinator.close(_CLOSE_S):
            logger.warning("elastic: the server ends while a scale runs; its log ends with errors")
        if self.manager is not None:
            self.manager.close()
        self.hmm.close()
        if self._cluster is not None:
            self._cluster.close()
        self._workdir.remove()

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
            parked_kv_tokens=min(_PARKED_KV_TOKENS, self.options.kv_limit),
            environment=self._environment,
        )
        return assembly.place_engines(self._cluster, settings)

    def _first_placement(self, shape: MemoryShape) -> Placement:
        devices = tuple(range(self.options.dp_size))
        headroom = self.hmm.headroom_pages()
        budgets = {device: self.hmm.budget_pages(device) - headroom for device in devices}
        # A reserve has room for the first adapters; without one their pages are counted.
        adapters = () if self._reserves else self._first_adapters
        return place(shape, devices, None, budgets, adapters, self.options.kv_limit)

    def _handed_over(self) -> HandedOver:
        if self.manager is None:
            raise RuntimeError("a switch before the first instance")
        return self.manager.handed_over()

    def _wake(self, instance: str) -> None:
        if self.manager is not None:
            self.manager.wake(instance)

    def _go_on(self, instance: str) -> None:
        if self.manager is not None:
            self.manager.go_on(instance)

    def _note_switch(self, placement: Placement) -> None:
        self.window.forget_finished()
        self._on_size(placement.dp_size)

    def _note_operation(self, operation: Operation, placement: Placement) -> None:
        self.router.scaling(not operation.finished)
        if operation.finished:
            self._wanted.set()

    def _keep_standbys(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._stopping.is_set():
            self._wanted.wait()
            self._wanted.clear()
            if self._stopping.is_set() or self.manager is None:
                return
            try:
                self.manager.keep_standbys(self._stopping)
                pause_s = _FIRST_PAUSE_S
            except Exception:  # the thread's main loop: a standby less is no outage
                logger.exception("elastic: a standby could not be started")
                self._stopping.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                self._wanted.set()

    def _sample(self, now_s: float) -> LoadSample:
        if self.coordinator is None:
            raise RuntimeError("the autoscaler samples before the coordinator is there")
        _, placement = self.coordinator.serving
        return LoadSample(
            num_devices=placement.dp_size,
            attainment=self.router.attainment(now_s),
            num_running=self.router.num_running(),
            max_running=0,
            kv_used_tokens=self.router.num_tokens(),
            kv_capacity_tokens=sum(placement.kv_tokens),
            is_scaling=self.coordinator.running() is not None,
        )


def _end_server() -> None:
    """As SGLang does when a scheduler has failed: better no server than one that never answers."""
    os.kill(os.getpid(), signal.SIGQUIT)
