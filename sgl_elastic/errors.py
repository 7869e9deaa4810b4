"""Every error the elastic runtime raises on purpose, and what to do about it.

    ElasticError
    ├── RequestError            the caller must change something; nothing was changed
    ├── MemoryLost-, Busy-, ClosingError    not now: try again later, or another server
    ├── SuspectRequestError     a request that ends engines
    ├── StepFailedError         one step of a scale failed; the scale was rolled back
    └── ElasticInternalError    a defect

Messages name the thing, the value seen and the remedy. `http_status` is what REST answers with.
"""

from __future__ import annotations


class ElasticError(Exception):
    """Root of the tree; never raised itself. `status` of a class differs from its base's."""

    http_status = 500

    def __init_subclass__(cls, status: int | None = None) -> None:
        """`status` is the class's own `http_status`."""
        super().__init_subclass__()
        if status is not None:
            cls.http_status = status


class RequestError(ElasticError, status=400):
    """The caller must change something. Nothing was changed on this side."""


class ElasticConfigError(RequestError):
    """A flag has a value that cannot work."""


class BadScaleError(RequestError):
    """The wanted configuration makes no sense, whatever the memory."""


class DoesNotFitError(RequestError):
    """The wanted configuration needs more memory than its devices have."""


class UnknownOperationError(RequestError, status=404):
    """No scale operation has this id."""


class KeyReusedError(RequestError, status=409):
    """An idempotency key came a second time, with another request."""


class BusyError(ElasticError, status=409):
    """Another scale is running; try again when it has ended."""


class ClosingError(ElasticError, status=503):
    """The server ends and scales no more; another one may."""


class MemoryLostError(ElasticError, status=503):
    """The memory worker of a serving device has died; other devices have not yet what it had."""


class SuspectRequestError(ElasticError):
    """A request that ended the engines that ran it, the last one alone. It is not tried again."""


class StepFailedError(ElasticError):
    """A step of a scale failed. Before the switch everything was undone."""


class MemoryWorkerError(StepFailedError):
    """A memory worker refused, failed, died or did not answer in time."""


class EngineFailedError(StepFailedError):
    """An engine rank failed, died or did not answer in time."""


class PeerCopyError(StepFailedError):
    """A copy between devices failed, or other bytes arrived than were sent."""


class NodeLostError(StepFailedError):
    """A machine of the cluster, its agent or the way to it is gone."""


class ElasticInternalError(ElasticError):
    """A defect here, or in an SGLang we do not know."""


class WireError(ElasticInternalError):
    """A message between our own processes is not what our own side writes."""


class IllegalTransitionError(ElasticInternalError):
    """A state that cannot follow the present one."""


class PlanError(ElasticInternalError):
    """A plan that breaks its own invariants."""
