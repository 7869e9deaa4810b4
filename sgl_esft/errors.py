"""Every error this package raises on purpose, and what to do about it.

    EsftError
    ├── UserError          the caller must change something; nothing was changed
    │   └── AccessError    a request that was refused before it cost work
    ├── RetryLaterError    correct, but not possible now
    └── InternalError      a defect here or in an SGLang we do not know

Messages name the thing, the value seen and the remedy. `http_status` is what a
server answers with.
"""

from __future__ import annotations


class EsftError(Exception):
    """Root of the tree; never raised itself."""

    http_status = 500

    def __init_subclass__(cls, status: int | None = None) -> None:
        """`status`: where it is not the parent's."""
        if status is not None:
            cls.http_status = status


class UserError(EsftError, status=400):
    """The caller must change something. Nothing was changed on this side."""


class ConfigError(UserError):
    """A flag or an environment variable has a value that cannot work."""


class UnsupportedModelError(UserError):
    """The base model's architecture or quantisation cannot be woven."""


class UnsupportedDeviceError(UserError):
    """The device has no virtual memory management, or one that we cannot use."""


class DeviceMemoryError(UserError):
    """The base model, or an adapter by itself, is larger than the memory it was given."""


class AdapterTooLargeError(UserError):
    """One adapter by itself has more bytes than all may take of host memory."""


class AdapterNameError(UserError):
    """An adapter name outside ``[A-Za-z0-9._-]{1,64}``."""


class AdapterPathError(UserError):
    """An adapter folder that is missing, or that lies outside the adapter root."""


class UnknownAdapterError(UserError, status=404):
    """A request names an adapter that is not loaded. Never answered by the base model."""


class AdapterExistsError(UserError, status=409):
    """An adapter of this name is loaded already."""


class TooManyAdaptersError(UserError):
    """One request names more adapters than can be loaded at a time."""


class AdapterNotLoadedError(UserError, status=409):
    """Only a loaded adapter can be pinned, unpinned or replaced."""


class AdapterFormatError(UserError):
    """The folder does not hold an ESFT adapter: a file is missing, damaged or malformed."""


class LogitsNotFiniteError(UserError, status=500):
    """The weights overflow: the logits of a request are not finite, so it has no answer."""


class NothingToSampleError(UserError):
    """A request's grammar, schema or biases leave no token to go on with."""


class GrammarTooSlowError(UserError):
    """A request's grammar can read its text in too many ways: others would wait for it."""


class AdapterNotFiniteError(AdapterFormatError):
    """An adapter's weights hold a NaN or an infinity."""


class UnsupportedAdapterError(UserError):
    """A well-formed ESFT adapter of a kind that cannot be woven."""


class AdapterMismatchError(UserError):
    """A well-formed ESFT adapter that does not fit the base model or the reserved slots."""


class UndeclaredRouteError(UserError):
    """A route of the server has no declared class, so nobody has decided who may call it."""


class AccessError(UserError):
    """A request that was refused before it cost work."""


class BadBodyError(AccessError):
    """The body is not JSON that the routes can take, or the Host header is none."""


class EmptyPromptError(BadBodyError, ValueError):
    """A prompt whose text has no tokens."""  # a ValueError: SGLang's routes answer that with 400


class PromptTooLongError(BadBodyError, ValueError):
    """A text that cannot fit the model's context, whatever its tokens are."""


class DuplicateRequestIdError(BadBodyError, ValueError):
    """A `rid` under which a request of the same key runs."""  # a ValueError, as above


class NoKeyError(AccessError, status=401):
    """A request without a key, or with one that is not known."""


class NotAllowedError(AccessError, status=403):
    """The key, or the origin of the web page that asks, may not do this."""


class UnknownRouteError(AccessError, status=404):
    """There is no such route, or it is off."""


class UnknownMethodError(AccessError, status=405):
    """The route exists, with other methods."""


class SlowBodyError(AccessError, status=408):
    """The client took too long to send its body."""


class BodyTooLargeError(AccessError, status=413):
    """The body has more bytes than --max-body-bytes."""


class TextTimeoutError(AccessError, ValueError, status=413):
    """Work on a text, or on the model's answer, takes longer than it may: --text-timeout."""


class TextParserError(AccessError, ValueError, status=422):
    """A tool-call or reasoning parser of SGLang's fails at a text."""


class HeadersTooLargeError(AccessError, status=431):
    """Too many headers, or too many bytes of them."""


class AmbiguousLengthError(AccessError, status=400):
    """A request whose end two readers could see in two places."""


class HeatOffError(UserError, status=404):
    """GET /v1/heat on a server that does not count its experts."""


class ServerUnreachableError(UserError):
    """Nothing answers at the address that a command line tool was given."""


class ServerAnswerError(UserError):
    """What answers at the address is an error, or not what this package's server says."""


class RetryLaterError(EsftError, status=503):
    """The request is correct but cannot be met now; the same call may succeed later."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoFreeSlotError(RetryLaterError):
    """Every adapter slot is pinned or in use."""


class OutOfExpertMemoryError(RetryLaterError):
    """The pool has no page left for an adapter's experts."""


class OutOfHostMemoryError(RetryLaterError):
    """No room beside the loaded adapters: those that could leave are pinned or in use."""


class AdapterBusyError(RetryLaterError, status=409):
    """The adapter is being loaded, replaced or unloaded, and something else is asked for."""


class AdapterLoadTimeoutError(RetryLaterError):
    """A request waited too long for its adapter to be loaded. The load goes on."""


class KeyLimitError(RetryLaterError, status=429):
    """A key's concurrent requests, or its tokens of this minute, are used up."""


class RequestTimeoutError(RetryLaterError, status=504):
    """The answer took longer than --request-timeout."""


class TextBusyError(RetryLaterError):
    """As many texts as may be are tokenized and parsed now, and the wait was too long."""


class StartingError(RetryLaterError, status=409):
    """The server still starts, and cannot be drained before it has."""


class DrainingError(RetryLaterError):
    """The server is about to end and takes no new requests; another one may."""


class DrainTimeoutError(RetryLaterError):
    """The server ended, and --drain-timeout was up before the answer was whole."""


class EngineLostError(RetryLaterError):
    """A process of the engine died or hung, and the request with it."""


class QuantisedCopyError(RetryLaterError):
    """An adapter's quantised copy cannot be kept: no room, or no right to write."""


class ExpertReadError(RetryLaterError, status=503):
    """An expert's weights cannot be read from where they are kept.

    The file, its offset and the reason are named.
    """


class InternalError(EsftError):
    """A defect: please report it."""


class HookError(InternalError):
    """A hook into SGLang is missing or its target is not the one we know."""


class ExpertMemoryError(InternalError):
    """A vendor's memory call failed; the message has the call and its code."""


class InvariantError(InternalError):
    """A consistency check of our own state failed."""
