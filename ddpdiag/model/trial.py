"""The place of a process, trials, the context in which a check measures, and outcomes."""

import re
from collections.abc import Mapping
from enum import Enum
from typing import Annotated, NamedTuple, Protocol

from msgspec import Meta, Raw, Struct, field

from ddpdiag.model.options import RunOptions


class Place(Struct, frozen=True, kw_only=True, gc=False):
    """The position of a rank in the world. A field is None if the launcher did not state it."""

    rank: int
    world_size: int
    host: str
    launcher: str
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None


class Arrival(Struct, frozen=True, kw_only=True, gc=False, tag="arrival"):
    """The first message of a supervisor to rank 0.

    `host_id` is the kernel's boot id, which distinguishes two hosts with the same name. `address` is the source address
    of the connection to rank 0. `seconds` is the time of the message since the start of the run at rank 0. `gpus` is
    the number of GPUs that this process may use, `pci_gpus` the number on the PCI bus (None: not readable).
    `master_addr` is the name by which the rank connected to rank 0. `agent_store`: torchrun's agent serves the store
    that env:// uses. `unset_variables` names variables that scripts read and that no launcher set. `nonce` differs
    between processes that share host and pid (containers). `leaf_switch` is the switch of the host as Slurm names it,
    else empty. `process_age_seconds` is the age of the launched process when it looked for rank 0. `cpu_mask` has the
    processors that this process may use, in hexadecimal (as taskset(1) shows them); empty if it was not read.
    `slurm_step` is the job and step of Slurm ("12.0"), the job alone outside of steps, and empty without Slurm. `user`
    is the user's name, or the uid of a user without a name.
    """

    place: Place
    host_id: str
    pid: int
    address: str
    seconds: float = 0.0
    gpus: int = 0
    pci_gpus: int | None = None
    master_addr: str = ""
    agent_store: bool = False
    unset_variables: tuple[str, ...] = ()
    nonce: str = ""
    leaf_switch: str = ""
    process_age_seconds: float | None = None
    cpu_mask: Annotated[str, Meta(pattern="^[0-9a-f]{0,4096}$")] = ""
    slurm_step: str = ""
    user: str = ""

    @property
    def host(self) -> tuple[str, str]:
        """The name and boot id of the host. Two hosts may share a name, and containers of one host share a boot id."""
        return self.place.host, self.host_id


NO_DATA = Raw(b"null")  # an empty Raw would be written as no JSON at all


# The steps of a rank before its worker has torch.
IMPORT_STEP, FORK_STEP = "import torch", "start the worker"
# The steps of a rank's first use of the driver, the device and the backend. They are slow on some healthy machines.
NVML_STEP, CONTEXT_STEP, COMMUNICATOR_STEP = "NVML", "context", "communicator"
# Since 2.22 NCCL connects rings, trees, NVLS and queue pairs in the call that posts the first collective (its group.cc,
# ncclCollPreconnectFunc). This step has two parts: "post" is part of the first use, "wait" is not. On a path that
# loses all data, ranks hang in "wait".
CONNECT_STEP = "connect all ranks"
BARRIER_STEP = "wait at the gate"
# A rank waits at the barrier while its peers are still in their first use.
_FIRST_USE_STEPS = (NVML_STEP, CONTEXT_STEP, COMMUNICATOR_STEP, f"{CONNECT_STEP}: post", BARRIER_STEP)


def is_first_use(step: str) -> bool:
    """Whether a rank at this step is in its first use, or waits for ranks that are in their first use."""
    return step.startswith(_FIRST_USE_STEPS)


class Kind(Enum):
    """The kind of worker that runs a trial. PLAIN: a new process without torch. TORCH: forked with torch imported."""

    PLAIN = "plain"
    TORCH = "torch"


class Status(Enum):
    """How a trial ended on one rank. UNHEARD: rank 0 received no outcome. SKIPPED: ended before success or failure."""

    DONE = "done"
    RAISED = "raised"
    DIED = "died"
    HUNG = "hung"
    UNHEARD = "unheard"
    SKIPPED = "skipped"


class Trial(Struct, frozen=True, kw_only=True, tag="trial"):
    """One experiment of a check.

    `groups` lists the ranks that take part together; a rank is in at most one group. `env` overrides the worker's
    environment (None: unset the variable). `number` is unique in the run. `deadline_seconds` counts from the moment at
    which a rank receives the trial. `is_shortened`: the budget left less time than the check wanted. While a rank is in
    its first use, its deadline is extended, by `first_use_seconds` at most. A trial that `may_fail` is an experiment:
    only its own check judges its failure, and no other check blames a rank for it. When half of the groups are done,
    rank 0 ends each group that takes more than `late_factor` times as long as they did (None: no such limit).
    `begin_seconds` is the time at which rank 0 sent the trial, since the start of the run. `fresh`: use a new worker.
    """

    code: str
    groups: tuple[tuple[int, ...], ...]
    kind: Kind
    deadline_seconds: float
    number: int = 0
    params: dict[str, str | int | float | bool] = field(default_factory=dict)
    env: dict[str, str | None] = field(default_factory=dict)
    fresh: bool = False
    is_shortened: bool = False
    may_fail: bool = False
    late_factor: float | None = None
    begin_seconds: float | None = None
    first_use_seconds: float = 0.0

    @property
    def limit_seconds(self) -> float:
        """The longest time that the trial can take on a rank."""
        return self.deadline_seconds + self.first_use_seconds

    def group_of(self, rank: int) -> tuple[int, ...]:
        """The group in which `rank` takes part; empty if the rank takes no part."""
        return next((group for group in self.groups if rank in group), ())

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of all groups, in rising order."""
        return tuple(sorted(rank for group in self.groups for rank in group))


class ProcessState(Struct, frozen=True, kw_only=True):
    """The state of a process that did not end in time, from /proc and from its stack dump.

    `state` is the letter of proc(5): R running, S sleeping, D in the kernel or a driver, T stopped. `wchan` is the
    kernel function in which the process waits. `stack` lists the main thread's frames, the innermost first, as
    "function (file:line)", and `threads` the frames of the other threads that run Python. If frames or threads were
    left out, the last line says how many. `survived`: SIGKILL did not end the process. `busy`: the process used a core
    at its deadline. `step_seconds` is the time since its last step.
    """

    pid: int
    state: str | None = None
    wchan: str | None = None
    stack: tuple[str, ...] = ()
    threads: tuple[tuple[str, ...], ...] = ()
    survived: bool = False
    busy: bool = False
    step_seconds: float | None = None


class Collective(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A collective or point-to-point operation that a rank posted, as torch's flight recorder recorded it.

    `seq` counts the collectives of `group` from 1. All ranks that follow the same path through the code have the same
    number for the same collective. `name` has the form "gloo:all_reduce". `elements` is the number of elements of all
    inputs. Point-to-point operations (`p2p`) are counted apart, and their numbers cannot be compared between ranks.
    `peer` is the rank at the other end of a send or receive, if known. `ended` is whether its end is recorded.
    """

    seq: int
    name: str
    elements: int = 0
    dtype: str = ""
    group: str = ""
    p2p: bool = False
    peer: int | None = None
    ended: bool = False

    @property
    def operation(self) -> str:
        """The name without the backend: "all_reduce", "send"."""
        return self.name.rpartition(":")[2].lstrip("_").partition(" ")[0]


# gc=False, because a fleet's run has millions of outcomes: none is in a cycle, and each collection would visit all.
class Outcome(Struct, frozen=True, kw_only=True, tag="outcome", gc=False):
    """The result of one trial on one rank.

    `data` is the check's Data as JSON, present only if `status` is DONE. `partial_data` is the data that the
    measurement had reported before it was cut short. `step_count` is the number of steps that the worker announced, and
    `last_step` names the last. `interrupted`: rank 0 or a signal ended this rank's part, so this rank is not at fault.
    `collectives` are the last collectives that the rank posted in a trial that was not DONE. They are None if the
    worker could not list them: it held the GIL, was stopped or dead, or `why_no_collectives` says why torch keeps no
    record. `survivors` are processes of earlier trials that held a GPU and still existed long after SIGKILL. `timings`
    has seconds: `NVML` (until the driver had started the GPUs), `context` (creation of the device's context), `group`
    (opening the process group, with its first connection) and `gate` (waiting for other ranks at the barrier). Two
    parts of `group`, for other backends than gloo: `communicator` (its creation) and `connect all ranks`. Both are
    missing in a trial that reuses the group of an earlier trial.
    """

    trial: int
    code: str
    rank: int
    status: Status
    data: Raw = NO_DATA
    step_count: int = 0
    last_step: str = ""
    error: str = ""
    detail: str = ""
    interrupted: bool = False
    process: ProcessState | None = None
    collectives: tuple[Collective, ...] | None = None
    why_no_collectives: str = ""
    partial_data: Raw = NO_DATA
    survivors: tuple[ProcessState, ...] = ()
    seconds: float = 0.0
    timings: dict[str, float] = field(default_factory=dict)


class BarrierResult(NamedTuple):
    """The answer of a barrier about one rank: its address, and the text that it passed to the barrier (`offer`)."""

    address: str
    offer: str


class Context(Protocol):
    """The argument of each check's `measure`. `group` lists the ranks that take part, including this rank."""

    place: Place
    trial: Trial
    options: RunOptions
    group: tuple[int, ...]
    scratch: str  # a private directory on this host; removed at the end of the run

    @property
    def group_rank(self) -> int:
        """This rank's position in its group."""

    def step(self, label: str) -> None:
        """Announce the next step. The supervisor reads it from shared memory, even if this process hangs."""

    def barrier(self, offer: str = "") -> BarrierResult:
        """Wait for all ranks of the group, and return the address and offer of the group's first rank."""

    def exchange(self, offer: str) -> tuple[BarrierResult, ...]:
        """Wait like `barrier`, and return address and offer of each rank, in the group's order. For small groups."""

    @property
    def end(self) -> float:
        """The time at which the supervisor ends this trial, on the clock of `time.monotonic`."""

    def report(self, data: Struct, text: str) -> None:
        """Send partial data, for the case that the trial is cut short. `text` describes the progress to people."""

    def add_timing(self, name: str, seconds: float) -> None:
        """Add `seconds` to the timing `name` in the outcome of this trial."""


# The variables that a check may set for its trials, as NAME=value. No variable names a program, a library or a file,
# because rank 0 must not be able to run code in other ranks.
_OVERRIDES = re.compile(
    r"NCCL_[A-Z0-9_]+_(DISABLE|ENABLE)=[01]|NCCL_NET_GDR_LEVEL=[A-Z]{3}|NCCL_NET_PLUGIN=none"
    r"|(NCCL|GLOO)_SOCKET_IFNAME=[=^]?[\w.,:@-]{1,256}|DDPDIAG_RUN_NONCE=[0-9a-f]{1,16}",
    re.ASCII,
)


def refused_override(overrides: Mapping[str, str | None]) -> str | None:
    """The first override that is not allowed, as NAME=value, or None. NCCL variables may always be unset."""
    for name, value in overrides.items():
        if value is None and name.startswith("NCCL_"):
            continue
        setting = f"{name}={'' if value is None else value}"
        if value is None or _OVERRIDES.fullmatch(setting) is None:
            return setting
    return None
