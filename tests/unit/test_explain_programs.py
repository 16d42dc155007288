"""Logs of schedulers, launchers, containers and kernels: the cause comes first, and healthy lines have none."""

import pytest

from ddpdiag.explain.card import Role
from ddpdiag.explain.matcher import Explanation, explain_log

BLAMES = (Role.CAUSE, Role.FAILURE, Role.HINT)

# Put together from public threads; each begins with the card that must come first.
LOGS = {
    "slurm-oom": """
slurmstepd: error: Detected 1 oom-kill event(s) in StepId=4711.0 cgroup. Some of your processes may have been killed
1: [rank1]: RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.1.2.3]:39421
srun: error: gpu-17: task 2: Out Of Memory
srun: launch/slurm: _step_signal: Terminating StepId=4711.0
slurmstepd: error: *** STEP 4711.0 ON gpu-17 CANCELLED AT 2025-05-01T12:00:00 ***
srun: error: gpu-17: tasks 0-1,3: Terminated
""",
    "rank-variable-missing": """
0: KeyError: 'MASTER_ADDR'
srun: error: n1: task 0: Exited with exit code 1
srun: Terminating job step 4711.0
srun: error: n1: tasks 1-3: Killed
""",
    "time-limit": """
Epoch 3 step 1200 loss 1.9
slurmstepd: error: *** JOB 4711 ON n0 CANCELLED AT 2025-05-01T12:00:00 DUE TO TIME LIMIT ***
W0501 torch/distributed/elastic/agent/server/api.py:704] Received 15 death signal, shutting down workers
torch.distributed.elastic.multiprocessing.api.SignalException: Process 4711 got signal: 15
srun: error: n1: task 1: Terminated
""",
    "xid-memory": """
mlx5_core 0000:5e:00.0 ens1f0np0: Link up
NVRM: Xid (PCI:0000:3b:00): 63, pid='<unknown>', name=<unknown>, Row Remapper: New row marked for remapping
NVRM: Xid (PCI:0000:3b:00): 48, pid='<unknown>', name=<unknown>, An uncorrectable double bit error (DBE)
NVRM: Xid (PCI:0000:3b:00): 45, pid=1234, name=python, Ch 00000018
NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)
""",
    "deepspeed-sigkill": """
[2023-04-14 13:11:27,879] [INFO] [launch.py:428:sigkill_handler] Killing subprocess 13266
[2023-04-14 13:11:27,885] [ERROR] [launch.py:434:sigkill_handler] ['python3', 'main.py'] exits with return code = -9
""",
    "extension-not-built": """
[rank1]: ImportError: /home/u/.cache/torch_extensions/py310_cu121/cpu_adam/cpu_adam.so: cannot open shared object file
AttributeError: 'DeepSpeedCPUAdam' object has no attribute 'ds_opt_adam'
subprocess.CalledProcessError: Command '['/venv/bin/python', 'train.py']' returned non-zero exit status 1.
""",
    "file-missing": """
[rank3]: FileNotFoundError: Caught FileNotFoundError in DataLoader worker process 0.
[rank3]: FileNotFoundError: [Errno 2] No such file or directory: '/data/train/img_12.jpg'
E0501 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: 1) local_rank: 3 (pid: 21) of binary: p
""",
    "pod-oom": """
  Warning  FailedScheduling  10m    default-scheduler  0/4 nodes are available: 4 Insufficient nvidia.com/gpu.
  Normal   Scheduled         9m     default-scheduler  Successfully assigned ns/job-worker-0 to gpu-1
      Reason:       OOMKilled
      Exit Code:    137
""",
    "enroot-refused": """
slurmstepd: error: pyxis: failed to import docker image
slurmstepd: error: pyxis:     [ERROR] URL https://registry-1.docker.io/v2/x returned error code: 401 Unauthorized
slurmstepd: error: pyxis: couldn't start container
slurmstepd: error: spank: required plugin spank_pyxis.so: task_init() failed with rc=-1
srun: error: compute-0: task 0: Exited with exit code 1
""",
    "ray-oom": """
(raylet) node_manager.cc:3040: 1 Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers crashed
(raylet) A worker died or was killed while executing a task by an unexpected system error.
ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.
""",
    "cuda-memory-others": """
W0501 The node 'n1_4711_0' has failed to send a keep-alive heartbeat to the rendezvous '123' due to an error of type X
[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a capacity of 23.68 GiB \
of which 11 MiB is free. Process 2153 has 11.50 GiB memory in use. Including non-PyTorch memory, this process has 12 GiB
torch.distributed.elastic.rendezvous.api.RendezvousClosedError
""",
    "mpi-signal": """
[n0:12] mca_base_component_repository_open: unable to open mca_btl_openib: librdmacm.so.1: cannot open shared object
prterun noticed that process rank 3 with PID 4711 on node n1 exited on
signal 9 (Killed).
""",
}

# Lines of jobs, hosts and pods that are well.
INNOCENT = (
    "dso_loader.cc:64] Could not load dynamic library 'libcudart.so.11.0'; dlerror: libcudart.so.11.0: cannot open "
    "shared object file: No such file or directory",
    "io/image.py:13: UserWarning: Failed to load image Python extension: 'image.so: undefined symbol: _ZN3c1017Reg'",
    "[n1:4711] mca_base_component_repository_open: unable to open mca_btl_openib: librdmacm.so.1: cannot open shared "
    "object file: No such file or directory (ignored)",
    "No CUDA runtime is found, using CUDA_HOME='/usr/local/cuda'",
    "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768",
    "Epoch 137: val_loss 0.137 nan_count 0 best nan",
    "PyTorchJob=pytorch-simple, ReplicaType=Worker expected=1, running=1, succeeded=0, failed=0, Replicas=1",
    "imagePullPolicy: Always",
    "Process 4711 exited with code 0",
    "mlx5_core 0000:5e:00.0 ens1f0np0: Link up",
    "mlx5_core 0000:5e:00.0: Port module event: module 0, Cable plugged",
    "mlx5_core 0000:5e:00.0: mlx5_pcie_event:296:(pid 12): Detected insufficient power on the PCIe slot (27W).",
    "EDAC MC0: 1 CE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0 (channel:1 slot:0 page:0x12345 offset:0x0)",
    "NVRM: Xid (PCI:0000:04:00): 145, RLW_CTRL Nonfatal XC0 i0 Link 00 (0x00000003 0x80000000)",
    "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  595.71.05  Release Build",
    "srun: job 4711 queued and waiting for resources",
    "Killed old run directories: 3",
    "Slurm memory limit 64GB",
)


def explained(log: str) -> Explanation:
    return explain_log([log.encode()], "job.log")


@pytest.mark.parametrize("first", LOGS)
def test_the_cause_comes_first(first: str) -> None:
    assert explained(LOGS[first]).sightings[0].card.name == first


@pytest.mark.parametrize("line", INNOCENT)
def test_a_healthy_line_blames_none(line: str) -> None:
    assert [one.card.name for one in explained(line).sightings if one.card.role in BLAMES] == []


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("slurmstepd: error: Exceeded job memory limit at some point.", "slurm-memory-limit"),
        ("srun: Job step creation temporarily disabled, retrying (Requested nodes are busy)", "step-waits"),
        ("srun: error: n1: task 3: Exited with exit code 139", "srun-exit-signal"),
        ("srun: error: n1: task 3: Exited with exit code 143", "srun-exit"),
        ("NVRM: Xid (PCI:0018:01:00): 149, pid=7, name=x, channel 1, caused by previous Xid 48", "xid-consequence"),
        ("NVRM: Xid (0000:01:00): 31, Ch 0000000b, engmask 00000120, intr 10000000", "xid-program"),
        ("ORTE has lost communication with a remote daemon.", "mpi-daemon-lost"),
        ("train exited with code 137", "pod-exit-137"),
        ("deepspeed.ops.op_builder.builder.MissingCUDAException: CUDA_HOME does not exist", "no-cuda-toolkit"),
        ("Killed", "shell-killed"),
        ("train.py: error: unrecognized arguments: --local-rank=0", "local-rank-option"),
        ("train.py: error: argument --epochs: invalid int value: 'x'", "arguments"),
        ("OSError: [Errno 12] Cannot allocate memory", "host-memory-errno"),
        ("subprocess.CalledProcessError: Command '['ninja', '-v']' returned non-zero exit status 1.", "command-failed"),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/usr/local/cuda/bin/nvcc'", "no-nvcc"),
    ],
)
def test_versions_and_relatives_of_a_text(line: str, name: str) -> None:
    assert [one.card.name for one in explained(line).sightings] == [name]


def test_a_task_that_srun_killed_after_another_crashed_is_an_echo() -> None:
    killed = "srun: error: n1: tasks 0-2: Killed\n"
    assert explained(killed).sightings[0].card.role is Role.FAILURE
    found = explained("srun: error: n1: task 3: Segmentation fault (core dumped)\n" + killed)
    assert [(one.card.name, one.card.role) for one in found.sightings] == [
        ("srun-signal", Role.FAILURE),
        ("srun-killed", Role.ECHO),
    ]


def test_the_kernel_names_its_host() -> None:
    line = "Oct 03 18:00:02 gpu-07 kernel: NVRM: Xid (PCI:0000:01:00): 79, pid=7, GPU has fallen off the bus."
    assert explained(line).sightings[0].hosts == ("gpu-07",)
