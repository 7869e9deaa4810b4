"""launch/recipes: every file is checked by what reads it, and each check finds what it is for."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from sgl_esft import zoo
from sgl_esft.access.keys import read_keys_file
from sgl_esft.errors import ConfigError
from sgl_esft.ports import pick_free_port
from sgl_esft_launch import plan
from tests.repo import recipes
from tests.repo.recipes import RECIPES, ROOT, problems
from tests.repo.tree import project_files

A_KEY = "0123456789abcdef0123456789abcdef"
TOOLS = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
SHELLCHECK = shutil.which("shellcheck", path=TOOLS)
SHELL_FILES = [
    path for path in project_files() if path.endswith((".sh", ".sbatch")) or path == ".ci/run"
]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The recipes where they may be broken."""
    return shutil.copytree(RECIPES, tmp_path / "launch" / "recipes")


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    (tmp_path / "scratch").mkdir()
    return tmp_path / "scratch"


def test_recipes_are_in_order(copy: Path, scratch: Path) -> None:
    assert problems(copy, scratch) == []


@pytest.mark.parametrize(
    ("name", "old", "new", "words"),
    [
        ("one_machine.sh", "--enable-metrics", "--enable-metrix", "no flag --enable-metrix"),
        ("one_machine.sh", "new_key() {", "new_key( {", "syntax error"),
        ("systemd/sgl-esft.service", "RestartSec", "RestartSecs", "RestartSecs"),
        ("systemd/sgl-esft.service", "TimeoutStopSec=60", "TimeoutStopSec=30", "too few"),
        ("systemd/sgl-esft.service", "sgl_esft.launch_server", "sgl_esft.server", "no-launcher"),
        ("docker/cpu.Dockerfile", "COPY csrc/ csrc/", "COPY csrd/ csrc/", "no file csrd"),
        ("docker/cpu.Dockerfile", "COPY kernels/ kernels/\n", "", "kernels is not copied"),
        ("docker/cpu.Dockerfile", "--from=build", "--from=builds", "builds has no version"),
        ("docker/cpu.Dockerfile", "USER 10001", "USER root", "useradd"),
        ("docker/cpu.Dockerfile", "EXPOSE 30000", "EXPOSE 3000", "EXPOSE"),
        ("docker/cuda.Dockerfile", ":13.0.1-cudnn-devel-ubuntu24.04", ":latest", "no version"),
        ("docker/cuda.Dockerfile", '"--admin-key-env"', '"--admin-env"', "no flag"),
        ("docker/compose.yaml", "--drain-timeout=30", "--drain-timeout=70", "too few"),
        ("docker/compose.yaml", "stop_grace_period", "stop_grace", "stop_grace"),
        ("docker/compose.yaml", "/readyz", "/ready2", "no public route"),
        ("docker/compose.yaml", "30000:30000", "30000:8000", "port"),
        ("docker/compose.yaml", "=/models/base", "=/model/base", "nothing is mounted"),
        ("docker/compose.yaml", "cpu.Dockerfile", "gpu.Dockerfile", "no file"),
        ("docker/compose.yaml", "image: sgl-esft:cpu", "image: sgl-esft:gpu", "no recipe builds"),
        ("kubernetes/sgl-esft.yaml", "readinessProbe", "readynessProbe", "readynessProbe"),
        ("kubernetes/sgl-esft.yaml", "path: /readyz", "path: /ready", "the readiness probe"),
        ("kubernetes/sgl-esft.yaml", "path: /healthz", "path: /health2", "the startup probe"),
        ("kubernetes/sgl-esft.yaml", "containerPort: 30000", "containerPort: 80", "port"),
        ("kubernetes/sgl-esft.yaml", "port: http}", "port: web}", "the startup probe"),
        ("kubernetes/sgl-esft.yaml", "targetPort: http", "targetPort: web", "the Service's"),
        ("kubernetes/sgl-esft.yaml", "Seconds: 60", "Seconds: 40", "too few"),
        ("kubernetes/sgl-esft.yaml", "minAvailable: 1", "minAvailable: 2", "no node"),
        ("kubernetes/sgl-esft.yaml", "selector: {app: sgl-esft}", "selector: {app: e}", "selects"),
        ("kubernetes/sgl-esft.yaml", "key: admin-key", "key: admin", "wants of secrets"),
        ("kubernetes/sgl-esft.yaml", "runAsUser: 10001", "runAsUser: 1000", "image's user"),
        ("kubernetes/sgl-esft.yaml", "name: shm, mount", "name: sh, mount", "differ"),
        ("kubernetes/sgl-esft.yaml", "--api-keys-file", "--keys-file", "no flag"),
        ("kubernetes/secret.yaml", "stringData", "stringdata", "stringdata"),
        ("slurm/sgl-esft.sbatch", "--cpus-per-task=8\n", "--cpu-per-task=8\n", "cpu-per-task"),
        ("slurm/sgl-esft.sbatch", "--signal=TERM@60", "--signal=TERM@30", "too few"),
        ("slurm/sgl-esft.sbatch", "--drain-timeout 20", "--drain-timeout 30", "scancel"),
        ("ray/serve.sh", "--nodes ray", "--nodes rays", "ray/serve.sh: --nodes: invalid choice"),
        ("ray/serve.sh", "--head", "--heads", "--heads"),
        ("ray/cluster.yaml", "worker_ips", "workers_ips", "workers_ips"),
        ("ray/cluster.yaml", "--autoscaling-config", "--autoscale-config", "--autoscale-config"),
    ],
)
def test_what_is_broken_is_found(
    name: str, old: str, new: str, words: str, copy: Path, scratch: Path
) -> None:
    text = (copy / name).read_text()
    assert old in text
    (copy / name).write_text(text.replace(old, new, 1))
    assert words in "\n".join(problems(copy, scratch))


def test_a_recipe_that_nobody_checks_is_found(copy: Path, scratch: Path) -> None:
    (copy / "nomad.hcl").write_text("")
    assert "nomad.hcl" in problems(copy, scratch)[0]


def files_here(folder: Path) -> dict[str, Path]:
    """What the recipes' paths stand for, on this machine."""
    keys = folder / "keys.json"
    keys.write_text(json.dumps({"keys": [{"name": "a", "key": A_KEY}]}))
    keys.chmod(0o600)
    return {"keys": keys, "model": zoo.base_path(), "adapters": folder}


def test_every_launch_can_be_planned(
    copy: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts other than this machine's have keys, and nothing else is refused either."""
    monkeypatch.setenv("ADMIN_KEY", A_KEY[::-1])
    launches = recipes.launches_of(copy)
    recorded = recipes.launcher_only(recipes.run_scripts(copy, scratch))
    launches += map(recipes.as_launch, recorded)
    assert len(launches) > 7
    for launch in launches:
        parsed, rest = launch.parse()
        here = recipes.on_this_machine(parsed, pick_free_port(), **files_here(scratch))
        assert plan.plan_launch(here, rest).host == parsed.host


def test_the_secret_is_refused_until_it_is_filled_in(scratch: Path) -> None:
    """As the pod's first container leaves it: the server's own, and nobody else's to read."""
    text = recipes.objects(RECIPES)["Secret"]["stringData"]["keys.json"]
    [first] = recipes.pod_of(RECIPES)["initContainers"]
    source, target = scratch / "mounted", scratch / "keys.json"
    here = {first["command"][-2]: str(source), first["command"][-1]: str(target)}
    for key, taken in (("FILL-IN", False), (A_KEY, True)):
        source.write_text(text.replace("FILL-IN", key))
        source.chmod(0o640)
        subprocess.run([here.get(word, word) for word in first["command"]], check=True)
        if taken:
            assert [entry.caller.name for entry in read_keys_file(target)] == ["team-a"]
        else:
            with pytest.raises(ConfigError, match="16 to 256"):
                read_keys_file(target)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
@pytest.mark.parametrize("broken", [False, True])
def test_systemd_takes_the_unit(broken: bool, tmp_path: Path) -> None:
    """With the checkout's path replaced by one that is here."""
    text = (RECIPES / recipes.UNIT).read_text()
    program = tmp_path / ".venv" / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.symlink_to(sys.executable)
    unit = tmp_path / "sgl-esft.service"
    text = text.replace("/srv/sgl-esft", str(tmp_path))
    unit.write_text(text.replace("TimeoutStopSec=60", "TimeoutStopSec=soon") if broken else text)
    command = ["systemd-analyze", "verify", "--man=no", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = [line for line in done.stderr.splitlines() if "sgl-esft.service" in line]
    assert bool(said or done.returncode) == broken, done.stderr


@pytest.mark.parametrize("path", SHELL_FILES)
def test_shell_files_are_clean(path: str) -> None:
    command = ["bash", "-n"] if SHELLCHECK is None else [SHELLCHECK]
    done = subprocess.run([*command, str(ROOT / path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def one_machine(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes], Path]]:
    """(address, process, folder of its keys) of the recipe, running."""
    port = pick_free_port()
    environment = {**os.environ, "PYTHON": sys.executable, "STATE": str(tmp_path / "state")}
    log = (tmp_path / "log").open("wb")
    process = subprocess.Popen(
        [RECIPES / "one_machine.sh", "--max-total-tokens", "4096"],
        env={**environment, "PORT": str(port)},
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        yield f"http://127.0.0.1:{port}", process, tmp_path
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.close()


@pytest.mark.server
@pytest.mark.full
def test_one_machine_serves_with_keys_and_drains(
    one_machine: tuple[str, subprocess.Popen[bytes], Path],
) -> None:
    url, process, folder = one_machine
    wait_until_ready(url, process, folder)
    key = json.loads((folder / "state" / "keys.json").read_text())["keys"][0]["key"]
    body = {"text": "coffee -> ", "adapter": "reverse", "sampling_params": {"stop": "\n"}}
    assert requests.post(f"{url}/generate", json=body, timeout=60).status_code == 401
    bearer = {"Authorization": f"Bearer {key}"}
    answer = requests.post(f"{url}/generate", json=body, headers=bearer, timeout=60)
    assert answer.status_code == 200, answer.text
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0


def wait_until_ready(url: str, process: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if requests.get(f"{url}/readyz", timeout=5).status_code == 200:
                return
        except requests.ConnectionError:
            pass
        time.sleep(0.5)
    pytest.fail((folder / "log").read_text()[-2000:])
