"""Faults of the gallery that concern NCCL, direct copies, the choice of a device, or the start, on the CUDA stand-in.

Each is met by `ddpdiag check` over both classes of process groups. As in tests/faults/fault.py, the expectation is what
a user needs, not what the product says today. `environment` are variables of the stand-in: src/cudart.h, src/nccl.h
and hooks/sitecustomize.py say what they do.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from cuda_standin import GROUPS

# No variable helps against a rank, and whoever advises another driver has not seen it.
NO_VARIABLE = ("NCCL_P2P_DISABLE", "P2P003.nothing")
P2P, SHM, NVLS = "NCCL_P2P_DISABLE=1", "NCCL_SHM_DISABLE=1", "NCCL_NVLS_ENABLE=0"
CUMEM_HOST = "NCCL_CUMEM_HOST_ENABLE=0"
# Half of what a hang costs by default.
QUICK = ("--set", "COL001.deadline_seconds=8", "--set", "P2P003.deadline_seconds=8")


@dataclass(frozen=True, kw_only=True)
class CudaFault:
    """One failure: how it is made, and what must be said of it. `about` says to people what it is.

    `expect`: any of these codes, with at least `severity`; nothing: no error and no warning at all names a rank. Errors
    (warnings, where that is the severity) must name exactly `ranks`, or none; of copies, `pairs` as well. `fix` must be
    advised, in words or as a variable, and nothing of `never` may be the code or the fix of any finding.
    `of_rank` are variables of single ranks, which are then started by hand; `{other}` is the other group's value.
    """

    about: str
    expect: tuple[str, ...]
    ranks: Set[int] = frozenset()
    pairs: Set[str] = frozenset()
    fix: str = ""
    never: tuple[str, ...] = ()
    severity: str = "error"
    exit_code: int = 1
    gpus: int = 2
    started: int | None = None  # ranks, where there are not as many as GPUs
    environment: Mapping[str, str] = field(default_factory=dict)
    of_rank: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    options: tuple[str, ...] = QUICK
    budget: float = 150.0

    @property
    def size(self) -> int:
        """How many ranks are started."""
        return self.started or self.gpus


def nccl(text: str) -> dict[str, str]:
    """A fault in NCCL."""
    return {"FAKENCCL_FAULT": text}


def call(text: str) -> dict[str, str]:
    """A fault of a rank in torch's all_reduce of CUDA tensors."""
    return {"FAKETORCH_FAULT": text}


def diagnosed(about: str, line: str, fix: str, *, ranks: Set[int] = frozenset()) -> CudaFault:
    """A fault that only the diagnostics of NCCL 2.32 show: `line` as NCCL has it, and what must be advised."""
    return CudaFault(
        about=about,
        expect=("COL003.reported",),
        ranks=ranks,
        fix=fix,
        severity="warning",
        exit_code=0,
        environment={"FAKENCCL_VERSION": "2.32.3", "FAKENCCL_DIAGNOSTICS": line},
        options=("--stage", "launch,gpu,collective,p2p"),
    )


FAULTS = {
    "hangs_with_p2p": CudaFault(
        about="NCCL's first collective hangs while it copies directly between GPUs (ACS, an IOMMU; NCCL issue 631).",
        expect=("P2P003.fallback",),
        fix=P2P,
        environment=nccl(f"hang unless={P2P}"),
    ),
    "init_hangs_with_p2p": CudaFault(
        about="The communicator is never made while NCCL copies directly between GPUs.",
        expect=("P2P003.fallback",),
        fix=P2P,
        environment=nccl(f"init-hang unless={P2P}"),
    ),
    "init_fails_with_p2p": CudaFault(
        about="ncclCommInitRank fails with ncclSystemError while NCCL copies directly between GPUs.",
        expect=("P2P003.fallback",),
        fix=P2P,
        environment=nccl(f"init-raise unless={P2P}"),
    ),
    "later_error_with_p2p": CudaFault(
        about="The third operation of a communicator fails with ncclRemoteError, asynchronously, with P2P.",
        expect=("P2P003.fallback",),
        fix=P2P,
        environment=nccl(f"raise call=3 unless={P2P}"),
    ),
    "wrong_values_with_nvls": CudaFault(
        about="NVLink SHARP gives wrong sums without an error (a fabric manager that is too old).",
        expect=("P2P003.fallback",),
        fix=NVLS,
        never=(P2P,),
        environment=nccl(f"corrupt unless={NVLS}"),
    ),
    "hangs_with_shm": CudaFault(
        about="NCCL hangs in shared memory (a small /dev/shm, SELinux).",
        expect=("P2P003.fallback",),
        fix=SHM,
        environment=nccl(f"hang unless={SHM}"),
    ),
    "shared_memory_needs_peer_access": CudaFault(
        about="SHM over cuMem host memory fails where GPUs have no peer access (NCCL 1838: 2 x RTX 4090, L4, T4, A10).",
        expect=("P2P003.fallback",),
        fix=CUMEM_HOST,
        never=("NCCL_SHM_DISABLE", "NCCL_CUMEM_ENABLE"),
        environment=nccl(f"init-raise unless={CUMEM_HOST}|{SHM}|NCCL_CUMEM_ENABLE=0") | {"FAKECUDA_P2P": "off"},
    ),
    "slow_with_p2p": CudaFault(
        about="All-reduces are 400 times slower while NCCL copies directly between GPUs.",
        expect=("P2P005.far-below",),
        severity="warning",
        exit_code=1,
        fix=P2P,
        environment=nccl(f"slow factor=400 unless={P2P}"),
        options=("--stage", "launch,gpu,collective,p2p"),
    ),
    "rank_never_enters": CudaFault(
        about="A rank never enters NCCL's first collective (D10): it waits for a file server, a lock, a download.",
        expect=("RUN003.hung",),
        ranks={1},
        never=NO_VARIABLE,
        environment=call("sleep 1 1"),
    ),
    "rank_stops_later": CudaFault(
        about="A rank enters twenty collectives, and not the next one.",
        expect=("RUN003.hung",),
        ranks={1},
        never=NO_VARIABLE,
        environment=call("sleep 1 21"),
    ),
    "rank_raises": CudaFault(
        about="One rank raises an exception, the others wait for it in NCCL (D4).",
        expect=("RUN003.raised",),
        ranks={1},
        never=NO_VARIABLE,
        environment=call("raise 1 5"),
    ),
    "rank_exits": CudaFault(
        about="A rank leaves in the middle of NCCL's collectives.",
        expect=("RUN003.died",),
        ranks={1},
        never=NO_VARIABLE,
        environment=call("exit 1 5"),
    ),
    "rank_killed_in_a_collective": CudaFault(
        about="A rank is killed (SIGKILL) inside of an all-reduce; the other one waits in NCCL's kernel.",
        expect=("RUN003.died",),
        ranks={1},
        never=NO_VARIABLE,
        environment=nccl("kill rank=1 call=5"),
    ),
    "rank_posts_another_size": CudaFault(
        about="One rank of three all-reduces one element more: NCCL hangs, and says nothing.",
        expect=("RUN003.mismatch",),
        ranks={1},
        never=NO_VARIABLE,
        gpus=3,
        environment=call("longer 1 5"),
    ),
    "rank_posts_another_collective": CudaFault(
        about="One rank of three broadcasts where the others all-reduce.",
        expect=("RUN003.mismatch",),
        ranks={1},
        never=NO_VARIABLE,
        gpus=3,
        environment=call("other 1 5"),
    ),
    "rank_receives_wrong_values": CudaFault(
        about="What one rank of three receives is wrong, whatever is set (memory errors, a bad link).",
        expect=("COL001.wrong",),
        ranks={1},
        gpus=3,
        environment=nccl("corrupt rank=1"),
    ),
    "context_is_slow": CudaFault(
        about="The CUDA context takes 15 s (persistence mode off): slow, and no hang.",
        expect=(),
        exit_code=0,
        environment={"FAKECUDA_CONTEXT_SECONDS": "15"},
        options=("--stage", "launch,collective"),
    ),
    "communicator_is_slow": CudaFault(
        about="The communicator takes 25 s on rank 1 (NFS, cold kernels, many adapters): slow, and no hang.",
        expect=("RUN003.slow-start",),
        severity="warning",
        exit_code=0,
        fix="NCCL_IB_HCA",
        environment=nccl("init-slow rank=1 seconds=25"),
        options=("--stage", "launch,collective"),
    ),
    "communicator_outlasts_the_budget": CudaFault(
        about="The same where the budget leaves less than that: not known, and no hang.",
        expect=("RUN004.unfinished",),
        exit_code=3,
        never=NO_VARIABLE,
        environment=nccl("init-slow rank=1 seconds=25"),
        options=("--stage", "launch,collective", "--set", "COL001.deadline_seconds=8"),
        budget=30.0,
    ),
    "first_collective_is_slow": CudaFault(
        about="The first collective, in which NCCL connects all ranks, takes 20 s on rank 1: slow, and no hang.",
        expect=("RUN003.slow-start",),
        severity="warning",
        exit_code=0,
        environment=nccl("connect-slow rank=1 seconds=20"),
        options=("--stage", "launch,collective"),
    ),
    "classes_of_groups_differ": CudaFault(
        about="TORCH_DIST_USE_NCCL2 of one rank of three gives it another class of process group: init hangs.",
        expect=("LCH002.process-group", "LCH002.variable"),
        ranks={1},
        severity="warning",
        exit_code=1,
        never=NO_VARIABLE,
        gpus=3,
        of_rank={1: {"TORCH_DIST_USE_NCCL2": "{other}"}},
    ),
    "copies_corrupt": CudaFault(
        about="Direct copies from GPU 0 to GPU 1 arrive wrong (N2: P2P behind an IOMMU); no error is raised anywhere.",
        expect=("P2P002.wrong",),
        ranks={0, 1},
        pairs={"GPU 0 -> GPU 1"},
        fix=P2P,
        environment={"FAKECUDA_P2P_FAULT": "corrupt:0>1"},
    ),
    "copies_hang": CudaFault(
        about="A direct copy from GPU 0 to GPU 1 never ends.",
        expect=("P2P002.hung",),
        ranks={0, 1},
        pairs={"GPU 0 -> GPU 1"},
        fix=P2P,
        environment={"FAKECUDA_P2P_FAULT": "hang:0>1"},
    ),
    "copies_end_the_process": CudaFault(
        about="A direct copy from GPU 1 to GPU 0 ends its process.",
        expect=("P2P002.died",),
        ranks={0, 1},
        pairs={"GPU 1 -> GPU 0"},
        fix=P2P,
        environment={"FAKECUDA_P2P_FAULT": "die:1>0"},
    ),
    "pair_is_slow": CudaFault(
        about="Copies from GPU 1 to GPU 2 of four are slow, one way.",
        expect=("P2P002.slow", "P2P002.asymmetric"),
        ranks={1, 2},
        pairs={"GPU 1 -> GPU 2"},
        severity="warning",
        exit_code=0,
        gpus=4,
        environment={"FAKECUDA_GBPS": "1>2=100"},
        options=("--stage", "launch,gpu,collective,p2p"),
    ),
    "host_link_is_slow": CudaFault(
        about="Copies from the host's memory to GPU 1 of four reach 25 GB/s: half of the lanes, or a generation lost.",
        expect=("P2P002.host-slow",),
        ranks={1},
        severity="warning",
        exit_code=0,
        gpus=4,  # a virtual machine, as of CI, is judged by the other GPUs
        environment={"FAKECUDA_GBPS": "to1=25"},
        options=("--stage", "launch,gpu,collective,p2p"),
    ),
    "two_ranks_on_one_gpu": CudaFault(
        about="CUDA_VISIBLE_DEVICES shows one GPU to two ranks, and both take it.",
        expect=("GPU002.shared", "LCH001.fewer-gpus"),
        ranks={0, 1},
        never=("NCCL_", "P2P003.nothing"),
        started=2,
        environment={"CUDA_VISIBLE_DEVICES": "0"},
    ),
    "diagnosed_memory": diagnosed(
        "NVML's volatile counters of a GPU have uncorrected errors.",
        "[INFO] ECC: uncorrected volatile errors on rank(s) {1} (worst=12) across 2 ranks in comm 0x1234",
        "Reset the GPU",
        ranks={1},
    ),
    "diagnosed_nvlink": diagnosed(
        "A GPU has a link that is down.",
        "[INFO] NVLink: inactive link(s) on rank(s) {0} across 2 ranks in comm 0x1234",
        "Reset the GPU",
        ranks={0},
    ),
    "diagnosed_mixed": diagnosed(
        "A process uses another CUDA driver. Which of two is right cannot be told.",
        "[INFO] CUDA driver version: mismatch across 2 ranks in comm 0x1234, rank(s) {1} differ from rank 0 (13020)",
        "Use hosts with the same GPUs and driver",
    ),
    "diagnosed_p2p": diagnosed(
        "What a GPU writes to the memory of another arrives wrong.",
        "[INFO] p2p: write mismatch srcRank=0 srcCudaDev=0 srcNvmlDev=0 dstRank=1 dstCudaDev=1 dstNvmlDev=1 path=PHB "
        "handle=CUMEM_POSIX_FD expected=0x00000000000000a1 got=0x0000000000000000 verify=0x0000000000000000; check the "
        "affected pair with 'nvidia-smi topo -p2p p'|[INFO] p2p: only 1/2 GPU-to-GPU peer accesses passed verification",
        "Disable PCIe ACS",
    ),
    "diagnosed_reduced_mode": diagnosed(
        "The fabric of NVLinks reports a lower bandwidth.",
        "ATTN MNNVL busId 0x1000 NVLink fabric health reports DEGRADED_BANDWIDTH (healthMask 0x1)",
        "Have the NVLink domain checked",
    ),
    "diagnosed_stall": diagnosed(
        "A request of the network is never completed.",
        "INFO NET/IB: WQE stall (no CQE): peer=127.0.0.1<5000> , local: qpn=7 dev=mlx5_3 port=1 lid=0 localGid=fe80::1",
        "Check the link of the device",
    ),
}


def other(value: str, group: str) -> str:
    """A variable's value, with the other class of groups in the place of {other}."""
    return value.replace("{other}", "0" if GROUPS[group] == "1" else "1")
