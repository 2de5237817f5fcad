"""What lies in `deploy/` is well formed, and says of `srt serve` what `srt serve` knows."""

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from srt.cli import serve
from srt.configs.engine_config import EngineConfig
from srt.serve.config import ServerConfig
from srt.test.ci_register import register_cpu_ci
from srt.version import __version__

register_cpu_ci(est_time=4, suite="per-commit")

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
PORT = ServerConfig().port
Instructions = list[tuple[str, str]]


def parse_options(words: list[str]) -> argparse.Namespace:
    """As `srt serve` takes them; it ends the process where it does not."""
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    return parser.parse_args(["serve", *words])


def documents(name: str) -> list[Any]:
    return [one for one in yaml.safe_load_all((DEPLOY / name).read_text()) if one is not None]


@pytest.fixture(scope="module")
def instructions() -> Instructions:
    """Of the Dockerfile, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = [line.strip() for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    pairs = [line.partition(" ")[::2] for line in lines]
    known = "ARG FROM RUN ENV WORKDIR COPY USER EXPOSE STOPSIGNAL HEALTHCHECK ENTRYPOINT CMD"
    assert {word for word, _ in pairs} <= set(known.split())
    return [(word, rest.strip()) for word, rest in pairs]


def last(instructions: Instructions, word: str) -> str:
    return [rest for name, rest in instructions if name == word][-1]


def test_the_image_runs_without_rights(instructions: Instructions) -> None:
    stages = [place for place, (word, _) in enumerate(instructions) if word == "FROM"]
    assert len(stages) == 2
    final = instructions[stages[1] :]
    assert last(final, "USER") == "10001:10001"
    after = [word for word, _ in final[[word for word, _ in final].index("USER") :]]
    assert "RUN" not in after and "COPY" not in after
    # Nothing but the environment comes from where compilers are.
    assert [rest for word, rest in final if word == "COPY"] == ["--from=build /opt/srt /opt/srt"]
    assert not re.search(r"(?i)(key|token|secret|password)=", str(instructions))


def test_the_image_is_pinned(instructions: Instructions) -> None:
    base = dict(rest.split("=") for word, rest in instructions if word == "ARG")
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", base["PYTHON_IMAGE"])
    makefile = (ROOT / "Makefile").read_text()
    assert f"TORCH ?= torch=={base['TORCH']}\n" in makefile
    copied = [rest.split()[0] for word, rest in instructions if word == "COPY"]
    assert all((ROOT / name).exists() for name in copied if not name.startswith("--from"))
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    names = {
        part
        for w, r in instructions
        if w == "COPY" and "--from" not in r
        for part in r.split()[:-1]
    }
    assert {f"!{name}" for name in names} == {line for line in ignored if line.startswith("!")}


def test_what_the_image_starts(instructions: Instructions) -> None:
    command = json.loads(last(instructions, "ENTRYPOINT"))
    assert command == ["srt", "serve"]
    args = parse_options(json.loads(last(instructions, "CMD")))
    assert (args.host, args.port) == ("0.0.0.0", PORT)
    assert last(instructions, "EXPOSE") == str(PORT)
    options, _, check = last(instructions, "HEALTHCHECK").partition("CMD ")
    assert "--start-period" in options
    program = json.loads(check)
    assert f"127.0.0.1:{PORT}/health" in program[-1]
    compile(program[-1], "healthcheck", "exec")


def test_the_health_check_of_the_image(instructions: Instructions) -> None:
    """It fails where nobody listens."""
    program = json.loads(last(instructions, "HEALTHCHECK").partition("CMD ")[2])
    nobody = program[-1].replace(str(PORT), "9")
    command = [sys.executable, "-c", nobody]
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0


def test_compose() -> None:
    (service,) = documents("compose.yaml")[0]["services"].values()
    args = parse_options(service["command"])
    assert service["ports"] == [f"127.0.0.1:{args.port}:{PORT}"]
    assert service["read_only"] and service["cap_drop"] == ["ALL"] and "/tmp" in service["tmpfs"]
    assert service["volumes"][0]["target"] == args.model_path
    assert service["volumes"][0]["read_only"]
    assert args.api_key_file == f"/run/secrets/{service['secrets'][0]}"
    assert seconds(service["stop_grace_period"]) > args.drain_timeout
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()


def seconds(text: str) -> float:
    assert text.endswith("s")
    return float(text[:-1])


def test_kubernetes() -> None:
    service, deployment, budget = documents("kubernetes.yaml")
    assert [one["kind"] for one in (service, deployment, budget)] == [
        "Service",
        "Deployment",
        "PodDisruptionBudget",
    ]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    for selector in (
        service["spec"]["selector"],
        deployment["spec"]["selector"]["matchLabels"],
        budget["spec"]["selector"]["matchLabels"],
    ):
        assert selector == labels
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    args = parse_options(container["args"])
    assert (args.host, args.port) == ("0.0.0.0", PORT)
    assert container["ports"] == [{"name": "http", "containerPort": PORT}]
    assert container["image"].endswith(f":{__version__}")
    probes = {
        name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")
    }
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/ready",
        "liveness": "/health",
        "readiness": "/ready",
    }
    assert all(probe["port"] == "http" for probe in probes.values())
    wait = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > wait + args.drain_timeout
    # Guaranteed, with whole CPUs: what the static CPU manager asks for.
    resources = container["resources"]
    assert resources["requests"] == resources["limits"]
    assert str(int(resources["limits"]["cpu"])) == resources["limits"]["cpu"]
    rights = pod["securityContext"] | container["securityContext"]
    assert rights["runAsNonRoot"] and rights["readOnlyRootFilesystem"]
    assert not rights["allowPrivilegeEscalation"] and rights["capabilities"] == {"drop": ["ALL"]}
    assert rights["seccompProfile"] == {"type": "RuntimeDefault"}
    places = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert set(places.values()) == {volume["name"] for volume in pod["volumes"]}
    assert args.model_path in places and str(Path(args.api_key_file).parent) in places
    assert "/tmp" in places


def unit() -> dict[str, list[str]]:
    settings: dict[str, list[str]] = {}
    for line in (DEPLOY / "srt.service").read_text().splitlines():
        if line and line[0] not in "#[":
            name, _, value = line.partition("=")
            settings.setdefault(name, []).append(value)
    return settings


def test_the_unit_starts_the_server() -> None:
    settings = unit()
    words = shlex.split(settings["ExecStart"][0])
    assert words[:2] == ["/opt/srt/bin/srt", "serve"]
    args = parse_options(words[2:])
    assert args.port == PORT
    credential = settings["LoadCredential"][0].partition(":")[0]
    assert args.api_key_file == f"${{CREDENTIALS_DIRECTORY}}/{credential}"
    assert float(settings["TimeoutStopSec"][0]) > args.drain_timeout
    # A stop is no failure.
    assert settings["SuccessExitStatus"] == ["143"]


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("needs systemd-analyze")
    # It looks for the program, which is installed elsewhere here.
    text = (DEPLOY / "srt.service").read_text().replace("/opt/srt/bin/srt", sys.executable)
    (tmp_path / "srt.service").write_text(text)

    def verify() -> str:
        command = [tool, "verify", "--man=no", str(tmp_path / "srt.service")]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        return "".join(
            line for line in (result.stdout + result.stderr).splitlines() if "srt.service" in line
        )

    assert verify() == ""
    (tmp_path / "srt.service").write_text(text.replace("KillMode=mixed", "KillMode=maybe"))
    assert "maybe" in verify()


def test_nginx_passes_streams_on() -> None:
    text = re.sub(r"#.*", "", (DEPLOY / "nginx.conf").read_text())
    assert text.count("{") == text.count("}")
    settings = dict(re.findall(r"(\w+)\s+([^;{}]+);", text))
    assert settings["proxy_buffering"] == "off" and settings["proxy_http_version"] == "1.1"
    assert settings["proxy_next_upstream"] == "off"
    assert re.search(rf"server 127\.0\.0\.1:{PORT};", text)
    limit = int(settings["client_max_body_size"].removesuffix("m")) * 1024 * 1024
    assert limit >= ServerConfig().max_body_bytes


def test_nginx_takes_it(tmp_path: Path) -> None:
    nginx = shutil.which("nginx", path="/usr/sbin:/usr/bin:/sbin")
    openssl = shutil.which("openssl")
    if nginx is None or openssl is None:
        pytest.skip("needs nginx and openssl")
    key, certificate = tmp_path / "srt.key", tmp_path / "srt.pem"
    subprocess.run(
        [
            *(openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=x"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    site = (DEPLOY / "nginx.conf").read_text()
    site = site.replace("/etc/ssl/certs/srt.pem", str(certificate))
    site = site.replace("/etc/ssl/private/srt.key", str(key)).replace("443", "31799")
    main = tmp_path / "nginx.conf"
    main.write_text(
        f"pid {tmp_path}/pid;\nerror_log {tmp_path}/log;\nevents {{}}\nhttp {{\naccess_log off;\n"
        f"client_body_temp_path {tmp_path}/a; proxy_temp_path {tmp_path}/b;\n{site}\n}}\n"
    )
    command = [nginx, "-t", "-p", str(tmp_path), "-c", str(main), "-e", str(tmp_path / "log")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_every_option_is_documented() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    serve.add_parser(commands)
    known = set(
        re.findall(r"^  (--[a-z-]+)", commands.choices["serve"].format_help(), re.MULTILINE)
    )
    page = (ROOT / "docs" / "serving.md").read_text()
    table = page.partition("\n## Options\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(--[a-z-]+)", table, re.MULTILINE)) == known
    assert len(known) > 20 and EngineConfig.__dataclass_fields__


@pytest.mark.slow
def test_the_recipe_of_openais_client(demo_models: Path) -> None:
    import os

    from srt.test.live_server import live_server

    page = (ROOT / "docs" / "serving.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[:1]
    model = demo_models / "SmolLM2-135M-Instruct-FP8"
    with live_server(model) as server:
        result = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"SRT_URL": server.url},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout and "tokens" in result.stdout
