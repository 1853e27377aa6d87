"""The Kubernetes examples: valid by Kubernetes' own schemas, and they say what our services understand."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from diffusion_service.cli import FLAGS as DIFFUSION_FLAGS
from encoder_service.cli import FLAGS as ENCODER_FLAGS
from shared_schema.deploy.load import OwnDevices, load_deployment
from tests.docker.files import DOCKER

FILES = sorted((DOCKER / "kubernetes").glob("*.yaml"))
RULE = "PrometheusRule"
VERSIONS = ("1.30", kubernetes_validate.latest_version())
READINESS = {"/livez", "/readyz", "/readyz/api"}
PROBES = {"startupProbe": {"/livez"}, "livenessProbe": {"/livez"}, "readinessProbe": READINESS}


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document]


def resources() -> list[tuple[str, dict[str, Any]]]:
    """All but the one that Kubernetes has no schema of, which is held against what promtool checks."""
    every = ((path, document) for path in FILES for document in documents(path) if document["kind"] != RULE)
    return [(f"{path.stem} {document['kind']} {document['metadata']['name']}", document) for path, document in every]


def pods(path: Path) -> Iterator[dict[str, Any]]:
    for document in documents(path):
        if document["kind"] in ("Deployment", "StatefulSet", "Job"):
            yield {**document["spec"]["template"]["spec"], "claims": document["spec"].get("volumeClaimTemplates", [])}


def containers(path: Path) -> Iterator[dict[str, Any]]:
    for pod in pods(path):
        yield from pod["containers"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("name", "resource"), resources(), ids=[name for name, _ in resources()])
def test_a_resource_is_valid(name: str, resource: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(resource, version, strict=True)


def test_the_rule_is_what_prometheus_itself_gets() -> None:
    (rule,) = documents(DOCKER / "kubernetes" / "prometheus-rule.yaml")
    alerts = yaml.safe_load((DOCKER / "monitoring" / "alerts.yml").read_text(encoding="utf-8"))
    assert (rule["apiVersion"], rule["kind"]) == ("monitoring.coreos.com/v1", RULE)
    assert rule["spec"] == alerts


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_containers_are_closed_and_their_mounts_are_there(file: Path) -> None:
    for pod in pods(file):
        assert (pod["securityContext"]["runAsUser"], pod["securityContext"]["runAsNonRoot"]) == (10001, True)
        volumes = {volume["name"] for volume in pod["volumes"]} | {claim["metadata"]["name"] for claim in pod["claims"]}
        used = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert used == volumes
        for container in pod["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_variables_are_our_flags_and_probes_our_routes(file: Path) -> None:
    known = {flag.variable for flag in (*ENCODER_FLAGS, *DIFFUSION_FLAGS)}
    for container in containers(file):
        names = {variable["name"] for variable in container["env"] if variable["name"].startswith("H3_")}
        assert names <= known
        ports = {port["name"] for port in container.get("ports", [])}
        for probe, paths in PROBES.items():
            if probe in container:
                asked = container[probe]["httpGet"]
                assert (asked["path"] in paths, asked["port"] in ports) == (True, True)


def test_traffic_goes_where_the_api_works_and_encodings_where_ranks_do() -> None:
    by_name = {container["name"]: container for container in containers(DOCKER / "kubernetes" / "nixl.yaml")}
    assert by_name["diffusion"]["readinessProbe"]["httpGet"]["path"] == "/readyz/api"
    assert by_name["encoder"]["readinessProbe"]["httpGet"]["path"] == "/readyz"


@pytest.mark.parametrize("name", ["one-pod", "nixl"])
def test_the_deploy_file_resolves_with_the_pods_gpus(name: str, tmp_path: Path) -> None:
    file = DOCKER / "kubernetes" / f"{name}.yaml"
    (config,) = (document for document in documents(file) if document["kind"] == "ConfigMap")
    deploy = tmp_path / "deploy.yaml"
    deploy.write_text(config["data"]["deploy.yaml"])
    for container in containers(file):
        devices = next(variable["value"] for variable in container["env"] if variable["name"] == "H3_DEVICES")
        stage = 0 if container["name"] == "encoder" else 1
        deployment = load_deployment(str(deploy), devices=OwnDevices(stage, devices))  # type: ignore[arg-type]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == str(deployment.stages[stage].world_size)
        grace = next(pod["terminationGracePeriodSeconds"] for pod in pods(file))
        assert grace > deployment.service.drain_s
