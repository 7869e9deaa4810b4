"""What is wrong with launch/recipes: every file is parsed, every command by our own parser.

    recipes --[launches]--> Launch (the launcher's arguments) --[flag_problems]--> problems
            --[documents]--> objects --[schema_problems, facts]--> problems

Shell recipes are run, with stand-ins for Python and srun that write down what they are asked for.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import click
import jsonschema
import yaml

from sgl_elastic import options
from sgl_elastic.errors import ElasticError
from sgl_esft.errors import EsftError, UnknownRouteError
from sgl_esft.http.classes import RouteClass, RouteTable
from sgl_esft_launch import flags
from tests.repo.tree import PACKAGES, ROOT

RECIPES = ROOT / "launch" / "recipes"
SCHEMAS = Path(__file__).parent / "schemas"

# Script -> the arguments it is run with.
SCRIPTS: Mapping[str, Sequence[Sequence[str]]] = {
    "one_machine.sh": [[], ["--max-adapters", "8"]],
    "slurm/sgl-esft.sbatch": [[]],
    "ray/serve.sh": [["head"], ["node", "10.0.0.1"], ["serve", "2"]],
}
UNIT = "systemd/sgl-esft.service"
IMAGES = ("docker/cpu.Dockerfile", "docker/cuda.Dockerfile")
COMPOSE = "docker/compose.yaml"
KUBERNETES = ("kubernetes/sgl-esft.yaml", "kubernetes/secret.yaml")
RAY_CLUSTER = "ray/cluster.yaml"
FILES = {"README.md", *SCRIPTS, UNIT, *IMAGES, COMPOSE, *KUBERNETES, RAY_CLUSTER}

LAUNCHER = ("-m", "sgl_esft.launch_server")
SGLANG_FLAGS = {"--enable-metrics"}
ENDING_S = 12  # docs/health.md: a scale may take 5 s to end, a process that hangs 7 s
KILL_WAIT_S = 30  # Slurm's default, from scancel to SIGKILL
BUILT_FROM = {*PACKAGES, "csrc", "requirements", "pyproject.toml", "setup.py", "LICENSE"}

# (file, what is wrong where the third is False, whether it is as it should be).
Fact = tuple[str, str, bool]


@dataclass(frozen=True)
class Launch:
    """One command of a recipe that starts a server, less Python and the module's name."""

    where: str
    argv: tuple[str, ...]

    def parse(self) -> tuple[flags.LaunchFlags, list[str]]:
        """By the launcher's own parsers. Raises EsftError, ElasticError, SystemExit."""
        rest = options.parse(self.argv)[1] if "--elastic" in self.argv else list(self.argv)
        return flags.parse(rest)


def problems(folder: Path, scratch: Path) -> list[str]:
    """Everything that is wrong with the recipes in `folder`."""
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    if files != FILES:
        return [f"{name}: nobody checks it, or it is missing" for name in sorted(files ^ FILES)]
    found = [*shell_problems(folder), *schema_problems(folder), *broken(image_facts(folder))]
    if found:
        return found
    recorded = run_scripts(folder, scratch)
    launches = [*launches_of(folder), *map(as_launch, launcher_only(recorded))]
    found = [*flag_problems(launches), *ray_problems(folder, recorded)]
    if found:
        return found
    facts = (compose_facts(folder), pod_facts(folder), object_facts(folder))
    return broken(chain(*facts, end_facts(folder, launches)))


def broken(facts: Iterable[Fact]) -> list[str]:
    return sorted(f"{where}: {words}" for where, words, is_so in facts if not is_so)


# Commands


def launches_of(folder: Path) -> list[Launch]:
    """Of the recipes that are data."""
    unit = shlex.split(read_unit(folder)["Service"]["ExecStart"])
    entry = {image: entrypoint(folder, image) for image in IMAGES}
    cpu = entry[IMAGES[0]][0]
    return [
        Launch(UNIT, arguments(unit)),
        *(Launch(image, arguments([*start, *end])) for image, (start, end) in entry.items()),
        Launch(COMPOSE, arguments([*cpu, *service_of(folder)["command"]])),
        Launch(KUBERNETES[0], arguments([*cpu, *pod_of(folder)["containers"][0]["args"]])),
    ]


def arguments(command: Sequence[str]) -> tuple[str, ...]:
    """What follows the launcher's name; empty where it is not named."""
    for at in range(len(command) - 1):
        if tuple(command[at : at + 2]) == LAUNCHER:
            return tuple(command[at + 2 :])
    return ("--no-launcher-in-this-command",)


def flag_problems(launches: Sequence[Launch]) -> Iterator[str]:
    """Flags that neither the launcher nor SGLang has, and values that they refuse."""
    for launch in launches:
        try:
            _, rest = launch.parse()
        except (EsftError, ElasticError, SystemExit) as error:
            yield f"{launch.where}: {error}"
        else:
            yield from (f"{launch.where}: no flag {each}" for each in set(rest) - SGLANG_FLAGS)


def run_scripts(folder: Path, scratch: Path) -> list[tuple[str, list[str]]]:
    """(script, the command of Python that it ended in), for all scripts and their arguments."""
    environment, record = stand_ins(scratch)
    found = []
    for name, calls in SCRIPTS.items():
        for arguments in calls:
            record.write_text("")
            command = ["bash", str(folder / name), *arguments]
            subprocess.run(command, env=environment, cwd=scratch, check=True, capture_output=True)
            found += [(name, line.split("\t")[:-1]) for line in record.read_text().splitlines()]
    return found


def stand_ins(scratch: Path) -> tuple[dict[str, str], Path]:
    """An environment whose Python and srun do nothing else than to write down what is asked."""
    record = scratch / "record"
    bodies = {
        "python": f"printf '%s\\t' \"$@\" >>'{record}'; echo >>'{record}'\n",
        "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"\n',
    }
    for name, body in bodies.items():
        (scratch / name).write_text(f"#!/usr/bin/env bash\n{body}")
        (scratch / name).chmod(0o755)
    environment = {name: f"/srv/{name.lower()}" for name in ("MODEL", "ADAPTERS", "KEYS")}
    environment |= {"PATH": f"{scratch}:/usr/bin:/bin", "HOME": str(scratch)}
    return environment | {"PYTHON": str(scratch / "python")}, record


def launcher_only(recorded: Sequence[tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
    return [each for each in recorded if tuple(each[1][:2]) == LAUNCHER]


def as_launch(recorded: tuple[str, list[str]]) -> Launch:
    return Launch(recorded[0], tuple(recorded[1][2:]))


def ray_problems(folder: Path, recorded: Sequence[tuple[str, list[str]]]) -> Iterator[str]:
    """Commands and a cluster that Ray's own parsers refuse."""
    from ray.autoscaler._private.local.config import prepare_local
    from ray.scripts.scripts import cli

    calls = [(name, argv[2:]) for name, argv in recorded if tuple(argv[:2]) != LAUNCHER]
    cluster = read_yaml(folder / RAY_CLUSTER)[0]
    for kind in ("head_start_ray_commands", "worker_start_ray_commands"):
        calls += [(RAY_CLUSTER, shlex.split(line)[1:]) for line in cluster[kind]]
    for name, argv in calls:
        command = cli.commands.get(argv[0] if argv else "")
        if command is None:
            yield f"{name}: Ray has no command {argv[:1]}"
            continue
        try:
            command.make_context(argv[0], list(argv[1:]))
        except click.ClickException as error:
            yield f"{name}: ray {' '.join(argv)}: {error}"
    try:
        prepare_local(cluster)
    except click.ClickException:
        yield f"{RAY_CLUSTER}: Ray refuses the provider {cluster['provider']}"


# Documents


def read_yaml(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text()))


def read_unit(folder: Path) -> dict[str, dict[str, str]]:
    """Sections of the unit; a key that stands twice is an error."""
    unit = configparser.ConfigParser(interpolation=None, delimiters="=")
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string((folder / UNIT).read_text().replace("\\\n", " "))
    return {name: dict(unit[name]) for name in unit.sections()}


def sbatch_options(folder: Path) -> dict[str, str]:
    text = (folder / "slurm/sgl-esft.sbatch").read_text()
    given = re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.MULTILINE)
    assert len(given) == text.count("#SBATCH"), "write #SBATCH --name=value"
    return dict(given)


def documents(folder: Path) -> Iterator[tuple[str, Any, Path]]:
    """(file, object, its schema)."""
    import ray.autoscaler

    yield UNIT, read_unit(folder), SCHEMAS / "systemd.json"
    yield "slurm/sgl-esft.sbatch", sbatch_options(folder), SCHEMAS / "slurm.json"
    yield COMPOSE, read_yaml(folder / COMPOSE)[0], SCHEMAS / "compose.json"
    for name in KUBERNETES:
        for each in read_yaml(folder / name):
            yield name, each, SCHEMAS / "kubernetes.json"
    ray_schema = Path(str(ray.autoscaler.__file__)).parent / "ray-schema.json"
    yield RAY_CLUSTER, read_yaml(folder / RAY_CLUSTER)[0], ray_schema


def schema_problems(folder: Path) -> Iterator[str]:
    for name, document, schema in documents(folder):
        yield from (f"{name}: {fault}" for fault in schema_faults(document, schema))


def schema_faults(document: Any, path: Path) -> list[str]:
    errors = validator(path).iter_errors(document)
    return [f"{error.json_path}: {error.message[:200]}" for error in errors]


@cache
def validator(path: Path) -> Any:
    schema = json.loads(path.read_text())
    kind = jsonschema.validators.validator_for(schema)
    kind.check_schema(schema)
    return kind(schema)


def shell_problems(folder: Path) -> Iterator[str]:
    for name in SCRIPTS:
        done = subprocess.run(
            ["bash", "-n", str(folder / name)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            yield f"{name}: {done.stderr}"
        if not name.endswith(".sbatch") and not os.access(folder / name, os.X_OK):
            yield f"{name}: not executable"


# Images


def instructions(folder: Path, image: str) -> list[tuple[str, str]]:
    """(instruction, the rest of its line) of a Dockerfile, continued lines joined."""
    lines = (folder / image).read_text().splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    joined = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined)]


def entrypoint(folder: Path, image: str) -> tuple[list[str], list[str]]:
    """(ENTRYPOINT, CMD), both in their exec form, so that signals arrive."""
    last = dict(instructions(folder, image))
    return json.loads(last["ENTRYPOINT"]), json.loads(last["CMD"])


def image_facts(folder: Path) -> Iterator[Fact]:
    """Everything that is copied, installed or built upon is there; the user is the one made."""
    for image in IMAGES:
        lines = instructions(folder, image)
        last = dict(lines)
        froms = [rest.split() for word, rest in lines if word == "FROM"]
        copies = [rest.split() for word, rest in lines if word == "COPY"]
        run = " ".join(rest for word, rest in lines if word == "RUN")
        stages = {words[-1] for words in froms if "AS" in words}
        taken = [words[0].removeprefix("--from=") for words in copies if "--" in words[0]]
        images = {words[0] for words in froms} | set(taken)
        sources = [path for words in copies if "--" not in words[0] for path in words[:-1]]
        copied = {path.rstrip("/") for path in sources}
        for name in images - stages:
            pinned = re.fullmatch(r"[\w./-]+:[\d.]+[\w.-]*", name)
            yield image, f"{name} has no version", pinned is not None
        for path in {*copied, *re.findall(r"-r (\S+)", run)}:
            yield image, f"no file {path}", (ROOT / path).exists()
        for path in BUILT_FROM:
            yield image, f"{path} is not copied", path in copied
        made = re.findall(r"useradd .*--uid (\d+)", run)
        yield image, "USER is not the one that useradd makes", made == [last.get("USER")]
        port = str(flags.DEFAULT_PORT)
        yield image, f"EXPOSE is not {port}", last.get("EXPOSE") == port


# What fits what


def service_of(folder: Path) -> dict[str, Any]:
    service: dict[str, Any] = read_yaml(folder / COMPOSE)[0]["services"]["sgl-esft"]
    return service


def pod_of(folder: Path) -> dict[str, Any]:
    pod: dict[str, Any] = objects(folder)["Deployment"]["spec"]["template"]["spec"]
    return pod


def objects(folder: Path) -> dict[str, Any]:
    """Kubernetes objects by kind."""
    return {each["kind"]: each for name in KUBERNETES for each in read_yaml(folder / name)}


def is_public(path: str) -> bool:
    """Whether a probe may ask it: without a key."""
    try:
        return RouteTable().find("GET", path) is RouteClass.PUBLIC
    except UnknownRouteError:
        return False


def path_facts(launch: Launch, mounts: Sequence[str]) -> Iterator[Fact]:
    """Paths in flags lie in a folder of the container that something is mounted at."""
    parsed, _ = launch.parse()
    for path in (parsed.model_path, parsed.adapter_root, parsed.access.api_keys_file):
        if path:
            is_mounted = any(Path(path).is_relative_to(mount) for mount in mounts)
            yield launch.where, f"nothing is mounted at {path}", is_mounted


def compose_facts(folder: Path) -> Iterator[Fact]:
    service, launch = service_of(folder), launches_of(folder)[3]
    parsed, _ = launch.parse()
    port, build = str(parsed.port), service["build"]
    secrets = set(service["secrets"])
    mounts = [volume.split(":")[1] for volume in service["volumes"]]
    yield from path_facts(launch, [*mounts, *(f"/run/secrets/{name}" for name in secrets)])
    asked = " ".join(service["healthcheck"]["test"])
    probed = re.findall(r"127\.0\.0\.1:(\d+)(/\w+)", asked)
    ports = [each.split(":")[-1] for each in service["ports"]] + [each for each, _ in probed]
    in_file = set(read_yaml(folder / COMPOSE)[0]["secrets"])
    admin = parsed.access.admin_key_env
    yield COMPOSE, "the service's secrets are not those of the file", secrets == in_file
    checkout = folder / "docker" / build["context"]
    yield COMPOSE, "the build's context is not the checkout", (checkout / "launch").is_dir()
    yield COMPOSE, f"no file {build['dockerfile']}", (ROOT / build["dockerfile"]).is_file()
    yield COMPOSE, f"no {admin} in the environment", admin in service["environment"]
    yield COMPOSE, f"the server's port is {port}", set(ports) == {port}
    for _, path in probed:
        yield COMPOSE, f"{path} is no public route", is_public(path)


def pod_facts(folder: Path) -> Iterator[Fact]:
    pod, launch = pod_of(folder), launches_of(folder)[4]
    where = launch.where
    [container] = pod["containers"]
    parsed, _ = launch.parse()
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    yield where, f"the server's port is {parsed.port}", set(ports.values()) == {parsed.port}
    for kind, path in (("startup", "/healthz"), ("liveness", "/healthz"), ("readiness", "/readyz")):
        probe = container[f"{kind}Probe"]["httpGet"]
        is_fine = probe["path"] == path and probe["port"] in ports and is_public(path)
        yield where, f"the {kind} probe asks {probe}, not {path} at a port's name", is_fine
    yield from path_facts(launch, [mount["mountPath"] for mount in container["volumeMounts"]])
    admin = parsed.access.admin_key_env
    named = {each["name"] for each in container["env"]}
    yield where, f"no {admin} in the environment", admin in named
    volumes = {volume["name"] for volume in pod["volumes"]}
    mounted = {m["name"] for each in containers(pod) for m in each["volumeMounts"]}
    yield where, f"volumes and mounts differ by {volumes ^ mounted}", volumes == mounted
    user = dict(instructions(folder, IMAGES[0]))["USER"]
    is_same = str(pod["securityContext"]["runAsUser"]) == user
    yield where, f"the image's user is {user}", is_same


def containers(pod: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [*pod["initContainers"], *pod["containers"]]


def object_facts(folder: Path) -> Iterator[Fact]:
    """Names and labels by which Kubernetes objects find each other, and the images' names."""
    found, where = objects(folder), KUBERNETES[0]
    deployment, pod = found["Deployment"]["spec"], pod_of(folder)
    service, budget = found["Service"]["spec"], found["PodDisruptionBudget"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    for selector in (
        deployment["selector"]["matchLabels"],
        service["selector"],
        budget["selector"]["matchLabels"],
    ):
        is_fine = selector.items() <= labels.items()
        yield where, f"something selects {selector}, pods have {labels}", is_fine
    can_drain = budget["minAvailable"] < deployment["replicas"]
    yield where, "the PodDisruptionBudget lets no node be drained", can_drain
    names = {port["name"] for each in pod["containers"] for port in each["ports"]}
    targets = {port["targetPort"] for port in service["ports"]}
    yield where, f"the Service's target is none of {names}", targets <= names
    volumes = [volume["secret"] for volume in pod["volumes"] if "secret" in volume]
    wanted = {(v["secretName"], item["key"]) for v in volumes for item in v["items"]}
    refs = [env["valueFrom"]["secretKeyRef"] for each in pod["containers"] for env in each["env"]]
    wanted |= {(ref["name"], ref["key"]) for ref in refs}
    secret = found["Secret"]
    given = {(secret["metadata"]["name"], key) for key in secret["stringData"]}
    yield where, f"the pod wants of secrets {wanted}, there are {given}", wanted == given
    texts = [(folder / image).read_text() for image in IMAGES]
    built = {name for text in texts for name in re.findall(r"-t (\S+)", text)}
    for name in {each["image"] for each in containers(pod)} | {service_of(folder)["image"]}:
        yield where, f"no recipe builds the image {name}", name in built


def end_facts(folder: Path, launches: Sequence[Launch]) -> Iterator[Fact]:
    """The time to end is longer than the drain, and what comes before and after it."""
    drain_s = {each.where: each.parse()[0].health.drain_timeout_s for each in launches}
    sbatch = "slurm/sgl-esft.sbatch"
    # For how long a pod goes on before SIGTERM.
    slept = pod_of(folder)["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert slept[0] == "sleep"
    pod_s = pod_of(folder)["terminationGracePeriodSeconds"] - float(slept[1])
    given = {
        UNIT: float(read_unit(folder)["Service"]["TimeoutStopSec"]),
        COMPOSE: float(service_of(folder)["stop_grace_period"].removesuffix("s")),
        KUBERNETES[0]: pod_s,
        sbatch: float(sbatch_options(folder)["signal"].partition("@")[2]),
    }
    for name, seconds in given.items():
        words = f"{seconds:g} s are too few for a drain of {drain_s[name]:g} s"
        yield name, words, seconds >= drain_s[name] + ENDING_S
    is_short = drain_s[sbatch] + ENDING_S - 5 <= KILL_WAIT_S  # less a scale's: it is not elastic
    yield sbatch, f"after scancel there are {KILL_WAIT_S} s", is_short


def on_this_machine(
    parsed: flags.LaunchFlags, port: int, **paths: Path | None
) -> flags.LaunchFlags:
    """The same launch with files that are here: to be planned as well as parsed."""
    access = parsed.access
    if access.api_keys_file is not None:
        access = replace(access, api_keys_file=str(paths["keys"]))
    root = None if parsed.adapter_root is None else str(paths["adapters"])
    model = None if parsed.model_path is None else str(paths["model"])
    return replace(parsed, access=access, adapter_root=root, model_path=model, port=port)
