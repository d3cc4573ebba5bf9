"""The files that deploy a fleet, held against the command line, the settings and the packages that they name.

No container is started: what is checked is that every command, variable, image, path and grace period exists
and fits. systemd-analyze looks at the unit files where it is installed.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

import tuner
import workers.settings
from api import cli
from api.http.security import OPEN_PATHS
from tuner import sandbox
from tuner.spec import StudySettings
from tuner.target import named
from workers.identity import ROLES
from workers.settings import Settings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "docs" / "deploy"
UNITS = DEPLOY / "systemd"
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: s for name, s in SERVICES.items() if "build" in s}
KUBERNETES: list[dict[str, Any]] = [
    document for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")) for document in yaml.safe_load_all(path.open())
]
PODS = {d["metadata"]["name"]: d["spec"]["template"] for d in KUBERNETES if "template" in d.get("spec", {})}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
KNOWN = set(re.findall(r"^((?:FLASHTUNE|CUDA)_\w+)", workers.settings.__doc__ or "", flags=re.MULTILINE))
LONGEST_S = {
    # what a stop waits for: a workload that opens, then the finals of one; a config that compiles; open streams
    "measure": 2 * sandbox._OPEN_TIMEOUT_S,
    "compile": StudySettings().compile_timeout_s,
    "control": 10.0,
    "serve": 4.0,
}


def variables(text: str) -> dict[str, str]:
    """Return the assignments of an environment file, those that are commented out included."""
    return dict(re.findall(r"^#?([A-Z][A-Z_]+)=(.*)$", text, flags=re.MULTILINE))


ENV = variables((ROOT / ".env.example").read_text())


def filled(text: str) -> str:
    """Return what compose makes of a text: variables by ``.env`` with passwords, else by their defaults."""

    def value(found: re.Match[str]) -> str:
        name, how, default = found.groups()
        assert name in ENV, f"{name} is not in .env.example"
        if how == ":?":
            return ENV[name] or "0123456789abcdef"
        assert ENV[name] == default, f"{name} is {ENV[name]!r} in .env.example and {default!r} by default"
        return ENV[name]

    return re.sub(r"\$\{(\w+)(:-|:\?)([^}]*)\}", value, text)


def parsed(words: list[str]) -> tuple[str, dict[str, Any]]:
    """Have the real command line read a command; return which it is, its role or name, and its options."""
    assert words[0] == "flashtune"
    group: Any = typer.main.get_command(cli.app)
    command = group.commands[words[1]]
    options = command.make_context(words[1], words[2:]).params  # refuses unknown options and bad values
    if words[1] != "worker":
        return words[1], options
    assert options["role"] in ROLES
    if options["arch"]:
        assert named(options["arch"]).arch == options["arch"]
    return options["role"], options


def seconds(text: str) -> float:
    return float(text[:-1]) * {"s": 1, "m": 60}[text[-1]]


def pinned(image: str) -> bool:
    return re.search(r":\d+\.\d+(\.\d+)?(-\w+)*$", image) is not None


@pytest.mark.parametrize("name", OURS)
def test_compose_runs_commands_that_exist(name: str) -> None:
    service = OURS[name]
    role, options = parsed([filled(word) for word in service["command"]])
    assert role == {"api": "serve"}.get(name, name.partition("-")[0])
    assert LONGEST_S[role] <= seconds(service["stop_grace_period"])
    if role == "serve":
        probe = " ".join(service["healthcheck"]["test"])
        assert f":{options['port']}/readyz" in probe
        assert service["ports"][0].endswith(f":{options['port']}:{options['port']}")
        assert options["host"] == "0.0.0.0"  # or the other containers and the published port would not reach it


@pytest.mark.parametrize("name", OURS)
def test_compose_sets_variables_that_are_read(name: str) -> None:
    environment = {k: filled(v) for k, v in OURS[name]["environment"].items()}
    assert set(environment) <= KNOWN
    settings = Settings.from_env(environment)
    for url, host in ((settings.database_url, "postgres"), (settings.broker_url or "", "rabbitmq")):
        assert f"@{host}/" in url
        assert host in SERVICES
    password = filled("${POSTGRES_PASSWORD:?}")
    assert password not in repr(settings)


def test_compose_gives_database_and_broker_what_the_workers_use() -> None:
    settings = Settings.from_env({k: filled(v) for k, v in OURS["control"]["environment"].items()})
    database, broker = (
        {k: filled(v) for k, v in SERVICES[name]["environment"].items()} for name in ("postgres", "rabbitmq")
    )
    user, password, name = (database[f"POSTGRES_{k}"] for k in ("USER", "PASSWORD", "DB"))
    assert settings.database_url == f"postgresql://{user}:{password}@postgres/{name}"
    user, password, name = (broker[f"RABBITMQ_DEFAULT_{k}"] for k in ("USER", "PASS", "VHOST"))
    assert settings.broker_url == f"amqp://{user}:{password}@rabbitmq/{name}"


def test_compose_pins_images_and_builds_ours_here() -> None:
    for service in SERVICES.values():
        assert pinned(service["image"]), service["image"]
        assert service["restart"] == "unless-stopped"
    for name, service in OURS.items():
        extra = service["build"]["args"]["EXTRA"]
        assert service["image"] == f"flashtune-{extra}:{tuner.__version__}"
        assert extra in EXTRAS
        assert (ROOT / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        assert extra == {"measure": "gpu", "compile": "compile"}.get(name.partition("-")[0], "service")


def test_compose_has_no_secret_and_asks_for_each() -> None:
    secrets = {name for name in ENV if "PASSWORD" in name}
    assert secrets == {"POSTGRES_PASSWORD", "RABBITMQ_PASSWORD"}
    text = (ROOT / "compose.yaml").read_text()
    for name in secrets:
        assert ENV[name] == ""
        assert set(re.findall(rf"\${{?{name}(..)", text)) == {":?"}  # compose stops if it is empty
    assert not re.search(r"://\w+:(?!\$\{)", text)


def test_compose_volumes_and_dependencies_are_there() -> None:
    used = {v.partition(":")[0] for s in SERVICES.values() for v in s.get("volumes", ())}
    assert used == set(COMPOSE["volumes"])
    for service in SERVICES.values():
        for other, how in service.get("depends_on", {}).items():
            assert how["condition"] == "service_healthy"
            assert "healthcheck" in SERVICES[other]
    # objects go from whoever compiles to whoever measures
    for name in ("compile", "measure-0"):
        mounted = dict(v.split(":") for v in OURS[name]["volumes"])
        assert mounted["artifacts"] == OURS[name]["environment"]["FLASHTUNE_ARTIFACT_DIR"]


def test_compose_has_one_measuring_worker_a_gpu_and_needs_none_without_a_profile() -> None:
    devices = []
    for name, service in SERVICES.items():
        reserved = service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
        assert bool(reserved) == name.startswith("measure-") == ("gpus" in service.get("profiles", ()))
        for device in reserved:
            assert (device["driver"], "utility" in device["capabilities"]) == ("nvidia", True)  # NVML
            devices += device["device_ids"]
    assert devices == [str(i) for i in range(8)]
    assert [n for n, s in SERVICES.items() if "gpu" in s.get("profiles", ())] == ["measure-0"]
    # "auto" would measure on the CPU if the GPU were missing
    assert parsed(OURS["measure-0"]["command"])[1]["device"] == "cuda"


def test_the_dockerfile_has_all_packages_and_a_pinned_base() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    assert all(pinned(image) for image in re.findall(r"^FROM (\S+)", text, flags=re.MULTILINE))
    copied = {word for line in re.findall(r"^COPY (.*) \S+$", text, flags=re.MULTILINE) for word in line.split()}
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert copied == packages | {"pyproject.toml", "README.md"}
    folder = re.search(r"FLASHTUNE_HOME=(\S+)", text)
    assert folder is not None
    mounted = dict(v.split(":") for v in OURS["measure-0"]["volumes"])
    owned = re.search(r"install -d -o flashtune .* -m 0700 (.*)$", text, flags=re.MULTILINE)
    assert owned is not None  # a named volume takes owner and mode from the image
    assert mounted["cache"] == folder[1]
    assert set(mounted.values()) <= set(owned[1].split())


def unit(name: str) -> dict[str, list[str]]:
    """Return the directives of a unit file with all their values."""
    found: dict[str, list[str]] = {}
    text = (UNITS / name).read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    for key, value in re.findall(r"^(\w+)=(.*)$", "\n".join(lines).replace("\\\n", " "), flags=re.MULTILINE):
        found.setdefault(key, []).append(value)
    return found


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
@pytest.mark.parametrize("name", ["flashtune-api.service", "flashtune-worker@.service"])
def test_systemd_finds_no_fault(tmp_path: Path, name: str) -> None:
    program = Path(sys.executable).with_name("flashtune")
    unit_file = tmp_path / name.replace("@", "@control")
    unit_file.write_text((UNITS / name).read_text().replace("/opt/flashtune/bin/flashtune", str(program)))
    done = subprocess.run(["systemd-analyze", "verify", unit_file], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


GPU = "GPU-5c1f8f0e-1a2b-3c4d-5e6f-001122334455"


@pytest.mark.parametrize(
    ("instance", "words"),
    [
        (GPU, ["--role", "measure", "--device", GPU]),
        ("compile-sm_90a", ["--role", "compile", "--arch", "sm_90a"]),
        ("control", ["--role", "control"]),
        ("compile-", None),
        ("api", None),
    ],
)
def test_a_worker_unit_runs_what_its_instance_says(tmp_path: Path, instance: str, words: list[str] | None) -> None:
    program = tmp_path / "flashtune"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    (line,) = unit("flashtune-worker@.service")["ExecStart"]
    line = line.replace("/opt/flashtune/bin/flashtune", str(program)).replace("%i", instance).replace("$$", "$")
    done = subprocess.run(shlex.split(line), capture_output=True, text=True, check=False)
    if words is None:
        assert done.returncode == 2
        assert instance in done.stderr
        return
    assert done.stdout.split() == ["worker", *words]
    role, _ = parsed(["flashtune", "worker", *words])
    assert float(unit("flashtune-worker@.service")["TimeoutStopSec"][0]) >= LONGEST_S[role]


def test_units_restart_stop_in_good_order_and_keep_the_gpu() -> None:
    for name in ("flashtune-api.service", "flashtune-worker@.service"):
        directives = unit(name)
        for key, value in (("Restart", "always"), ("KillMode", "mixed"), ("StartLimitIntervalSec", "0")):
            assert directives[key] == [value]
        assert directives["EnvironmentFile"] == ["/etc/flashtune/flashtune.env"]
        assert Settings.from_env(variables("\n".join(directives["Environment"]))).home == Path(
            "/var/lib", directives["StateDirectory"][0]
        )
    worker = unit("flashtune-worker@.service")
    assert worker["OOMPolicy"] == ["continue"]
    hiding = {"PrivateDevices", "DevicePolicy", "DeviceAllow", "ProtectClock", "ProcSubset", "MemoryDenyWriteExecute"}
    assert not hiding & worker.keys()
    role, options = parsed(["flashtune", *unit("flashtune-api.service")["ExecStart"][0].split()[1:]])
    assert (role, options["host"]) == ("serve", "127.0.0.1")


def test_the_units_environment_file_is_accepted() -> None:
    named_there = variables((UNITS / "flashtune.env.example").read_text())
    assert set(named_there) <= KNOWN
    settings = Settings.from_env(named_there)
    assert settings.database_url.startswith("postgresql://")
    # what hides the disk from the worker must leave the shared folder writable
    assert unit("flashtune-worker@.service")["ReadWritePaths"] == [f"-{settings.artifact_dir}"]


def containers() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    for name, template in PODS.items():
        for container in template["spec"]["containers"]:
            yield name, template["spec"], container


@pytest.mark.parametrize(
    ("name", "pod", "container"), list(containers()), ids=lambda v: v if isinstance(v, str) else ""
)
def test_kubernetes_runs_commands_that_exist(name: str, pod: dict[str, Any], container: dict[str, Any]) -> None:
    role, options = parsed(container["command"])
    assert role == {"api": "serve"}.get(name, name.partition("-")[0])
    assert pod["terminationGracePeriodSeconds"] >= LONGEST_S[role]
    assert container["image"].endswith(f"/{role_image(role)}:{tuner.__version__}")
    (source,) = container["envFrom"]
    (secret,) = [d for d in KUBERNETES if d["kind"] == "Secret"]
    assert source["secretRef"]["name"] == secret["metadata"]["name"]
    limits = container["resources"].get("limits", {})
    assert limits.get("nvidia.com/gpu", 0) == (1 if role == "measure" else 0)
    for mount in container.get("volumeMounts", ()):
        assert mount["name"] in {v["name"] for v in pod["volumes"]}
    if role == "serve":
        assert container["ports"][0]["containerPort"] == options["port"]
        assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
        assert {container[f"{p}Probe"]["httpGet"]["path"] for p in ("readiness", "liveness")} <= set(OPEN_PATHS)


def role_image(role: str) -> str:
    return f"flashtune-{ {'measure': 'gpu', 'compile': 'compile'}.get(role, 'service') }"


def test_kubernetes_has_every_role_and_its_names_agree() -> None:
    assert {parsed(c["command"])[0] for _, _, c in containers()} == {"serve", *ROLES}
    assert {d["metadata"]["namespace"] for d in KUBERNETES} == {"flashtune"}
    labels = [t["metadata"]["labels"] for t in PODS.values()]
    for document in KUBERNETES:
        spec = document.get("spec", {})
        if document["kind"] == "Service":
            assert spec["selector"] in labels
        elif "template" in spec:
            assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    services = {d["metadata"]["name"] for d in KUBERNETES if d["kind"] == "Service"}
    assert {d["spec"]["serviceName"] for d in KUBERNETES if d["kind"] == "StatefulSet"} <= services


def test_kubernetes_secrets_are_settings() -> None:
    (secret,) = [d for d in KUBERNETES if d["kind"] == "Secret"]
    assert set(secret["stringData"]) <= KNOWN
    settings = Settings.from_env(secret["stringData"])
    assert settings.broker_url is not None
    assert "PASSWORD" not in repr(settings)


def test_the_guide_names_what_exists() -> None:
    text = (DEPLOY / "README.md").read_text()
    group: Any = typer.main.get_command(cli.app)
    spans = re.findall(r"`([^`]+)`|-- (flashtune .*)$", text, flags=re.MULTILINE)
    ours = [a or b for a, b in spans if not a.startswith(("create", "rabbitmqctl", "useradd"))]
    commands = {found for span in ours for found in re.findall(r"(?:^|[\s/])flashtune ([a-z]+)", span)}
    assert {"serve", "worker", "up", "doctor", "keys", "backup", "restore", "fleet"} <= commands <= set(group.commands)
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert (DEPLOY / target).exists(), target
    assert set(re.findall(r"FLASHTUNE_\w+", text)) <= KNOWN
