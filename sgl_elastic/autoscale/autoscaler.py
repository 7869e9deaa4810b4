"""The loop that judges windows, submits what the policy decides, and says so at /metrics.

    clock --> [Autoscaler] --sample--> LoadSample --> policy.decide --> submit --> Coordinator

After a switch, call `SloWindow.forget_finished`: what finished before it would be counted against
the new configuration.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from sgl_elastic.autoscale.policy import (
    AutoscalePolicy,
    AutoscaleState,
    LoadSample,
    Reason,
    decide,
)
from sgl_elastic.autoscale.slo import Attainment, check_above_zero
from sgl_elastic.errors import BusyError, ElasticError
from sgl_elastic.types import ScaleRequest

logger = logging.getLogger(__name__)


class Outcome(StrEnum):
    """What became of a request; a label of the metrics."""

    SUBMITTED = "submitted"
    BUSY = "busy"  # another scale was faster: the next window tries again
    REFUSED = "refused"  # a named error; the next window tries again


class AutoscaleMetrics:
    """What the autoscaler saw and did, beside SGLang's own metrics at /metrics."""

    def __init__(self, registry: Any = None) -> None:
        """registry: of prometheus_client; None = its own. Once a process and registry."""
        # SGLang names the folder that its processes share before it starts a rank, and
        # prometheus_client reads that name when it is imported.
        from prometheus_client import REGISTRY, Counter, Gauge

        registry = registry or REGISTRY

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"sgl_elastic:autoscale_{name}", what, labels, registry=registry)

        self._attainment = Gauge(
            "sgl_elastic:slo_attainment",
            "Share of requests within the targets, in the last window.",
            labelnames=("target",),
            multiprocess_mode="mostrecent",
            registry=registry,
        )
        self._windows = counter(
            "windows", "Windows that were judged, by the reason for scaling or not.", "reason"
        )
        self._requests = counter("requests", "Scales that were asked for.", "direction", "outcome")
        self._errors = counter(
            "errors", "Windows that could not be judged because something raised."
        )

    def judged(self, attainment: Attainment, reason: Reason) -> None:
        """A window was judged."""
        for target in ("ttft", "tpot", "both"):
            self._attainment.labels(target).set(getattr(attainment, target))
        self._windows.labels(reason.value).inc()

    def requested(self, direction: str, outcome: Outcome) -> None:
        """A scale `up` or `down` was asked for."""
        self._requests.labels(direction, outcome.value).inc()

    def failed(self) -> None:
        """A window could not be judged."""
        self._errors.inc()


class Autoscaler:
    """Judges a window every `interval_s`, in a thread of its own, and submits what it decides.

    Nothing raised here reaches the serving path. A scale that is refused, or that finds another
    one under way, is tried again in the next window while the reason lasts.
    """

    def __init__(
        self,
        policy: AutoscalePolicy | None,
        sample: Callable[[float], LoadSample],
        submit: Callable[[ScaleRequest], object],
        interval_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        metrics: AutoscaleMetrics | None = None,
    ) -> None:
        """policy: None = off, `start` then does nothing.

        sample: the load as of a time of `clock`; called in the autoscaler's thread.
        submit: starts a scale and returns at once, or raises an ElasticError.
        """
        check_above_zero("interval_s", interval_s)
        self._policy = policy
        self._sample, self._submit = sample, submit
        self._interval_s, self._clock, self._metrics = interval_s, clock, metrics
        self._state = AutoscaleState()
        self._last_refusal = ""
        self._lock = threading.Lock()  # of the thread and its stop event
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    @property
    def is_running(self) -> bool:
        """Whether windows are being judged."""
        with self._lock:
            return self._thread is not None

    def start(self) -> None:
        """Begin; harmless when begun already. From any thread."""
        with self._lock:
            if self._policy is None or self._thread is not None:
                return
            self._stop = threading.Event()
            self._thread = threading.Thread(
                target=self._run, args=(self._stop,), name="autoscaler", daemon=True
            )
            self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End; harmless when ended already. From any thread. Waits for a window that is judged."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._stop.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def judge_window(self) -> Reason:
        """One window, now. Called by the thread; by itself it is for tests and tools."""
        now_s = self._clock()
        sample = self._sample(now_s)
        request, state, reason = decide(self._policy, sample, self._state, now_s)
        if request is None or self._submitted(request, sample, reason):
            self._state = state
        if self._metrics is not None:
            self._metrics.judged(sample.attainment, reason)
        return reason

    def _submitted(self, request: ScaleRequest, sample: LoadSample, reason: Reason) -> bool:
        """Whether the request was accepted."""
        what = f"{sample.num_devices} -> {request.dp_size} devices ({reason.value})"
        outcome, refusal = Outcome.SUBMITTED, ""
        try:
            self._submit(request)
            logger.info("Autoscaling %s.", what)
        except BusyError:
            outcome = Outcome.BUSY
        except ElasticError as error:
            outcome, refusal = Outcome.REFUSED, f"{what}: {error}"
        self._warn_once(refusal)
        if self._metrics is not None:
            direction = "up" if request.dp_size > sample.num_devices else "down"
            self._metrics.requested(direction, outcome)
        return outcome is Outcome.SUBMITTED

    def _warn_once(self, refusal: str) -> None:
        """refusal: "" = none. The same one in every window would fill the log."""
        if refusal and refusal != self._last_refusal:
            logger.warning("Autoscaling was refused, and is tried again: %s", refusal)
        self._last_refusal = refusal

    def _run(self, stop: threading.Event) -> None:
        while not stop.wait(self._interval_s):
            try:
                self.judge_window()
            except Exception:
                # A loop that died would never scale again, and nobody would see why.
                logger.exception("The autoscaler could not judge a window; it goes on.")
                if self._metrics is not None:
                    self._metrics.failed()
