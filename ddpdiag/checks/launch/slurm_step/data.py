"""A job step, put together from the variables that Slurm gave to one of its tasks."""

import re
from collections.abc import Mapping

from msgspec import Struct

from ddpdiag.probes.host.environment import job_and_step

_WAYS = {"block": "numbered host by host", "cyclic": "numbered in turn over the hosts"}


class StepView(Struct, frozen=True, kw_only=True):
    """A step. `name` is "12.0"; `agents` is how many torchruns met, where one started this process.

    `step_gpus` are the GPUs of the host that the step has, by their number there. What Slurm does not tell is None.
    """

    name: str
    tasks: int
    nodes: int
    job_nodes: int | None
    nodelist: str
    distribution: str | None
    cpus_per_task: int | None
    gpus_on_node: int | None
    gpus_per_task: str | None
    gpu_bind: str | None
    step_gpus: str | None
    cuda_visible_devices: str | None
    agents: int | None

    @property
    def renumbered(self) -> bool:
        """Does a device cgroup hide the host's other GPUs, so that CUDA counts those of the step from 0?"""
        return None not in (self.step_gpus, self.cuda_visible_devices) and self.step_gpus != self.cuda_visible_devices

    @property
    def order(self) -> str:
        """How tasks are numbered, where Slurm told and it makes a difference."""
        way = (self.distribution or "").partition(":")[0].partition(",")[0]
        return _WAYS.get(way, "") if 1 < self.nodes < self.tasks else ""


def step_of(variables: Mapping[str, str]) -> StepView | None:
    """The step of these variables; None outside of a step, or where its size is not told."""
    name = job_and_step(variables)
    tasks, nodes = _number(variables, "SLURM_STEP_NUM_TASKS"), _number(variables, "SLURM_STEP_NUM_NODES")
    if "." not in name or not tasks or not nodes:
        return None
    return StepView(
        name=name,
        tasks=tasks,
        nodes=nodes,
        job_nodes=_number(variables, "SLURM_JOB_NUM_NODES"),
        nodelist=variables.get("SLURM_STEP_NODELIST", ""),
        distribution=variables.get("SLURM_DISTRIBUTION"),
        cpus_per_task=_number(variables, "SLURM_CPUS_PER_TASK"),
        gpus_on_node=_number(variables, "SLURM_GPUS_ON_NODE"),
        gpus_per_task=variables.get("SLURM_GPUS_PER_TASK") or _gres(variables.get("SLURM_TRES_PER_TASK", "")),
        gpu_bind=variables.get("SLURM_GPU_BIND"),
        step_gpus=variables.get("SLURM_STEP_GPUS"),
        cuda_visible_devices=variables.get("CUDA_VISIBLE_DEVICES"),
        agents=_number(variables, "GROUP_WORLD_SIZE"),
    )


def _number(variables: Mapping[str, str], name: str) -> int | None:
    text = variables.get(name, "")
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else None


def _gres(tres: str) -> str | None:
    """The GPUs in SLURM_TRES_PER_TASK ("cpu:2,gres/gpu:1" or "cpu=2,gres/gpu=1"), which Slurm 23.11 sets instead."""
    found = re.search(r"gres[/:]gpu[:=]([A-Za-z0-9_.:=-]+)", tres)
    return found[1] if found else None
