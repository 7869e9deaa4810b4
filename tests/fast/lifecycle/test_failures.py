"""Which failed loads refuse the requests that come after them."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_esft import errors
from sgl_esft.lifecycle.jobs import Failure, JobKind


@pytest.mark.parametrize(
    ("error", "is_lasting"),
    [
        (errors.AdapterFormatError("no such expert"), True),
        (errors.AdapterMismatchError("another base"), True),
        (errors.AdapterPathError("no such folder"), True),
        (errors.AdapterTooLargeError("too large"), True),
        (errors.AdapterExistsError("somebody was faster"), False),
        (errors.UnknownAdapterError("somebody unloaded it"), False),
        (errors.OutOfHostMemoryError("no room now"), False),
        (errors.RequestTimeoutError("no answer"), False),
        (errors.InternalError("a defect"), False),
    ],
)
def test_only_what_is_wrong_with_the_content_lasts(
    error: errors.EsftError, is_lasting: bool
) -> None:
    assert Failure(JobKind.LOAD, Path("a"), None, error).is_lasting is is_lasting
    assert not Failure(JobKind.REPLACE, Path("a"), None, error).is_lasting
