"""The files for containers, Compose and Kubernetes name what there is in quire, and agree."""

import json
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from quire.cli.flags import engine_options, server_options
from quire.cli.parser import build_parser
from quire.server.config import ServerConfig
from quire.server.routes.admin.health import router as health
from quire.version import __version__

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "quire"
DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["quire"]
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
TEMPLATES = "\n".join(path.read_text() for path in sorted((CHART / "templates").iterdir()))
SPARE_S = 10
"""Time that the server needs to end after it has drained."""


def options(environment: Mapping[str, str]) -> dict[str, Any]:
    """The options that variables stand for; SystemExit if one stands for none."""
    args = build_parser(environment=environment).parse_args(["serve"])
    return engine_options(args) | server_options(args)


def instructions(name: str) -> list[str]:
    """The arguments of the Dockerfile's instructions of one name, each on one line."""
    lines = re.sub(r"\\\n", "", re.sub(r"^ *#.*\n", "", DOCKERFILE, flags=re.MULTILINE))
    return re.findall(rf"^{name} (.*)$", lines, re.MULTILINE)


def test_the_image_installs_the_tested_versions() -> None:
    commands = [command for run in instructions("RUN") for command in run.split("&&")]
    installs = [command for command in commands if re.search(r"bin/pip install", command)]
    assert len(installs) == 3
    for command in installs:  # others.lock is requirements.lock without torch
        assert "-c requirements.lock" in command or "-c others.lock" in command
    assert "constraints.txt requirements.lock ./" in instructions("COPY")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (named,) = re.findall(r"'\.\[([\w,]+)\]'", DOCKERFILE)
    assert set(named.split(",")) <= set(extras["optional-dependencies"])


def test_the_image_is_built_from_what_the_package_is_built_from() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    taken = {line.removeprefix("!") for line in lines if line.startswith("!")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    licences = project["project"]["license-files"]
    hook = project["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]["path"]
    read = {"pyproject.toml", "src", hook, project["project"]["readme"], *licences}
    versions = {"constraints.txt", "requirements.lock"}
    assert {name for name in read if not name.startswith("src/")} | versions == taken
    assert [name for name in taken if not (ROOT / name).exists()] == []


def test_the_image_listens_to_the_world_and_runs_as_no_root() -> None:
    variables = dict(re.findall(r"(\w+)=(\S+)", " ".join(instructions("ENV"))))
    given = options(variables)
    assert given == {"host": "0.0.0.0", "port": ServerConfig().port}
    assert instructions("EXPOSE") == [str(ServerConfig().port)]
    assert instructions("USER") == ["10001:10001"]
    assert "runAsUser: 10001" in TEMPLATES and "fsGroup: 10001" in TEMPLATES


@pytest.mark.parametrize("status", [200, 503])
def test_the_image_s_check_asks_whether_the_server_lives(status: int) -> None:
    asked: list[str] = []

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    (check,) = instructions("HEALTHCHECK")
    command = json.loads(check.partition(" CMD ")[2])
    with HTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.handle_request).start()
        environment = {"QUIRE_PORT": str(server.server_port)}
        run = subprocess.run([sys.executable, *command[1:]], env=environment, capture_output=True)
    assert (run.returncode == 0) == (status == 200)
    assert set(asked) <= set(health.open_paths) and asked


def test_compose_gives_options_that_exist_and_time_to_drain() -> None:
    given = options({key: str(value) for key, value in COMPOSE["environment"].items()})
    assert int(COMPOSE["stop_grace_period"].removesuffix("s")) >= given["drain_timeout_s"] + SPARE_S
    assert COMPOSE["image"] == f"quire:{__version__}"
    folders = {volume.partition(":")[2] for volume in COMPOSE["volumes"]}
    assert folders == set(json.loads(*instructions("VOLUME")))
    assert str(given["cache_dir"]).startswith("/cache/")
    arguments = {argument.partition("=")[0] for argument in instructions("ARG")}
    assert set(COMPOSE["build"]["args"]) <= arguments


def test_the_chart_has_quire_s_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == __version__


def test_the_chart_s_variables_are_flags() -> None:
    names = set(re.findall(r"name: (QUIRE_\w+)", TEMPLATES))
    assert len(names) == 6
    samples = {"QUIRE_PORT": "8000", "QUIRE_DRAIN_TIMEOUT_S": "30", "QUIRE_CACHE_SIZE": "1GiB"}
    given = options({name: samples.get(name, "text") for name in names})
    assert len(given) == len(names)
    assert options(VALUES["environment"])["model"] == VALUES["environment"]["QUIRE_MODEL"]


def test_the_chart_s_probes_are_open_paths() -> None:
    probes = re.findall(r"(\w+)Probe:\n +httpGet:\n +path: (\S+)\n +port: http\n", TEMPLATES)
    assert probes == [("startup", "/live"), ("liveness", "/live"), ("readiness", "/ready")]
    assert {path for _, path in probes} <= set(health.open_paths)


def test_the_chart_lets_servers_drain() -> None:
    grace = (
        "terminationGracePeriodSeconds: {{ add .Values.preStopSeconds .Values.drainTimeoutSeconds"
    )
    assert f"{grace} {SPARE_S} }}}}" in TEMPLATES
    assert VALUES["drainTimeoutSeconds"] == ServerConfig().drain_timeout_s


def test_the_chart_scales_by_a_metric_that_exists() -> None:
    metrics = (ROOT / "docs" / "observability.md").read_text()
    assert f"| `{VALUES['autoscaling']['metric']}` " in metrics


def test_the_chart_uses_each_value_and_no_other() -> None:
    known = set()
    for name, value in VALUES.items():
        is_group = isinstance(value, dict) and value and name not in ("environment", "resources")
        known |= {f"{name}.{key}" for key in value} if is_group else {name}
    used = set(re.findall(r"\.Values\.([\w.]+)", TEMPLATES))
    assert used - {"apiKeys.operator", "environment.QUIRE_MODEL"} == known


def test_the_chart_s_schema_takes_its_values_and_refuses_others() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.validate(VALUES, schema)
    for wrong in (
        {"replicas": 2},
        {"environment": {"QUIRE_PORT": "9000"}},
        {"environment": {"QUIRE_MAX_NUM_SEQS": 8}},
        {"apiKeys": {"alice": "short"}},
        {"cache": {"maxsize": "1GiB"}},
        {"drainTimeoutSeconds": 0},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(VALUES | wrong, schema)
