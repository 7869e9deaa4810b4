"""The instance manager (IMM): engines that start, park, attach, serve and leave.

coordinator --[Instances]--> [InstanceManager] --> starting.py: how instances come to be
                                    |--> table.py: processes, ranks, how they end
                                    |--> EngineLink: what travels SGLang's own way (front/)
                                    '--> Hmm: sockets, the adapter table
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from sgl_elastic.errors import EngineFailedError, StepFailedError
from sgl_elastic.instance import handover
from sgl_elastic.instance import rank_messages as m
from sgl_elastic.instance.handover import FrozenInstance, HandedOver
from sgl_elastic.instance.links import expect_all, send_all
from sgl_elastic.instance.running import Running
from sgl_elastic.instance.starting import InstanceStarter
from sgl_elastic.instance.state import InstanceState
from sgl_elastic.processes import giving_way
from sgl_elastic.types import ExpertCopy, MemoryShape, Placement, Step, StepKind

logger = logging.getLogger(__name__)

_S = InstanceState
_DRAIN_POLL_S = 0.02
_DELIVERY_S = 0.005
_FINISH_S = 1.0  # what a rank of an instance that cannot take over has, to answer


class InstanceManager(InstanceStarter):
    """The engines of one server. `Instances` of coordinator/ports.py, and what starts the first."""

    def start_first(
        self, device_ids: tuple[int, ...], place: Callable[[MemoryShape], Placement]
    ) -> str:
        """Start, load from disk, serve. `place` is asked once the memory's shape is known."""
        name = self._spawn(device_ids, self._settings.first_argv)
        running = self._running[name]
        shape = self._declared(running)
        self._hmm.define(shape)
        placement = place(shape)
        self._hmm.map_placement(placement)
        self._attach_all(running, placement, must_load=True)
        deadline = time.monotonic() + self._timeouts.start_s
        loaded = [link.expect(m.Loaded, deadline) for link in running.links]
        logger.info("elastic: %d bytes read from disk", sum(x.num_disk_bytes for x in loaded))
        self._spread_trunk(placement)
        send_all(running.links, [m.Run()] * len(running.links))
        expect_all(running.links, m.Started, self._timeouts.start_s)
        self._advance(running, _S.ATTACHED, placement)
        self._advance(running, _S.WARM)
        self._advance(running, _S.ACTIVE)
        self._active = name
        return name

    def _spread_trunk(self, placement: Placement) -> None:
        first, *others = placement.device_ids
        for device_id in others:
            self._hmm.execute(Step(StepKind.COPY_TRUNK, device_id, source_id=first))
        self._hmm.commit()

    # ---- Instances ----

    def serving(self) -> tuple[str, Placement]:
        with self._lock:
            running = self._running.get(self._active)
            placement = (running.record.placement or running.placement) if running else None
        if placement is None:
            raise EngineFailedError(f"{self._active} serves no more: restart the server")
        return self._active, placement

    def prepare(self, placement: Placement, reads: Sequence[Step] = ()) -> str:
        for device_id in placement.device_ids:
            self._hmm.client(device_id)  # a dead worker is named as such
        name = self._take_standby(placement.device_ids)
        if name is not None:
            try:  # where its memory worker failed, another instance would fail alike
                return self._attach(name, placement, reads)
            except EngineFailedError as error:
                logger.warning("elastic: standby %s is of no use: %s", name, error)
        return self._attach(self._start_parked(placement.device_ids), placement, reads)

    def _attach(self, name: str, placement: Placement, reads: Sequence[Step]) -> str:
        """A parked instance gets memory; one that cannot is ended, and that is raised."""
        running = self._running[name]
        running.is_reading = bool(reads)  # which takes as long as it takes
        limit_s = self._timeouts.start_s if reads else self._timeouts.step_s
        try:
            if not self._is_alive(name):
                raise EngineFailedError(f"{name} has ended")
            self._attach_all(running, placement, must_load=False, reads=reads)
            done = expect_all(running.links, m.RankDone, limit_s)
        except StepFailedError:
            self.stop(name)
            raise
        running.is_reading = False
        numbers = [each.num_bytes for each in done]
        running.num_read = dict(zip(placement.device_ids, numbers, strict=True))
        self._advance(running, _S.ATTACHED, placement)
        self._advance(running, _S.WARM)
        running.is_waiting = True
        return name

    def num_read(self, instance: str, device_id: int) -> int:
        return self._running[instance].num_read.get(device_id, 0)

    def cancel(self, instance: str) -> None:
        self.retire(instance)

    def freeze(self, instance: str) -> FrozenInstance:
        """One that does not in time is lost: its requests go on from the tokens that came by.

        So is one whose last outputs do not come: what it published is of tokens nobody has seen.
        """
        running = self._running[instance]
        device_ids = running.record.device_ids
        try:
            if not running.lost:
                frozen = FrozenInstance(instance, device_ids, self._pause(running))
                self._engine_link.wait_for_outputs(frozen.num_sent())
                self._advance(running, _S.FROZEN)
                return frozen
        except EngineFailedError as error:
            self.lose(instance, str(error))
        states = self._engine_link.states()
        return FrozenInstance(instance, device_ids, handover.frozen_of(states, len(device_ids)))

    def resume(self, instance: str) -> None:
        running = self._running[instance]
        if running.lost:
            return  # its replacement goes on
        self._run(running)
        self._advance(running, _S.ACTIVE)

    def drain(self, instance: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._engine_link.num_running() > 0:
            if self._running[instance].lost:
                raise EngineFailedError(f"{instance} is lost: {self._running[instance].lost}")
            if time.monotonic() > deadline:
                raise EngineFailedError(f"{instance} still runs requests after {timeout_s:g} s")
            time.sleep(_DRAIN_POLL_S)

    def activate(
        self, instance: str, frozen: FrozenInstance, kv_moves: Mapping[int, int]
    ) -> HandedOver:
        new = self._running[instance]
        activations, handed = handover.hand_over(
            frozen, new.record.device_ids, kv_moves, self._hmm.socket_path, self._hmm.are_apart
        )
        return handed.with_taken(self._take_over(new, activations))

    def _take_over(self, new: Running, activations: list[m.Activate]) -> list[m.RankDone]:
        """Tell an instance what it takes over; it runs when its requests have been sent."""
        try:
            send_all(new.links, activations)
            done = expect_all(new.links, m.RankDone, self._timeouts.step_s)
        except StepFailedError as error:
            self._end_unless_done(new, str(error))
            raise
        self._advance(new, _S.ACTIVE)
        with self._lock:
            self._active = new.record.instance_id
        return done

    def _end_unless_done(self, new: Running, reason: str) -> None:
        """A rank that is still at it writes KV into slots that the old instance may use soon.

        A rank that has failed is at nothing: an instance of such ranks can be parked again.
        """
        deadline = time.monotonic() + _FINISH_S
        if not all(link.finish(deadline) for link in new.links):
            self.lose(new.record.instance_id, reason)

    def start_serving(self, instance: str) -> None:
        """An attached instance runs; harmless a second time.

        The requests that were sent to it go through SGLang's controller. Ranks that begin before
        all have arrived compute them in two batches, and the second one's streams wait for both.
        """
        running = self._running[instance]
        if not running.is_waiting:
            return
        time.sleep(_DELIVERY_S)
        self._run(running)
        running.is_waiting = False
        if running.record.state is _S.WARM:  # beside the one that serves
            self._advance(running, _S.ACTIVE)

    def retire(self, instance: str) -> None:
        running = self._running.get(instance)
        if running is None or running.record.state in (_S.PARKED, _S.STOPPED):
            return
        if running.lost:
            self.stop(instance)
            return
        try:
            with giving_way(running.process, "background"):
                send_all(running.links, [m.Detach()] * len(running.links))
                expect_all(running.links, m.RankDone, self._timeouts.step_s)
        except StepFailedError as error:
            logger.warning("elastic: %s could not be parked, so it ends: %s", instance, error)
            self.stop(instance)
            return
        self._advance(running, _S.PARKED)
        self._put_away(running)

    def resize_kv(self, device_id: int, num_tokens: int) -> None:
        name, placement = self.serving()
        running = self._running[name]
        rank = placement.device_ids.index(device_id)
        shrinks = num_tokens < placement.kv_tokens[rank]
        if shrinks:
            self.freeze(name)
        if running.lost:
            raise EngineFailedError(f"instance {name} is lost: {running.lost}")
        try:
            running.links[rank].send(m.ResizeKv(num_tokens))
            running.links[rank].expect(m.RankDone, time.monotonic() + self._timeouts.step_s)
        finally:
            if shrinks:
                self.resume(name)
        tokens = list(placement.kv_tokens)
        tokens[rank] = num_tokens
        with self._lock:
            resized = replace(placement, kv_tokens=tuple(tokens))
            running.record = replace(running.record, placement=resized)

    def place_copies(self, copies: tuple[ExpertCopy, ...]) -> None:
        """All ranks compute by these copies of experts from the next step on.

        Where one cannot, nobody knows who computes what: the instance is lost then.
        """
        name, placement = self.serving()
        running = self._running[name]
        self.freeze(name)
        if running.lost:
            raise EngineFailedError(f"instance {name} is lost: {running.lost}")
        try:
            send_all(running.links, [m.PlaceCopies(placement, copies)] * len(running.links))
            expect_all(running.links, m.RankDone, self._timeouts.step_s)
        except StepFailedError as error:
            self.lose(name, f"its ranks differ in the copies of experts: {error}")
            raise
        finally:
            self.resume(name)

    def _attach_all(
        self,
        running: Running,
        placement: Placement,
        *,
        must_load: bool,
        reads: Sequence[Step] = (),
    ) -> None:
        """Tell the ranks what to map, and what to read; each answers when it has."""
        adapters, socket_of = self._hmm.adapters(), self._hmm.socket_path
        messages = self._attach_messages(placement, adapters, socket_of, must_load)
        if reads:
            messages = handover.with_reads(messages, placement, reads)
        send_all(running.links, messages)
