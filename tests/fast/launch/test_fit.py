"""What a launch needs of a device with a byte budget, worked out from the files alone."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from sgl_esft import platform
from sgl_esft.errors import DeviceMemoryError
from sgl_esft.memory.model_sizes import read_model_sizes
from sgl_esft.ports import pick_free_port
from sgl_esft_launch import elastic, elastic_fit, fit, flags, plan
from tests.support.adapter_factory import write_random_adapter, write_random_base

SIZES = {"hidden_size": 128, "moe_intermediate_size": 64, "vocab_size": 4096}


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "is_active", lambda: True)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fit")
    write_random_base(root / "base", "Qwen3MoeForCausalLM", seed=1, **SIZES)
    write_random_adapter(root / "math", root / "base", seed=1, max_experts=2)
    return root


def needed(line: str, root: Path) -> fit.Need:
    """What a plain launch needs, of a device that is large enough."""
    argv = shlex.split(line.replace("ROOT", str(root)))
    argv += ["--model-path", str(root / "base"), "--device-memory", "1GiB"]
    launch = plan.plan_launch(*flags.parse([*argv, "--port", str(pick_free_port())]))
    fit.check(launch)
    sizes = fit.served_sizes(root / "base", launch.sglang_argv)
    assert sizes is not None
    return fit.need_of(launch, sizes)


def test_the_base_takes_its_tensors_bytes(root: Path) -> None:
    whole = read_model_sizes(root / "base").total_bytes
    assert needed("--no-esft", root).base == whole
    assert needed("--expert-memory padded", root).base == whole
    assert whole <= needed("", root).base < 1.1 * whole, "pages are whole"
    assert needed("--no-esft --tp-size 2", root).base == whole // 2


def test_a_dtype_halves_or_doubles_all_of_it(root: Path) -> None:
    wide, narrow = (needed(f"--no-esft --dtype {d}", root) for d in ("float32", "bfloat16"))
    assert (wide.base, wide.kv) == (2 * narrow.base, 2 * narrow.kv)


def test_adapters_take_their_own_slots_or_all(root: Path) -> None:
    one = needed("--esft-adapters math=ROOT/math", root).adapters
    assert 0 < one < needed("", root).adapters
    assert needed("--adapter-memory 3MiB", root).adapters == 3 << 20


def test_what_is_not_sure_is_in_the_remedy_only() -> None:
    need = fit.Need(base=5 << 20, adapters=1 << 20, kv=1 << 20, extra=1 << 20)
    need.check(7 << 20)
    with pytest.raises(DeviceMemoryError, match=r"the base model fits .*--device-memory 8MiB$"):
        need.check((7 << 20) - 1)
    with pytest.raises(DeviceMemoryError, match=r"does not fit: .*--device-memory 16MiB$"):
        need.check(9 << 20, 0.5)


def test_elastic_devices_share_the_experts(root: Path) -> None:
    def check(line: str) -> None:
        argv = ["--model-path", str(root / "base"), "--port", str(pick_free_port())]
        elastic_fit.check(elastic.plan_elastic([*argv, *shlex.split(line)]))

    with pytest.raises(DeviceMemoryError) as one:
        check("--elastic --device-memory 1KiB")
    with pytest.raises(DeviceMemoryError) as four:
        check("--elastic --device-memory 1KiB --dp-size 4")
    with pytest.raises(DeviceMemoryError) as copies:
        check("--elastic --device-memory 1KiB --redundant-experts 100")
    assert str(copies.value) != str(one.value)
    small, large = (int(str(e.value).split()[-1].removesuffix("MiB")) for e in (four, one))
    assert small < large
    check(f"--elastic --device-memory {large}MiB")
