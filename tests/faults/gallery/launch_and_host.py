"""Faults of the launch, of hosts and of GPUs: what is seen before ranks meet (LCH, HST, GPU)."""

from cgroups import limit_memory, limit_tasks
from fault import NOBODY, Blame, Fault, prefix, variable
from launch import Bed, Launcher


def fill_shared_memory(network):
    network[0].mount_tmpfs("/dev/shm", 16 << 20)
    network[0].call("sh", "-c", "cat /dev/zero > /dev/shm/nccl-old 2>/dev/null || true")


def show_gpu(network):
    device = network.folder / "sys/bus/pci/devices/0000:1b:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x030200\n")
    network[1].variables["DDPDIAG_SYSFS"] = str(network.folder / "sys")


FAULTS = {
    "rank_there_twice": Fault(
        about="RANK is exported in the job script, so two processes have rank 1 and none has rank 2 (R8, silent in "
        "torch).",
        expect=("LCH001.duplicate",),
        blame=Blame(ranks={1, 2}),  # 1 is there twice, and 2 is missing
        bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV, on_rank={2: {"RANK": "1"}}),
        options=("--join-timeout", "8"),
    ),
    "local_rank_twice": Fault(
        about="Two ranks of one host have the same LOCAL_RANK, so they would take the same GPU (N5).",
        expect=("LCH001.local-rank",),
        blame=Blame(ranks={2, 3}),
        bed=Bed(ranks=(2, 2), launcher=Launcher.ENV, on_rank={3: {"LOCAL_RANK": "0"}}),
        options=("--stage", "launch,host"),
    ),
    "local_rank_missing": Fault(
        about="RANK and WORLD_SIZE are exported, LOCAL_RANK is not (L1): scripts that read it fail with a KeyError.",
        expect=("LCH001.no-local-rank",),
        blame=Blame(ranks={0, 1, 2, 3}),
        severity="warning",
        exit_code=0,
        bed=Bed(ranks=(2, 2), launcher=Launcher.ENV, on_rank={rank: {"LOCAL_RANK": None} for rank in range(4)}),
        options=("--stage", "launch,host"),
    ),
    "process_counts_differ": Fault(
        about="A host was started with another --nproc-per-node (L9): torchrun takes it without a word.",
        expect=("LCH001.uneven",),
        blame=Blame(hosts={"h2"}),
        severity="warning",
        exit_code=0,
        bed=Bed(ranks=(1, 1, 2)),
        options=("--stage", "launch,collective"),
    ),
    "world_size_differs": Fault(
        about="One rank was started with another WORLD_SIZE (R7): torch waits for a rank that does not exist.",
        expect=("LCH001.world-size",),
        blame=Blame(ranks={2}),
        bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV, on_rank={2: {"WORLD_SIZE": "5"}}),
        options=("--join-timeout", "8"),
    ),
    "debug_level_refused": Fault(
        about="TORCH_DISTRIBUTED_DEBUG has a value on one host that `import torch` refuses (G11).",
        expect=("LCH002.debug-level",),
        blame=Blame(hosts={"h1"}),
        before=variable(1, "TORCH_DISTRIBUTED_DEBUG", "VERBOSE"),
        options=("--stage", "launch,host,rendezvous,collective"),
    ),
    "host_id_set": Fault(
        about="NCCL_HOSTID is left over on one host: NCCL takes neighbours for strangers, and never uses NVLink or "
        "shared memory.",
        expect=("LCH002.host-id",),
        blame=Blame(hosts={"h1"}),
        severity="warning",
        exit_code=0,
        before=variable(1, "NCCL_HOSTID", "old-experiment"),
        bed=Bed(ranks=(1, 1), launcher=Launcher.HAND),
        options=("--stage", "launch,host"),
        deep=False,
    ),
    "variable_differs": Fault(
        about="A start-up file of one host sets an NCCL variable that the others do not have (N22).",
        expect=("LCH002.variable",),
        blame=Blame(hosts={"h2"}),
        severity="warning",
        exit_code=0,
        before=variable(2, "NCCL_ALGO", "Ring"),
    ),
    "import_of_torch_is_slow": Fault(
        about="`import torch` takes seconds longer on one rank (a busy file server, C1): a warning, and the job works.",
        expect=("LCH003.slow-import",),
        blame=Blame(ranks={1}),
        severity="warning",
        exit_code=0,
        inject="slow-import 1",
        before=variable(1, "DDPDIAG_TEST_IMPORT_SECONDS", "20"),
        bed=Bed(ranks=(1, 1), launcher=Launcher.ENV),
        options=("--select", "LCH003,COL001", "--set", "LCH003.slow_import_seconds=18"),
    ),
    "versions_of_torch_differ": Fault(
        about="One host has another torch than the rest (R9): an environment that was not updated everywhere.",
        expect=("LCH003.torch",),
        blame=Blame(hosts={"h2"}),
        before=variable(2, "DDPDIAG_TEST_TORCH", "2.4.1"),
    ),
    "versions_of_torch_differ_on_two_hosts": Fault(
        about="Two hosts with different versions of torch (R9): a difference, but no majority, so nobody can be "
        "blamed.",
        expect=("LCH003.torch",),
        blame=NOBODY,
        before=variable(1, "DDPDIAG_TEST_TORCH", "2.4.1"),
        bed=Bed(ranks=(1, 1), launcher=Launcher.HAND),
        options=("--stage", "launch,host"),
    ),
    "all_ranks_on_one_core": Fault(
        about="srun does not hand down --cpus-per-task (SL7): all ranks of a host are bound to one core.",
        expect=("HST001.one-core",),
        blame=Blame(hosts={"h1"}),
        severity="warning",
        exit_code=0,
        before=prefix(1, "taskset", "-c", "0"),
        bed=Bed(ranks=(2, 2), launcher=Launcher.ENV),
        options=("--stage", "launch,host"),
    ),
    "more_threads_than_cores": Fault(
        about="OMP_NUM_THREADS of one host is far more than it has cores (S4): ranks fight for them in every step.",
        expect=("HST001.oversubscribed",),
        blame=Blame(hosts={"h1"}),
        severity="warning",
        exit_code=0,
        before=variable(1, "OMP_NUM_THREADS", "64"),
        bed=Bed(ranks=(1, 1), launcher=Launcher.HAND),
        options=("--stage", "launch,host"),
    ),
    "little_memory": Fault(
        about="A job that asked for too little memory on one host (C2).",
        expect=("HST002.short",),
        blame=Blame(hosts={"h1"}),
        severity="warning",
        exit_code=0,
        before=lambda network: limit_memory(network, network[1], 800 << 20),
        bed=Bed(ranks=(1, 1), launcher=Launcher.HAND),
        options=("--stage", "launch,host"),
    ),
    "shared_memory_is_small": Fault(
        about="A container with docker's default /dev/shm of 64 MiB (N4): on hosts with GPUs NCCL would fail.",
        expect=("HST003.small",),
        blame=Blame(hosts={"h1"}),
        severity="warning",
        exit_code=0,
        before=lambda network: network[1].mount_tmpfs("/dev/shm", 64 << 20),
        bed=Bed(ranks=(1, 1), launcher=Launcher.ENV),
        options=("--stage", "launch,host"),
        deep=False,
    ),
    "shared_memory_is_full": Fault(
        about="Files of a killed job fill /dev/shm of one host (N4): who touches a new page there dies of SIGBUS.",
        expect=("HST003.unusable",),
        blame=Blame(hosts={"h0"}),
        severity="warning",
        exit_code=0,
        before=fill_shared_memory,
        bed=Bed(ranks=(1, 1), launcher=Launcher.HAND),
        options=("--stage", "launch,host"),
    ),
    "few_open_files": Fault(
        about="A service that starts the job's processes on one host allows them few open files (D12).",
        expect=("HST004.open-files",),
        blame=Blame(hosts={"h1"}),
        severity="warning",
        exit_code=0,
        before=prefix(1, "prlimit", "--nofile=256:256"),
    ),
    "few_tasks": Fault(
        about='A container allows few processes and threads (C4): the job dies of "Resource temporarily unavailable" '
        "later.",
        expect=("HST004.processes",),
        blame=Blame(hosts={"h0"}),
        severity="warning",
        exit_code=0,
        before=lambda network: limit_tasks(network, network[0], 100),
        bed=Bed(ranks=(1, 1), launcher=Launcher.HAND),
        options=("--stage", "launch,host"),
    ),
    "gpu_without_a_driver": Fault(
        about="A host has a GPU on its PCI bus and no driver for it (N13): a job would take its CPUs, or fail.",
        expect=("GPU001.fewer",),
        blame=Blame(hosts={"h1"}),
        before=show_gpu,
        options=("--stage", "launch,host,gpu"),
        deep=False,
    ),
}
