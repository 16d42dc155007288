"""The recipes for Kubernetes, held against the schemas of what they are for."""

import json
import subprocess
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from ddpdiag.cli.exit_codes import Preflight

RECIPES = Path(__file__).parents[2] / "recipes"
# By kind; the `source` of each says where it is from.
SCHEMAS = json.loads((Path(__file__).parents[1] / "data" / "kubernetes-schemas.json").read_text())
# The newest that the package has.
KUBERNETES = kubernetes_validate.latest_version()


def documents(name: str) -> list[dict]:
    return list(yaml.safe_load_all((RECIPES / name).read_text()))


def replicated_jobs(document: dict) -> list[dict]:
    """Those of a JobSet, or of the JobSet that a ClusterTrainingRuntime is the template of."""
    jobset = document["spec"].get("template", document)
    return jobset["spec"]["replicatedJobs"]


def check(document: dict) -> None:
    """Against the schema of its kind, and each Job of it against that of Kubernetes."""
    jsonschema.validate(document, SCHEMAS[document["kind"]]["schema"])
    for each in replicated_jobs(document):
        job = {"apiVersion": "batch/v1", "kind": "Job", **each["template"], "metadata": {"name": each["name"]}}
        kubernetes_validate.validate(job, KUBERNETES, strict=True)


def test_the_preflight_is_a_valid_job_behind_a_headless_service():
    service, job = documents("k8s-preflight-job.yaml")
    for document in (service, job):
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    pod = job["spec"]["template"]
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


SETS = ("kubeflow-runtime.yaml", "jobset.yaml")


@pytest.mark.parametrize("name", SETS)
def test_a_set_of_jobs_is_valid(name: str):
    check(*documents(name))


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        (SETS[0], "containerNames:", "containers:"),
        (SETS[0], "publishNotReadyAddresses:", "publishNotReady:"),
        (SETS[0], "values: [30]", 'values: ["30"]'),
        (SETS[1], "status: Complete", "status: Completed"),
        (SETS[1], "medium: Memory", "media: Memory"),
    ],
)
def test_a_mistake_in_a_set_of_jobs_is_refused(name: str, right: str, wrong: str):
    text = (RECIPES / name).read_text()
    assert right in text
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        check(yaml.safe_load(text.replace(right, wrong)))


@pytest.mark.parametrize("name", SETS)
def test_a_set_of_jobs_ends_at_once_for_the_fatal_code_and_no_other(name: str):
    """Its rule names the container of the check, and Kubernetes takes such a rule only where pods never restart."""
    (document,) = documents(name)
    job = replicated_jobs(document)[0]["template"]["spec"]
    pod = job["template"]["spec"]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [Preflight.FATAL]
    assert rule["onExitCodes"]["containerName"] == pod.get("initContainers", pod["containers"])[0]["name"]
    assert (pod["restartPolicy"], job["backoffLimit"]) == ("Never", 0)


def test_trainer_passes_its_variables_to_the_check():
    (runtime,) = documents("kubeflow-runtime.yaml")
    (target,) = runtime["spec"]["mlPolicy"]["torch"]["envInjection"]["targets"]
    (job,) = replicated_jobs(runtime)
    pod = job["template"]["spec"]["template"]["spec"]
    assert target == {"jobName": job["name"], "containerNames": [pod["initContainers"][0]["name"]]}
    assert [container["name"] for container in pod["containers"]] == ["node"]


def test_the_chart_of_nvsentinel_makes_a_valid_container_of_the_values():
    """templates/configmap.yaml of NVSentinel 0aedaf36 joins repository and tag; the rest is Kubernetes' own."""
    (values,) = documents("nvsentinel-values.yaml")
    (container,) = values["preflight"]["initContainers"]
    container["image"] = "{repository}:{tag}".format(**container["image"])
    spec = {"initContainers": [container], "containers": [{"name": "train", "image": "train"}]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "train"}, "spec": spec}
    kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def test_node_problem_detector_takes_its_configuration():
    """The schema, then what its Validate() asks for; NVSentinel's policy is about the same condition."""
    config = json.loads((RECIPES / "node-problem-detector.json").read_text())
    jsonschema.validate(config, SCHEMAS["CustomPluginConfig"]["schema"])
    (rule,) = config["rules"]
    assert rule["condition"] in {condition["type"] for condition in config["conditions"]}
    limits = [float(text.removesuffix("s")) for text in (rule["timeout"], config["pluginConfig"]["timeout"])]
    budget = float(rule["args"][-1].split("--budget ")[1].split()[0])
    assert budget < limits[0] <= limits[1]
    (policy,) = documents("nvsentinel-values.yaml")[0]["kubernetes-object-monitor"]["policies"]
    assert f'"{rule["condition"]}"' in policy["predicate"]["expression"]
