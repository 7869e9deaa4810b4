"""The command line: what it prints, what it returns, and that it needs no engine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.requirements_files import read_pins
from sgl_esft.formats.adapter_config import read_expert_config
from sgl_esft.tools import cli
from sgl_esft.tools.cli import main
from tests.support.adapter_factory import (
    BAD_WEIGHTS,
    SERVED_ARCHITECTURES,
    corrupt,
    write_random_adapter,
    write_random_base,
)
from tests.support.base_factory import MOE_WIDTH

DATA = Path(__file__).parents[2] / "data" / "esft"
EXPERTS = {1: (3,), 2: (0, 5, 15)}

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_random_base(tmp_path / "base", "DeepseekV2ForCausalLM", seed=1)


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    return write_random_adapter(tmp_path / "adapter", base, seed=2, experts=EXPERTS)


def fails(capsys: Capture, code: int, *argv: object) -> str:
    """The error line of a run that must fail with `code` and print nothing else."""
    assert main([str(argument) for argument in argv]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("sgl-esft: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_inspect_with_base(base: Path, adapter: Path, capsys: Capture) -> None:
    assert main(["inspect", str(adapter), "--base", str(base)]) == 0
    out = capsys.readouterr().out
    assert "4 in 2 of 3 MoE layers, at most 3 and on average 1.33 a layer" in out
    assert "0.56 of padded slots" in out
    assert "    2        3  0 5 15" in out


def test_inspect_json(base: Path, adapter: Path, capsys: Capture) -> None:
    assert main(["inspect", str(adapter), "--base", str(base), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == {
        "kind": "esft",
        "path": str(adapter.resolve()),
        "base": str(base),
        "dtype": "float32",
        "scheme": None,
        "num_bytes": 4 * 3 * MOE_WIDTH * 128 * 4,
        "num_experts": 4,
        "num_moe_layers": 3,
        "max_experts_per_layer": 3,
        "mean_experts_per_layer": pytest.approx(4 / 3),
        "sparsity": pytest.approx(5 / 9),
        "experts": {"1": [3], "2": [0, 5, 15]},
        "shared_experts": [],
    }


@pytest.mark.parametrize("old_prefix", [False, True])
@pytest.mark.parametrize("architecture", SERVED_ARCHITECTURES)
def test_inspect_without_base(
    architecture: str, old_prefix: bool, tmp_path: Path, capsys: Capture
) -> None:
    base = write_random_base(tmp_path / "base", architecture, seed=1, dtype="bfloat16")
    adapter = write_random_adapter(
        tmp_path / "adapter", base, seed=2, experts={2: [1], 3: [0, 4]}, old_prefix=old_prefix
    )
    assert main(["inspect", str(adapter), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["base"] is None
    assert report["dtype"] == "bfloat16"
    assert report["num_moe_layers"] == 2
    assert report["experts"] == {"2": [1], "3": [0, 4]}


def test_inspect_without_base_still_validates(adapter: Path, capsys: Capture) -> None:
    corrupt(adapter, "missing_tensor")
    assert "missing" in fails(capsys, 2, "inspect", adapter)


@pytest.mark.parametrize("kind", BAD_WEIGHTS)
def test_inspect_reads_the_weights(adapter: Path, capsys: Capture, kind: str) -> None:
    corrupt(adapter, kind)
    assert "NaN or an infinity" in fails(capsys, 2, "inspect", adapter)


def test_inspect_of_another_naming(adapter: Path, capsys: Capture) -> None:
    raw = (adapter / "model.safetensors").read_bytes()
    renamed = raw.replace(b".mlp.experts.", b".ffn.experts.")
    (adapter / "model.safetensors").write_bytes(renamed)
    assert "no gate tensor" in fails(capsys, 2, "inspect", adapter)


def test_merge_then_extract(base: Path, adapter: Path, tmp_path: Path, capsys: Capture) -> None:
    merged, out = tmp_path / "merged", tmp_path / "out"
    argv = ["--base", str(base), "--adapter", str(adapter), "--out", str(merged)]
    assert main(["merge", *argv]) == 0
    argv = ["--base", str(base), "--tuned", str(merged), "--out", str(out)]
    assert main(["extract", *argv]) == 0
    assert "wrote 4 experts of 2 layers" in capsys.readouterr().out
    assert read_expert_config(out / "expert_cfg.json") == EXPERTS
    assert "not an empty folder" in fails(capsys, 2, "extract", *argv)
    argv = [*argv[:-1], str(tmp_path / "some"), "--layers", "1,3"]
    assert main(["extract", *argv]) == 0
    assert read_expert_config(tmp_path / "some" / "expert_cfg.json") == {1: (3,)}


def test_select(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "expert_cfg.json"
    argv = ["select", "--scores", str(DATA / "law-scores.json"), "--kind", "token"]
    argv += ["--threshold", "0.2", "--out", str(out)]
    assert main(argv) == 0
    assert "chose 153 experts of 26 layers" in capsys.readouterr().out
    assert json.loads(out.read_text()) == json.loads((DATA / "token-law.json").read_text())
    assert "exists" in fails(capsys, 2, *argv)


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["inspect", "/no/such/adapter"], 2, "does not exist"),
        (["inspect", "{adapter}", "--base", "/no/such/base"], 2, "no config.json"),
        (["merge", "--base", "{base}", "--adapter", "/no", "--out", "{out}"], 2, "cannot list"),
        (
            ["select", "--scores", "/no", "--kind", "gate", "--threshold", "1", "--out", "x"],
            2,
            "no",
        ),
        (["merge", "--base", "{base}", "--adapter", "{adapter}", "--out", "/proc/x"], 1, "/proc"),
    ],
)
def test_errors_are_one_line(
    argv: list[str], code: int, message: str, base: Path, adapter: Path, capsys: Capture
) -> None:
    places = {"base": base, "adapter": adapter, "out": base.parent / "out"}
    assert message in fails(capsys, code, *(word.format(**places) for word in argv))


@pytest.mark.parametrize("argv", [[], ["fly"], ["inspect"], ["extract", "--layers", "a"]])
def test_usage_errors(argv: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert "usage: sgl-esft" in capsys.readouterr().err


def test_runs_without_torch_and_sglang(base: Path, adapter: Path, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('torch', 'sglang', 'transformers', 'safetensors')))\n"
        "from sgl_esft.tools.cli import main\n"
        f"base, adapter, out = {str(base)!r}, {str(adapter)!r}, {str(tmp_path)!r}\n"
        "assert main(['inspect', adapter, '--base', base]) == 0\n"
        "argv = ['--base', base, '--adapter', adapter, '--out', out + '/merged']\n"
        "assert main(['merge', *argv]) == 0\n"
        "argv = ['--base', base, '--tuned', out + '/merged', '--out', out + '/again']\n"
        "assert main(['extract', *argv]) == 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_serve_becomes_the_launcher_with_every_flag_as_it_is() -> None:
    script = "import sys; from sgl_esft.tools.cli import main; sys.exit(main())"
    for flags, status, said in (
        (["--help"], 0, "usage: python -m sgl_esft.launch_server"),
        (["--port", "1", "--enable-eplb"], 2, "ConfigError: --enable-eplb cannot be used"),
    ):
        command = [sys.executable, "-c", script, "serve", *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == status
        assert said in done.stdout + done.stderr


def test_serve_without_an_engine_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == "sglang" else name)
    said = fails(capsys, 2, "serve", "--port", "1")
    assert "serve needs sglang, not installed in" in said
    assert cli.INSTALL_ENGINE in said


def test_the_remedy_installs_what_is_pinned() -> None:
    pins = read_pins("engine.txt").items()
    wanted = " ".join(f"{name}=={version}" for name, version in pins)
    assert f"pip install --no-deps {wanted}" == cli.INSTALL_ENGINE
