"""Every error the elastic runtime raises on purpose, and what to do about it.

    ElasticError
    ├── RequestError              the caller must change something; nothing was changed
    │   ├── ElasticConfigError    a flag that cannot work
    │   ├── BadScaleError         a scale request that makes no sense (HTTP 400)
    │   ├── DoesNotFitError       the wanted configuration does not fit its devices (HTTP 400)
    │   ├── UnknownOperationError (HTTP 404)
    │   └── KeyReusedError        an idempotency key that came with another request (HTTP 409)
    ├── MemoryLostError           a device's memory worker has died (HTTP 503)
    ├── BusyError                 another scale is running (HTTP 409); try again later
    ├── ClosingError              the server ends and scales no more (HTTP 503)
    ├── StepFailedError           one step of a scale failed; the scale was rolled back
    │   ├── MemoryWorkerError     a memory worker refused or failed
    │   ├── EngineFailedError     an engine rank failed, died or did not answer in time
    │   ├── PeerCopyError         bytes did not arrive
    │   └── NodeLostError         a machine of the cluster, or the way to it, is gone
    └── ElasticInternalError      a defect
        ├── WireError             a message that our own side would not write
        ├── IllegalTransitionError a state that cannot follow
        └── PlanError             a plan that breaks its own invariants

Messages name the thing, the value seen and the remedy. `http_status` is what REST answers with.
"""

from __future__ import annotations


class ElasticError(Exception):
    """Root of the tree; never raised itself."""

    http_status = 500


class RequestError(ElasticError):
    """The caller must change something. Nothing was changed on this side."""

    http_status = 400


class ElasticConfigError(RequestError):
    """A flag has a value that cannot work."""


class BadScaleError(RequestError):
    """The wanted configuration makes no sense, whatever the memory."""


class DoesNotFitError(RequestError):
    """The wanted configuration needs more memory than its devices have."""


class UnknownOperationError(RequestError):
    """No scale operation has this id."""

    http_status = 404


class KeyReusedError(RequestError):
    """An idempotency key came a second time, with another request."""

    http_status = 409


class BusyError(ElasticError):
    """Another scale is running; try again when it has ended."""

    http_status = 409


class ClosingError(ElasticError):
    """The server ends and scales no more; another one may."""

    http_status = 503


class MemoryLostError(ElasticError):
    """The memory worker of a serving device has died: nothing can be copied from there any more."""

    http_status = 503


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
