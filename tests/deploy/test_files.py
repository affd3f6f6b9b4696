"""Files for systemd, Kubernetes and proxies: they are taken as they are, and names flags and paths that there
are.
"""

import argparse
import importlib
import re
import shutil
import ssl
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from benchmarks.processes import free_port
from engine.config import EngineConfig
from engine.flags import Parser, load
from server.cli import serve as serve_command
from server.deploy_ray.config import LLMServingArgs
from server.http.api_keys import Entry, add_to_file, hashed
from server.settings import ServerConfig
from tests.support.fake_engine import FakeEngine
from tests.support.live_server import Live

DEPLOY = Path(__file__).resolve().parents[2] / "configs" / "deploy"
HOST = "llm.example.org"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys.yaml"
    add_to_file(file, "alice", Entry(hashed("sesame")))
    return file


def parsed(words: list[str]) -> tuple[EngineConfig, ServerConfig]:
    """The settings that `quire serve` makes of its words."""
    parser = Parser()
    serve_command.add_parser(parser.add_subparsers())
    given = vars(parser.parse_args(["serve", *words]))
    models = given.pop("model_arguments")
    given["model"] = models[0] if models else given.get("model", ...)
    config, settings = load(
        argparse.Namespace(**{k: v for k, v in given.items() if v is not ...}), EngineConfig, ServerConfig
    )
    return config, settings


def test_the_systemd_unit_starts_a_server_and_lets_it_finish(keys: Path, tmp_path: Path) -> None:
    unit = (DEPLOY / "quire.service").read_text()
    config = tmp_path / "serve.yaml"
    config.write_text((DEPLOY / "serve.yaml").read_text().replace("/etc/quire/keys.yaml", str(keys)))
    command = re.findall(r"^ExecStart=(.+)$", unit, re.MULTILINE)[0].replace("/etc/quire/serve.yaml", str(config))
    engine, settings = parsed(command.split()[2:])
    assert engine.model
    assert settings.host == "127.0.0.1"
    assert settings.read_keys() is not None
    assert int(re.findall(r"TimeoutStopSec=(\d+)", unit)[0]) > settings.shutdown_timeout > 0


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "quire.service"
    unit.write_text((DEPLOY / "quire.service").read_text().replace("/opt/quire/bin/quire", shutil.which("true") or ""))
    checked = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert checked.returncode == 0
    assert "quire.service" not in checked.stderr, "no warning of it"


def test_kubernetes_asks_for_what_there_is(keys: Path, serve: Callable[..., Live]) -> None:
    deployment, claim, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    words = [word.replace("/etc/quire/keys.yaml", str(keys)) for word in container["args"]]
    _, settings = parsed(words)
    assert pod["terminationGracePeriodSeconds"] > settings.shutdown_timeout > 0
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]
    assert claim["metadata"]["name"] in [
        volume["persistentVolumeClaim"]["claimName"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume
    ]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert container["resources"].keys() == {"requests", "limits"}
    (token,) = [each["valueFrom"]["secretKeyRef"] for each in container["env"] if each["name"] == "HF_TOKEN"]
    assert token["optional"], "open models need none"
    live = serve(FakeEngine(), ServerConfig(api_key_file=str(keys)))
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert live.http.get(container[probe]["httpGet"]["path"]).status_code == 200, "without a key"


@pytest.fixture
def proxy(keys: Path, serve: Callable[..., Live], tmp_path: Path) -> Iterator[tuple[Live, httpx.Client]]:
    """A server with keys, and a client that reaches it through nginx with the configuration that is shipped."""
    if not (shutil.which("nginx") and shutil.which("openssl")):
        pytest.skip("needs nginx and openssl")
    live = serve(FakeEngine(), ServerConfig(api_key_file=str(keys)))
    port, certificate, key = free_port(), tmp_path / "cert.pem", tmp_path / "key.pem"
    words = f"req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {certificate} -subj /CN={HOST}".split()
    command = ["openssl", *words, "-addext", f"subjectAltName=DNS:{HOST}"]
    subprocess.run(command, check=True, capture_output=True)
    site = (DEPLOY / "nginx.conf").read_text()
    for old, new in (
        ("127.0.0.1:8000", f"127.0.0.1:{live.port}"),
        ("listen 443", f"listen 127.0.0.1:{port}"),
        (f"/etc/letsencrypt/live/{HOST}/fullchain.pem", str(certificate)),
        (f"/etc/letsencrypt/live/{HOST}/privkey.pem", str(key)),
    ):
        assert old in site
        site = site.replace(old, new)
    folders = "".join(
        f"{name}_temp_path {tmp_path / name};\n" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    log = tmp_path / "error.log"
    main = tmp_path / "nginx.conf"
    main.write_text(f"pid {tmp_path}/pid;\ndaemon off;\nevents {{}}\nhttp {{\naccess_log off;\n{folders}{site}\n}}\n")
    process = subprocess.Popen(["nginx", "-c", main, "-e", log])
    trusting = ssl.create_default_context(cafile=str(certificate))
    retrying = httpx.HTTPTransport(verify=trusting, retries=8)  # until it listens
    try:
        # It is reached at its address, and named as its certificate and Quire's clients name it.
        with httpx.Client(base_url=f"https://127.0.0.1:{port}", transport=retrying, timeout=60) as client:
            client.headers["Host"] = HOST
            yield live, client
    finally:
        process.terminate()
        process.wait(60)


def post(client: httpx.Client, **body: Any) -> Any:
    extensions = {"sni_hostname": HOST}
    headers = {"Authorization": "Bearer sesame"}
    return client.stream(
        "POST", "/v1/completions", json={"prompt": "Hi", **body}, headers=headers, extensions=extensions
    )


@pytest.mark.heavy
def test_nginx_passes_each_event_on_at_once(proxy: tuple[Live, httpx.Client]) -> None:
    live, client = proxy
    live.engine.answer, live.engine.holds_after = "x" * 400, 3
    with post(client, stream=True, max_tokens=400, ignore_eos=True) as response:
        assert response.status_code == 200
        chunks = response.iter_raw()
        first = next(chunks)
        assert live.engine.active, "the answer has begun, and is not complete"
        assert len(first) < 10_000
        live.engine.holds_after = None
        assert b"".join(chunks).endswith(b"data: [DONE]\n\n")
    with post(client, max_tokens=2) as response:
        assert response.status_code == 200, "whole"


@pytest.mark.heavy
def test_nginx_ends_requests_whose_clients_have_gone(proxy: tuple[Live, httpx.Client]) -> None:
    live, client = proxy
    live.engine.holds_after = 3
    with post(client, stream=True, max_tokens=400, ignore_eos=True) as response:
        next(response.iter_raw())
    live.wait_idle()
    (length,) = live.engine.ended.values()
    assert length < 400


@pytest.mark.heavy
def test_nginx_keeps_metrics_and_keys(proxy: tuple[Live, httpx.Client]) -> None:
    _, client = proxy
    extensions = {"sni_hostname": HOST}
    assert client.get("/metrics", extensions=extensions).status_code == 403
    assert client.get("/v1/models", extensions=extensions).status_code == 401
    assert client.get("/readyz", extensions=extensions).status_code == 200
    docs = client.get("/docs", extensions=extensions, auth=("", "sesame"))
    assert docs.status_code == 200
    assert f"https://{HOST}/v1/chat/completions" in docs.text, "commands that work from outside"


def manifests() -> list[dict[str, Any]]:
    """All Kubernetes objects that are shipped, and of each pod of a RayService, which is not Kubernetes' own, a Pod."""
    (ray,) = yaml.safe_load_all((DEPLOY / "ray" / "rayservice.yaml").read_text())
    cluster = ray["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    pods = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"ray-{index}"}, **group["template"]}
        for index, group in enumerate(groups)
    ]
    return [*yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()), *pods]


@pytest.mark.parametrize(
    "manifest", manifests(), ids=lambda manifest: f"{manifest['kind']}-{manifest['metadata']['name']}"
)
def test_kubernetes_takes_the_manifests(manifest: dict[str, Any]) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    validate.validate(manifest, "1.31", strict=True)
    misspelt = {**manifest, "spec": {**manifest["spec"], "replica": 1}}
    with pytest.raises(validate.ValidationError, match="replica"):
        validate.validate(misspelt, "1.31", strict=True)


def test_ray_serve_is_given_what_there_is(keys: Path) -> None:
    text = (DEPLOY / "ray" / "serve.yaml").read_text().replace("/etc/quire/keys.yaml", str(keys))
    (application,) = yaml.safe_load(text)["applications"]
    module, _, name = application["import_path"].partition(":")
    assert name in importlib.import_module(module).__all__
    small, large = LLMServingArgs.model_validate(application["args"]).llm_configs
    assert small.deployment_options()["autoscaling_config"]["max_replicas"] == 4
    assert large.deployment_options()["ray_actor_options"] == {"num_gpus": 2}
    assert small.server_config().read_keys() is not None


def test_kuberay_is_given_what_there_is() -> None:
    (manifest,) = yaml.safe_load_all((DEPLOY / "ray" / "rayservice.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayService")
    spec, cluster = manifest["spec"], manifest["spec"]["rayClusterConfig"]
    serve_config = yaml.safe_load(spec["serveConfigV2"])
    assert serve_config == yaml.safe_load((DEPLOY / "ray" / "serve.yaml").read_text())
    pinned = re.findall(r"^ray==(.+)$", (DEPLOY.parents[1] / "constraints.txt").read_text(), re.MULTILINE)
    assert [cluster["rayVersion"]] == pinned
    (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    assert serve_config["http_options"]["port"] in [port["containerPort"] for port in head["ports"]]
    for group in cluster["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        (worker,) = pod["containers"]
        assert {mount["name"] for mount in worker["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert worker["resources"]["limits"]["nvidia.com/gpu"] == 2, "what the larger model's replica asks for"
        assert pod["terminationGracePeriodSeconds"] > 300
