# SPDX-License-Identifier: Apache-2.0
"""The manifests in ``examples/kubernetes`` against Kubernetes' own schemas, and against each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

from vllm_omni_patch.patches.ec_connector.settings import SETTINGS

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "kubernetes"
if not FOLDER.is_dir():
    pytest.skip("the examples are not here", allow_module_level=True)
VALUES = FOLDER / "production_stack_values.yaml"
MANIFESTS = sorted(set(FOLDER.glob("*.yaml")) - {VALUES})


def objects(path: Path, kind: str = "") -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(path.read_text()) if not kind or one["kind"] == kind]


def pods(path: Path) -> list[tuple[dict[str, str], dict[str, Any]]]:
    """(labels, pod) of each Deployment."""
    templates = [one["spec"]["template"] for one in objects(path, "Deployment")]
    return [(template["metadata"]["labels"], template["spec"]) for template in templates]


def servers() -> list[tuple[str, dict[str, str], list[str]]]:
    """(where, environment, arguments) of every vLLM server, the chart's included."""
    found = []
    for path in MANIFESTS:
        for _, pod in pods(path):
            for container in pod["containers"]:
                if "--ec-transfer-config" in container.get("args", ()):
                    environment = {one["name"]: one["value"] for one in container["env"]}
                    found.append((path.name, environment, container["args"]))
    for model in yaml.safe_load(VALUES.read_text())["servingEngineSpec"]["modelSpec"]:
        environment = {one["name"]: one["value"] for one in model["env"]}
        found.append((VALUES.name, environment, model["vllmConfig"]["extraArgs"]))
    return found


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_every_object_is_valid(path: Path) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    for one in objects(path):
        validator.validate(one, validator.latest_version(), strict=True)
    broken = objects(path, "Deployment")[0]
    broken["spec"]["template"]["spec"]["containers"][0]["readOnlyRoot"] = True
    with pytest.raises(validator.ValidationError):
        validator.validate(broken, validator.latest_version(), strict=True)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_names_meet(path: Path) -> None:
    """Mounts have volumes, probes have ports, claims and selectors have what they name."""
    everything = [one for other in MANIFESTS for one in objects(other)]
    labels = [labels for labels, _ in pods(path)]
    claims = {one["metadata"]["name"] for one in everything if one["kind"] == "PersistentVolumeClaim"}
    for one in objects(path, "Deployment"):
        assert one["spec"]["selector"]["matchLabels"] == one["spec"]["template"]["metadata"]["labels"]
    for one in objects(path, "Service"):
        assert one["spec"]["selector"] in labels
        # Kubernetes puts NAME_PORT into every container; vLLM and LMCache read such names.
        assert not one["metadata"]["name"].startswith(("vllm", "lmcache"))
    for _, pod in pods(path):
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert pod["securityContext"]["runAsNonRoot"]
        for volume in volumes.values():
            assert volume.get("persistentVolumeClaim", {}).get("claimName") in {None, *claims}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
            ports = {port["name"] for port in container["ports"]}
            probes = [container[name] for name in container if name.endswith("Probe")]
            assert probes and all((p.get("httpGet") or p["tcpSocket"])["port"] in ports for p in probes)


def test_servers_have_the_flag_a_connector_and_known_settings() -> None:
    known = {f"LMCACHE_EC_{name.upper()}" for name in SETTINGS}
    roles = []
    for where, environment, arguments in servers():
        config = json.loads(arguments[arguments.index("--ec-transfer-config") + 1])
        assert config["ec_connector"] == "LMCacheECConnector"
        roles.append((where, config["ec_role"]))
        assert environment.pop("VLLM_OMNI_PATCH") == "1"
        assert set(environment) <= known, where
        url = environment.get("LMCACHE_EC_REMOTE_URL")
        if url is not None:
            (service,) = objects(FOLDER / "redis.yaml", "Service")
            assert url == f"redis://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    assert sorted(roles) == [
        ("encoder_servers.yaml", "ec_consumer"),
        ("encoder_servers.yaml", "ec_producer"),
        ("many_servers.yaml", "ec_both"),
        ("one_server.yaml", "ec_both"),
        ("production_stack_values.yaml", "ec_both"),
    ]


def test_only_servers_may_reach_redis() -> None:
    (policy,) = objects(FOLDER / "redis.yaml", "NetworkPolicy")
    (peer,) = policy["spec"]["ingress"][0]["from"]
    (allowed,) = peer["podSelector"]["matchExpressions"]
    names = {"many_servers.yaml", "encoder_servers.yaml"}
    clients = {labels["app"] for name in names for labels, _ in pods(FOLDER / name)} - {"epd-proxy"}
    assert set(allowed["values"]) == clients
    assert yaml.safe_load(VALUES.read_text())["servingEngineSpec"]["labels"]["app"] in clients
    assert policy["spec"]["podSelector"]["matchLabels"] == pods(FOLDER / "redis.yaml")[0][0]
