"""A launch is worked out and refused before anything is started."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from sgl_esft import launch_server, platform
from sgl_esft.config import DEFAULT_MAX_OVERTAKES, EsftConfig
from sgl_esft.errors import (
    AdapterFormatError,
    AdapterMismatchError,
    AdapterNameError,
    AdapterPathError,
    ConfigError,
    UnknownRouteError,
    UnsupportedModelError,
)
from sgl_esft.ports import pick_free_port
from sgl_esft.quant.write import quantise_checkpoint
from sgl_esft_launch import elastic, flags, plan
from sgl_esft_launch.plan import LaunchPlan
from tests.fast.elastic.memory_workers import count_fds
from tests.support.adapter_factory import (
    random_base_config,
    write_random_adapter,
    write_random_base,
)
from tests.support.processes import first_outgoing_port

FOUR = {4, 5, 6, 7}
ROOT = Path(__file__).resolve().parents[3]
SMALL = {"hidden_size": 16, "moe_intermediate_size": 8, "n_routed_experts": 8, "vocab_size": 300}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, adapters with at most two and three experts in a layer, and one for another base."""
    root = tmp_path_factory.mktemp("launch")
    write_random_base(root / "base", "DeepseekV2ForCausalLM", seed=1, **SMALL)
    write_random_adapter(root / "math", root / "base", seed=1, max_experts=2)
    write_random_adapter(root / "law", root / "base", seed=2, max_experts=3)
    write_random_base(root / "other", "DeepseekV2ForCausalLM", seed=1, **SMALL | {"hidden_size": 8})
    write_random_adapter(root / "foreign", root / "other", seed=3, max_experts=2)
    return root


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU platform, and four cores to deal out."""
    monkeypatch.setattr(platform, "is_active", lambda: True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: FOUR)


@pytest.fixture(scope="module")
def port() -> int:
    return pick_free_port()


Make = Callable[[str], LaunchPlan]


@pytest.fixture
def make(root: Path, port: int) -> Make:
    """Plan a command line; BASE, ROOT and adapters' folders stand for what they are called."""

    def make(line: str) -> LaunchPlan:
        argv = shlex.split(line.replace("ROOT", str(root)).replace("BASE", str(root / "base")))
        if "--port" not in argv:
            argv += ["--port", str(port)]
        return plan.plan_launch(*flags.parse(argv))

    return make


def option(launch: LaunchPlan, flag: str) -> str:
    """What SGLang is told by a flag that must be there once."""
    assert launch.sglang_argv.count(flag) == 1, launch.sglang_argv
    return launch.sglang_argv[launch.sglang_argv.index(flag) + 1]


def test_a_launch_with_adapters(make: Make, root: Path) -> None:
    launch = make("--model-path BASE --esft-adapters math=ROOT/math law=ROOT/law")
    assert launch.adapters == {n: (root / n).resolve() for n in ("math", "law")}
    assert launch.config == EsftConfig(max_adapters=2, max_experts_per_adapter=3)
    assert launch.model_path == option(launch, "--model-path") == str(root / "base")
    assert option(launch, "--served-model-name") == "base"
    assert option(launch, "--max-loras-per-batch") == "2"
    assert "--enable-lora" in launch.sglang_argv
    start = launch.sglang_argv.index("--lora-paths") + 1
    expected = tuple(f"{name}={path}" for name, path in launch.adapters.items())
    assert launch.sglang_argv[start : start + 2] == expected


def test_a_launch_without_adapters_reserves_for_later(make: Make) -> None:
    launch = make("--model-path BASE")
    assert launch.adapters == {}
    assert launch.config == EsftConfig(max_adapters=4, max_experts_per_adapter=13)
    assert "--lora-paths" not in launch.sglang_argv
    assert "--enable-lora" in launch.sglang_argv


def test_given_sizes_win(make: Make) -> None:
    line = "--model-path BASE --esft-adapters math=ROOT/math --max-adapters 7"
    assert make(f"{line} --max-experts-per-adapter 5").config == EsftConfig(7, 5)
    assert make(line).config == EsftConfig(7, 2)
    alias = make(line.replace("--max-adapters", "--max-loras-per-batch"))
    assert option(alias, "--max-loras-per-batch") == "7"


def test_overtakes(make: Make) -> None:
    def overtakes(line: str) -> int:
        return make(f"--model-path BASE {line}").config.max_overtakes

    assert overtakes("") == DEFAULT_MAX_OVERTAKES
    given = make("--model-path BASE --max-overtakes 5").config
    assert (given.max_overtakes, given.slot_overtakes) == (5, 5)
    assert make("--model-path BASE").config.slot_overtakes > DEFAULT_MAX_OVERTAKES
    assert overtakes("--max-overtakes 0") == 0
    assert overtakes("--max-overtakes 5 --schedule-policy fcfs") == 5
    assert overtakes("--schedule-policy lpm") == DEFAULT_MAX_OVERTAKES, "the hook steps back"
    assert overtakes("--schedule-policy=lpm --max-overtakes 0") == 0


@pytest.mark.parametrize(
    "other",
    [
        "--schedule-policy lpm",
        "--schedule-policy=random",
        "--schedule-policy fcfs --schedule-policy lof",
        "--enable-priority-scheduling",
    ],
)
def test_overtakes_and_another_order_exclude_each_other(make: Make, other: str) -> None:
    with pytest.raises(ConfigError, match=r"--max-overtakes 5 reorders .*: leave it out, or"):
        make(f"--model-path BASE --max-overtakes 5 {other}")


def test_plain_sglang(make: Make) -> None:
    launch = make("--model-path BASE --no-esft --enable-lora")
    assert launch.config is None
    assert launch.sglang_argv.count("--enable-lora") == 1, "nothing is refused: nothing is woven"
    assert "--max-loras-per-batch" not in launch.sglang_argv


def test_the_demo(make: Make, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan.zoo, "base_path", lambda: root / "base")
    monkeypatch.setattr(plan.zoo, "adapter_paths", lambda: {"law": root / "law"})
    launch = make("")
    assert launch.adapters == {"law": root / "law"}
    assert launch.config == EsftConfig(1, 3)
    assert option(launch, "--model-path") == str(root / "base")
    assert make("--esft-adapters m=ROOT/math").adapters == {"m": (root / "math").resolve()}
    off = make("--no-esft")
    assert off.config is None
    assert off.adapters == {}


def test_every_launch_has_a_gate(make: Make) -> None:
    for line in ("--model-path BASE", "--model-path BASE --no-esft"):
        policy = make(line).access.policy
        assert len(policy.keys) == 0
        with pytest.raises(UnknownRouteError):
            policy.table.find("POST", "/update_weights_from_disk")
    with pytest.raises(ConfigError, match="there are no keys"):
        make("--model-path BASE --host 0.0.0.0")


def test_sglang_is_not_given_the_clients_keys(make: Make) -> None:
    launch = make("--model-path BASE --api-key a-clients-key-0123456789")
    assert not [arg for arg in launch.sglang_argv if "key" in arg]
    assert len(launch.access.policy.keys) == 1


def test_what_the_launcher_reads_reaches_sglang_once(make: Make, port: int) -> None:
    launch = make("--model BASE --host localhost --tp 2 --dp-size=2 --ep-size 2")
    assert option(launch, "--host") == launch.host == "localhost"
    assert option(launch, "--port") == str(launch.port) == str(port)
    assert option(launch, "--tp-size") == "2"
    assert option(launch, "--dp-size") == "2"
    assert option(launch, "--ep-size") == "2"


def test_the_users_choice_beats_the_platforms(make: Make) -> None:
    plain = make("--model-path BASE")
    assert option(plain, "--device") == "cpu"
    assert option(plain, "--attention-backend") == "torch_native"
    assert option(plain, "--sampling-backend") == "pytorch"
    assert option(plain, "--dtype") == "float32", "as the checkpoint"
    chosen = make("--model-path BASE --dtype bfloat16 --attention-backend=triton --sleep-on-idle")
    assert option(chosen, "--dtype") == "bfloat16"
    assert "--attention-backend" not in chosen.sglang_argv
    assert "--attention-backend=triton" in chosen.sglang_argv
    assert chosen.sglang_argv.count("--sleep-on-idle") == 1


def test_a_device_with_a_byte_budget(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for weaving in ("", "--no-esft"):
        plain = make(f"--model-path BASE {weaving}")
        assert plain.device_environment == {}
        assert "--mem-fraction-static" not in plain.sglang_argv
        assert option(plain, "--max-total-tokens") == "65536"
        bound = make(f"--model-path BASE {weaving} --device-memory 2MiB")
        assert bound.device_environment == {"ESFT_DEVICE_MEMORY": f"{2 << 20}B"}
        assert option(bound, "--mem-fraction-static") == "0.9"
        assert "--max-total-tokens" not in bound.sglang_argv
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ESFT_DEVICE_MEMORY", "1MiB")
    assert make("--model-path BASE").device_environment == {"ESFT_DEVICE_MEMORY": f"{1 << 20}B"}
    line = "--model-path BASE --device-memory 2MiB --device-ledger ledger"
    assert make(f"{line} --mem-fraction-static 0.5").device_environment == {
        "ESFT_DEVICE_MEMORY": f"{2 << 20}B",
        "ESFT_DEVICE_LEDGER": str(tmp_path / "ledger"),
    }


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("--device-memory 64gb", "--device-memory is '64gb'"),
        ("--device-memory 0B", "at least 1B"),
        ("--device-ledger ROOT/ledger", "give the devices' --device-memory"),
        ("--device-memory 1GB --device-ledger ROOT", "--device-ledger ROOT: "),
        ("--device-memory 1GB --device-ledger BASE/config.json", "is not a ledger"),
    ],
)
def test_refused_device_flags(line: str, reason: str, make: Make, root: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason.replace("ROOT", str(root)))):
        make(f"--model-path BASE {line}")


def test_an_accelerator_gets_no_cpu_defaults(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "is_active", lambda: False)
    with pytest.raises(ConfigError, match="for the CPU platform"):
        make("--model-path BASE --device-memory 1GB")
    launch = make("--model-path BASE")
    assert launch.environment == {}
    assert "--device" not in launch.sglang_argv
    assert "--attention-backend" not in launch.sglang_argv


@pytest.mark.parametrize(
    ("cores", "sizes", "threads", "bind"),
    [
        (FOUR, "--tp-size 1", "3", "4,5,6"),
        (FOUR, "--tp-size 2", "1", "4|5"),
        (FOUR, "--tp-size 4", "1", "4|5|6|7"),
        (FOUR, "--dp-size 2", "1", "4|5"),
        (FOUR, "--dp-size 2 --tp-size 2", "1", "4|5|6|7"),
        (FOUR, "--dp-size 2 --tp-size 2 --enable-dp-attention", "1", "4|5"),
        (FOUR, "--tp-size 2 --attn-dp-size=2", "1", "4|5"),
        (FOUR, "--tp-size 1 --dp-size 2 --attn-dp-size 1", "1", "4|5"),
        ({1, 0}, "--tp-size 1", "1", "0"),
        ({1, 0}, "--tp-size 2", "1", "0|1"),
        ({1, 0}, "--tp-size 4", "1", "0|1|0|1"),  # more ranks than cores share them
    ],
)
def test_each_rank_gets_cores_of_its_own(
    cores: set[int],
    sizes: str,
    threads: str,
    bind: str,
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    environment = make(f"--model-path BASE {sizes}").environment
    assert environment == {
        "SGLANG_PLATFORM": "sgl_esft_cpu",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": threads,
        "SGLANG_CPU_OMP_THREADS_BIND": bind,
    }


MATH = "--model-path BASE --esft-adapters math=ROOT/math"


@pytest.mark.parametrize(
    ("line", "error", "message"),
    [
        ("--model-path BASE --esft-adapters math", ConfigError, "'math': write NAME=DIR"),
        ("--model-path BASE --esft-adapters =ROOT/math", AdapterNameError, "''"),
        ("--model-path BASE --esft-adapters a/b=ROOT/math", AdapterNameError, "'a/b'"),
        (f"{MATH} math=ROOT/law", ConfigError, "names 'math' twice"),
        ("--model-path BASE --esft-adapters m=ROOT/none", AdapterPathError, "does not exist"),
        ("--model-path BASE --esft-adapters m=", AdapterPathError, "is not a path"),
        ("--model-path BASE --esft-adapters m=ROOT/base", AdapterFormatError, "expert_cfg.json"),
        ("--model-path BASE --esft-adapters m=ROOT/foreign", AdapterMismatchError, "shape"),
        (f"{MATH} --adapter-root ROOT/base", AdapterPathError, "--adapter-root"),
        (f"{MATH} --max-experts-per-adapter 1", ConfigError, "has 2 experts .*-per-adapter 2"),
        (f"{MATH} --max-adapters 0", ConfigError, "--max-adapters 0: must be a whole number"),
        (f"{MATH} --max-experts-per-adapter -3", ConfigError, "--max-experts-per-adapter -3"),
        (f"{MATH} --no-esft", ConfigError, "--no-esft and --esft-adapters exclude"),
        ("--model-path BASE --host 192.0.2.1", ConfigError, "cannot listen on 192.0.2.1:"),
    ],
)
def test_refused(make: Make, line: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(line)


@pytest.mark.parametrize("flag", sorted(plan._REFUSED_SGLANG_FLAGS))
@pytest.mark.parametrize("form", ["{}", "{} x", "{}=x"])
def test_a_flag_that_weaving_cannot_go_with_is_refused(make: Make, flag: str, form: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag} cannot be used while weaving: "):
        make("--model-path BASE " + form.format(flag))


@pytest.mark.parametrize(
    ("npu", "hip", "device"), [(True, None, "npu"), (False, "6.3", "rocm"), (False, None, "cuda")]
)
def test_weaving_only_on_devices_where_it_was_shown(
    npu: bool, hip: str | None, device: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(platform, "is_active", lambda: False)
    monkeypatch.setattr(torch, "npu", SimpleNamespace(is_available=lambda: npu), raising=False)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert make("--no-esft --model-path BASE").device == device
    if device != "rocm":
        assert make("--model-path BASE").device == device
        return
    with pytest.raises(ConfigError, match=f"of type {device} cannot be used: .*; ESFT_PLATFORM="):
        make("--model-path BASE")


def test_refused_flags_are_flags_of_the_installed_sglang() -> None:
    """A renamed flag would be let through."""
    import argparse

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    known = set(parser._option_string_actions)
    assert set(plan._REFUSED_SGLANG_FLAGS) - known == set()
    passed = {flag for flag, *_ in plan._CPU_DEFAULTS} | {"--enable-lora", "--max-lora-rank"}
    assert passed - known == set()


@pytest.fixture
def listener() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_a_port_in_use_is_refused(make: Make, listener: int) -> None:
    with pytest.raises(ConfigError, match=f"127.0.0.1:{listener}: .*; stop process {os.getpid()} "):
        make(f"--model-path BASE --port {listener}")


def test_picked_ports_differ_and_no_connection_takes_them() -> None:
    ports = [pick_free_port() for _ in range(20)]
    assert len(set(ports)) == 20
    assert all(1024 <= port < first_outgoing_port() for port in ports)


def test_no_port_is_picked_that_a_server_will_take() -> None:
    """Nor one that SGLang derives from the server's own."""
    server = pick_free_port()
    picked = [pick_free_port(beside=server) for _ in range(1000)]
    assert min(abs(port - server) for port in picked) > 240


def test_ports_do_not_run_out() -> None:
    """Of a process that has chosen many, as a node's agent does, nor of its neighbours."""
    before = count_fds()
    for _ in range(1000):
        pick_free_port()
    assert count_fds() <= before + 32
    code = "from sgl_esft import ports; print(ports.pick_free_port())"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def test_a_port_is_picked_where_no_claim_can_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As where somebody else has the folder, or nothing can be written."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "file"))
    assert pick_free_port() != pick_free_port()


def edit_config(folder: Path, **changes: object) -> None:
    config = random_base_config("DeepseekV2ForCausalLM", **SMALL) | changes
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "'LlamaForCausalLM' cannot be woven"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method 'awq'"),
    ],
)
def test_a_model_that_cannot_be_woven_is_refused(
    make: Make, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=r"config\.json"):
        make(f"--model-path {tmp_path}")
    edit_config(tmp_path / "model", **changes)
    with pytest.raises(UnsupportedModelError, match=message):
        make(f"--model-path {tmp_path}/model")
    assert make(f"--model-path {tmp_path}/model --no-esft").config is None


def test_mixtral_has_no_dp_attention(make: Make, tmp_path: Path) -> None:
    config = random_base_config("MixtralForCausalLM")
    (tmp_path / "config.json").write_text(json.dumps(config))
    line = f"--model-path {tmp_path} --tp-size 2 --dp-size 2"
    for flag in ("--enable-dp-attention", "--attn-dp-size 2", "--attn-dp-size=2"):
        with pytest.raises(UnsupportedModelError, match="leave --attn-dp-size and"):
            make(f"{line} {flag}")
    assert make(line).config is not None
    assert make(f"{line} --attn-dp-size 1").config is not None


def test_paths_count_from_the_adapter_root(make: Make, root: Path) -> None:
    launch = make("--model-path BASE --adapter-root ROOT/. --esft-adapters math=math")
    assert launch.adapters == {"math": (root / "math").resolve()}
    assert launch.config.adapter_root == str(root.resolve())


def test_where_quantised_adapters_are_kept(make: Make) -> None:
    """Absolute: ranks may have another working directory."""
    config = make(
        "--model-path BASE --quantised-adapters some/where --quantised-adapters-bytes 3GiB"
    ).config
    assert config.quantised_adapters_path == Path.cwd() / "some" / "where"
    assert config.quantised_adapters_bytes == 3 << 30
    with pytest.raises(ConfigError, match="--quantised-adapters-bytes is '3G'"):
        make("--model-path BASE --quantised-adapters-bytes 3G")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--elastic --max-devices 1", "--elastic cannot be used with a quantised base, .* in int8"),
    ],
)
def test_what_was_not_shown_over_a_quantised_base(
    root: Path, tmp_path: Path, port: int, line: str, message: str
) -> None:
    quantise_checkpoint(root / "base", "int8", tmp_path / "int8")
    argv = ["--model-path", str(tmp_path / "int8"), "--port", str(port), *shlex.split(line)]
    launch = elastic.plan_elastic if "--elastic" in argv else plan_plain
    with pytest.raises(UnsupportedModelError, match=message):
        launch(argv)


def plan_plain(argv: list[str]) -> LaunchPlan:
    return plan.plan_launch(*flags.parse(argv))


def test_flags_are_ours_or_left_to_sglang() -> None:
    parsed, rest = flags.parse(["--esft-adapters", "a=b", "c=d", "--log-level", "error"])
    assert parsed.esft_adapters == ("a=b", "c=d")
    assert rest == ["--log-level", "error"]
    assert (parsed.host, parsed.port) == ("127.0.0.1", 30000)
    assert parsed.weave
    for flag in ("--max-adapter", "--expert-mem", "--esft"):
        assert flags.parse([flag, "3"])[1] == [flag, "3"], "abbreviated flags are left to SGLang"


@pytest.mark.parametrize(
    "argv", [["--reroute", "magic"], ["--expert-memory", "x"], ["--port", "x"]]
)
def test_a_bad_value_is_named(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"^{argv[0]}: "):
        flags.parse(argv)


def test_main_says_why_and_starts_nothing(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    status = launch_server.main(["--model-path", str(root / "base"), "--lora-backend=triton"])
    assert status == 2
    seen = capsys.readouterr()
    assert seen.err.startswith("sgl_esft: ConfigError: --lora-backend cannot be used while weaving")
    assert seen.out == ""


def test_help_and_refusals_need_neither_sglang_nor_torch(root: Path) -> None:
    """They answer at once, and tell which flags there are."""
    code = (
        "import sys; from sgl_esft import launch_server as s\n"
        f"assert s.main(['--model-path', {str(root / 'base')!r}, '--enable-eplb']) == 2\n"
        "try: s.main(['--help'])\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "assert not {'sglang', 'torch'} & set(sys.modules), 'heavy imports'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for flag in ("--esft-adapters", "--max-adapters", "--adapter-root", "--no-esft", "--port"):
        assert flag in done.stdout
    assert "ConfigError: --enable-eplb" in done.stderr


def test_processes_that_ask_at_once_get_ports_of_their_own() -> None:
    """A server listens long after its port was chosen, and its neighbour asks meanwhile."""
    code = (
        "from sgl_esft import ports; import itertools; ports._turn = itertools.count(7)\n"
        "print(*[ports.pick_free_port() for _ in range(5)], flush=True); input()"
    )
    command = [sys.executable, "-c", code]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    askers = [subprocess.Popen(command, **pipes) for _ in range(3)]
    answers = [asker.stdout.readline().split() for asker in askers]
    for asker in askers:
        asker.communicate("\n", timeout=30)
    given = [port for answer in answers for port in answer]
    assert len(given) == len(set(given)) == 15
