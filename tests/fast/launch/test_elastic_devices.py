"""Which memory backend a launch takes, and which of the machine's devices its ranks see."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from sgl_elastic import options
from sgl_elastic.errors import ElasticConfigError
from sgl_elastic.instance import engine_config
from sgl_esft import platform
from sgl_esft_launch import elastic

ONE_EACH = {"SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS": "1"}


@pytest.fixture
def no_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "is_active", lambda: False)


def test_the_backend_is_the_platforms(monkeypatch: pytest.MonkeyPatch, no_cpu: None) -> None:
    assert elastic.choose_backend() == "cuda"
    for is_there, backend in ((True, "acl"), (False, "cuda")):
        npu = SimpleNamespace(is_available=lambda is_there=is_there: is_there)
        monkeypatch.setattr(torch, "npu", npu, raising=False)
        assert elastic.choose_backend() == backend
    monkeypatch.setattr(platform, "is_active", lambda: True)
    assert elastic.choose_backend() == "host"


def check(line: str, backend: str) -> None:
    elastic._check_devices(options.parse(line.split())[0], backend)


def test_no_more_devices_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "num_cuda_devices", lambda: 2)
    check("--max-devices 2", "cuda")
    with pytest.raises(ElasticConfigError, match="--max-devices 3: torch sees 2"):
        check("--max-devices 3", "cuda")
    check("--max-devices 1000", "host")


def test_spares_on_a_cpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "num_cuda_devices", lambda: 4)
    check("--spare-ranks 2", "host")
    check("--spare-ranks 0", "cuda")
    with pytest.raises(ElasticConfigError, match="--spare-ranks 2: for the CPU platform only"):
        check("--spare-ranks 2", "cuda")


def test_scaling_only_where_it_was_shown() -> None:
    for device in ("cpu", "cuda"):
        elastic._check_shown(device)
    for device in ("npu", "rocm"):
        message = f"--elastic cannot be used on a device of type {device}: .* leave it out, or set"
        with pytest.raises(ElasticConfigError, match=message):
            elastic._check_shown(device)


@pytest.mark.parametrize(
    "line", ["--scale-strategy colocated", "--ablate no_shared_allocator", "--nodes ray"]
)
def test_what_is_for_the_cpu_platform_only(line: str) -> None:
    check(line, "host")
    with pytest.raises(ElasticConfigError, match="for the CPU platform only"):
        check(f"--max-devices 1 {line}", "cuda")


@pytest.mark.parametrize(
    ("shown", "device_ids", "seen"),
    [
        (None, (0,), "0"),
        (None, (1, 3), "1,3"),
        ("4,5,6", (0, 2), "4,6"),
        ("GPU-a, GPU-b", (1,), "GPU-b"),
        ("7", (0,), "7"),
    ],
)
def test_ranks_see_the_devices_of_their_instance(
    shown: str | None, device_ids: tuple[int, ...], seen: str
) -> None:
    for backend, name in (("cuda", "CUDA_VISIBLE_DEVICES"), ("acl", "ASCEND_RT_VISIBLE_DEVICES")):
        environment = {"PATH": "/bin"} if shown is None else {name: shown}
        found = engine_config.rank_environment(backend, device_ids, environment)
        assert found == {name: seen, **ONE_EACH}
        assert engine_config.rank_environment("host", device_ids, environment) == {}


@pytest.mark.parametrize("shown", ["", "3", "3,5"])
def test_a_device_that_is_not_shown_is_refused(shown: str) -> None:
    with pytest.raises(ElasticConfigError, match=f"device 2, but CUDA_VISIBLE_DEVICES={shown} "):
        engine_config.rank_environment("cuda", (0, 2), {"CUDA_VISIBLE_DEVICES": shown})


def test_sglang_shows_each_rank_its_own_device() -> None:
    """SGLang's own code, with what we set: of instance (2, 5), rank 1 sees device 5 as number 0."""
    code = (
        "import os\n"
        "import sgl_esft\n"
        "from sglang.srt.platforms.cuda import CudaSRTPlatform\n"
        "from sglang.srt.environ import envs\n"
        "assert envs.SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS.get()\n"
        "with CudaSRTPlatform.reindex_device_id(None, 1) as number:\n"
        "    print(number, os.environ['CUDA_VISIBLE_DEVICES'])\n"
        "print(os.environ['CUDA_VISIBLE_DEVICES'])\n"
    )
    environment = {**os.environ, **engine_config.rank_environment("cuda", (2, 5), {})}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["0 5", "2,5"]


def test_only_on_a_cpu_a_rank_is_a_copy_of_its_supervisor() -> None:
    found = [engine_config.start_method(name) for name in ("host", "cuda", "acl")]
    assert found == ["fork", "spawn", "spawn"]
