"""The recipes for Kubernetes, held against the schemas of what they are for."""

import json
import subprocess
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

RECIPES = Path(__file__).parents[2] / "recipes"
SCHEMA = Path(__file__).parents[1] / "data" / "pytorchjob-v1.json"
# The newest that the package has.
KUBERNETES = kubernetes_validate.latest_version()


def documents(name: str) -> list[dict]:
    return list(yaml.safe_load_all((RECIPES / name).read_text()))


def pods(document: dict) -> list[dict]:
    """The pod templates of a Job or of a PyTorchJob."""
    spec = document["spec"]
    if "pytorchReplicaSpecs" in spec:
        return [replica["template"] for replica in spec["pytorchReplicaSpecs"].values()]
    return [spec["template"]]


def test_the_preflight_is_a_valid_job_behind_a_headless_service():
    service, job = documents("k8s-preflight-job.yaml")
    for document in (service, job):
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    (pod,) = pods(job)
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    master = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert {"name": "MASTER_ADDR", "value": master} in pod["spec"]["containers"][0]["env"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2


@pytest.mark.parametrize("conditions", ["FailureTarget Failed", "SuccessCriteriaMet Complete"])
def test_whoever_waits_for_the_preflight_sees_its_end_and_its_log(tmp_path, conditions):
    """The commands of its first lines, with a kubectl that says what a Job's status has (Job API, conditions)."""
    lines = (RECIPES / "k8s-preflight-job.yaml").read_text().splitlines()
    told = [line.removeprefix("#   ") for line in lines if line.startswith("#   ")]
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(f'#!/bin/sh\n[ "$1" = get ] && echo "{conditions}" || echo "$*" >>{tmp_path}/did\n')
    kubectl.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", "\n".join(told)], env=environ, capture_output=True, text=True, timeout=20)
    assert (done.stdout, done.stderr) == (f"{conditions.split()[1]}\n", "")
    assert [line.split()[0] for line in (tmp_path / "did").read_text().splitlines()] == ["apply", "logs", "delete"]


def test_what_is_wrong_is_refused():
    _, job = documents("k8s-preflight-job.yaml")
    job["spec"]["completionsMode"] = job["spec"].pop("completionMode")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, KUBERNETES, strict=True)


def test_the_pytorchjob_is_valid_and_each_pod_of_it():
    (job,) = documents("pytorchjob.yaml")
    check(job)
    for template in pods(job):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "train"}, "spec": template["spec"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)
        assert [container["name"] for container in template["spec"]["containers"]] == ["pytorch"]


@pytest.mark.parametrize(
    "change", [{"nprocPerNode": 8}, {"pytorchReplicaSpecs": {"Master": {"replicas": "1"}}}, {"np": "8"}]
)
def test_a_wrong_pytorchjob_is_refused(change: dict):
    (job,) = documents("pytorchjob.yaml")
    job["spec"].update(change)
    with pytest.raises(jsonschema.ValidationError):
        check(job)


def check(job: dict) -> None:
    """Against the resource's own schema; its `source` says where that is from."""
    jsonschema.validate(job, json.loads(SCHEMA.read_text())["schema"])
