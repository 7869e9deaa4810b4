"""A rank computes with the threads that it was given, whatever torch read when it was imported."""

from __future__ import annotations

import threading

import pytest
import torch

from sgl_elastic.engine import loader


@pytest.mark.parametrize(("given", "seen"), [("3", 3), ("1", 1), ("", 2), ("0", 2), ("many", 2)])
def test_threads_of_a_rank(monkeypatch: pytest.MonkeyPatch, given: str, seen: int) -> None:
    """In its other threads too: SGLang may load a model in one."""
    before, found = torch.get_num_threads(), list[int]()
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    try:
        torch.set_num_threads(2)
        loader.use_threads()
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert [torch.get_num_threads(), *found] == [seen, seen]
    finally:
        torch.set_num_threads(before)
