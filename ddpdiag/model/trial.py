"""Places of processes, trials, the context of a measurement, and outcomes."""

import re
from collections.abc import Mapping
from enum import Enum
from typing import Annotated, NamedTuple, Protocol

from msgspec import Meta, Raw, Struct, field

from ddpdiag.model.options import Options


class Place(Struct, frozen=True, kw_only=True, gc=False):
    """The position of a rank. `None` means that the launcher did not state it; ranks are never guessed."""

    rank: int
    world_size: int
    host: str
    launcher: str
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None


class Arrival(Struct, frozen=True, kw_only=True, gc=False, tag="arrival"):
    """The first message of a supervisor to rank 0.

    `host_id` is the kernel's boot id, so that two hosts with one name can be distinguished; `address` is the
    source address of its connection to rank 0; `seconds` counts from the start of the run at rank 0.
    `gpus` is the number of GPUs that this process may use, `pci_gpus` what the PCI bus shows (`None`: not readable).
    `coordinator` is the name by which the rank connected to rank 0. `agent_store`: torchrun's
    agent serves the store which env:// uses. `lacks` names variables that scripts read and that no launcher set.
    `nonce` differs between processes that share host and pid (containers). `leaf` is the switch above the host by
    Slurm, else empty. `up_seconds` is the age of the launched process when it looked for rank 0. `cpus`
    is the mask of the processors that this process may use, in hexadecimal (as taskset(1) shows it); empty if it was
    not read. `slurm` is the job and step of Slurm in which it runs ("12.0"), the job alone outside of its steps; empty
    elsewhere. `user` is the name of its user, or the uid where that has none.
    """

    place: Place
    host_id: str
    pid: int
    address: str
    seconds: float = 0.0
    gpus: int = 0
    pci_gpus: int | None = None
    coordinator: str = ""
    agent_store: bool = False
    lacks: tuple[str, ...] = ()
    nonce: str = ""
    leaf: str = ""
    up_seconds: float | None = None
    cpus: Annotated[str, Meta(pattern="^[0-9a-f]{0,4096}$")] = ""
    slurm: str = ""
    user: str = ""

    @property
    def host(self) -> tuple[str, str]:
        """The name and boot id of the host. Two hosts may share a name, and containers of one host share a boot id."""
        return self.place.host, self.host_id


NOTHING = Raw(b"null")  # an empty Raw would be written as no JSON at all


# The steps of a rank until it has a worker with torch.
IMPORT_STEP, FORK_STEP = "import torch", "start the worker"
# A rank's first use of the driver, of its device, and of the backend that connects it: slow on some healthy machines.
NVML_STEP, CONTEXT_STEP, COMMUNICATOR_STEP = "NVML", "context", "communicator"
# Since 2.22 NCCL connects rings, trees, NVLS and queue pairs in the call that posts the first collective (its group.cc,
# ncclCollPreconnectFunc); ranks that have "posted" wait for the others. A path on which nothing arrives hangs in the
# "wait" after that, which is no first use.
CONNECT_STEP = "connect all ranks"
BARRIER_STEP = "wait at the gate"
# A rank waits at the barrier while its peers are still in their first use.
_FIRST_USE_STEPS = (NVML_STEP, CONTEXT_STEP, COMMUNICATOR_STEP, f"{CONNECT_STEP}: post", BARRIER_STEP)


def is_first_use(step: str) -> bool:
    """Whether a rank at this step is in its first use, or waits for ranks that are."""
    return step.startswith(_FIRST_USE_STEPS)


class Kind(Enum):
    """The worker of a trial: a new process without torch, or one that the fork server forks with torch."""

    PLAIN = "plain"
    TORCH = "torch"


class Status(Enum):
    """The end of a trial on one rank; its meaning is judged later."""

    DONE = "done"
    RAISED = "raised"
    DIED = "died"
    HUNG = "hung"
    UNHEARD = "unheard"
    SKIPPED = "skipped"


class Trial(Struct, frozen=True, kw_only=True, tag="trial"):
    """One experiment of a check.

    `groups` lists the ranks that take part together; a rank is in one group at most. `env` overrides the worker's
    environment (`None` unsets). `number` is unique in the run. `deadline_seconds` counts from the moment at which a
    rank receives the trial; `hurried` says that the budget left less than the check would have given. While a rank is
    in its first use, its deadline moves on, by `first_use_seconds` at most. A trial that `may_fail` is an experiment
    whose failure is an answer: the check itself judges it, and no other check blames a rank for it. Once half of its
    groups are through, rank 0 ends a group that takes more than `late_after` times as long as they did.
    `begin_seconds` is the time at which rank 0 sent it, since the start of the run. `fresh`: in a new worker.
    """

    code: str
    groups: tuple[tuple[int, ...], ...]
    kind: Kind
    deadline_seconds: float
    number: int = 0
    params: dict[str, str | int | float | bool] = field(default_factory=dict)
    env: dict[str, str | None] = field(default_factory=dict)
    fresh: bool = False
    hurried: bool = False
    may_fail: bool = False
    late_after: float | None = None
    begin_seconds: float | None = None
    first_use_seconds: float = 0.0

    @property
    def limit_seconds(self) -> float:
        """The longest that the trial can take on a rank."""
        return self.deadline_seconds + self.first_use_seconds

    def group_of(self, rank: int) -> tuple[int, ...]:
        """The group in which `rank` takes part, or an empty one."""
        return next((group for group in self.groups if rank in group), ())

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank that takes part, in rising order."""
        return tuple(sorted(rank for group in self.groups for rank in group))


class ProcessState(Struct, frozen=True, kw_only=True):
    """A process that did not end in time, as /proc and its own stack dump show it.

    `state` is the letter of proc(5): R running, S sleeping, D in the kernel or a driver, T stopped.
    `stack` lists the main thread's frames from the innermost one, as "function (file:line)", and `threads` those of the
    other threads that run Python; the last line says how many were left out, if any. `survived` says that SIGKILL did
    not end it. `busy`: it used a core at its deadline. `step_seconds`: time since its last step.
    """

    pid: int
    state: str | None = None
    wchan: str | None = None
    stack: tuple[str, ...] = ()
    threads: tuple[tuple[str, ...], ...] = ()
    survived: bool = False
    busy: bool = False
    step_seconds: float | None = None


class Collective(Struct, frozen=True, kw_only=True):
    """A collective that a rank posted, as torch's flight recorder has it.

    `seq` counts the collectives of `group` from 1, so that the same number is the same collective on every rank, unless
    their paths through the code differ. `name` is such as "gloo:all_reduce"; `elements` counts those of all inputs.
    A point-to-point operation (`p2p`) has a count of its own, which means nothing to other ranks.
    """

    seq: int
    name: str
    elements: int = 0
    dtype: str = ""
    group: str = ""
    p2p: bool = False


# No gc for what a fleet's run has millions of: they are in no cycle, and each collection would visit them all.
class Outcome(Struct, frozen=True, kw_only=True, tag="outcome", gc=False):
    """The result of one trial on one rank.

    `data` is the check's Data as JSON, present only when `status` is DONE. `step` counts the steps that the
    worker announced and `at` names the last of them. `told` says that rank 0 ended this rank's part because of
    another rank: it is not at fault. `timings` holds seconds by kind: `NVML` (until the driver had started the GPUs),
    `context` (the device), `group` (opening it, and its first connection) and `gate` (waiting for the group at the
    barrier); of `group`, what creating a `communicator` took and then to `connect all
    ranks` (any backend but gloo; a trial that shares the group of an earlier one has neither).
    `no_collectives` is why torch keeps no record of the collectives, where it keeps none.
    `collectives` holds the last ones that it posted in this trial, if it did not end well: empty for none, `None` if it
    did not say (it held the GIL, was stopped, was dead, or its torch has no flight recorder). `so_far` is what a
    measurement that was cut short had handed over before.
    `survivors` are processes of earlier trials that held a GPU and still existed long after SIGKILL.
    """

    trial: int
    code: str
    rank: int
    status: Status
    data: Raw = NOTHING
    step: int = 0
    at: str = ""
    error: str = ""
    detail: str = ""
    told: bool = False
    process: ProcessState | None = None
    collectives: tuple[Collective, ...] | None = None
    no_collectives: str = ""
    so_far: Raw = NOTHING
    survivors: tuple[ProcessState, ...] = ()
    seconds: float = 0.0
    timings: dict[str, float] = field(default_factory=dict)


class Opening(NamedTuple):
    """The result of a barrier: the address of a rank (the group's first, unless stated) and the text it offered."""

    host: str
    offer: str


class Context(Protocol):
    """The facts and functions that a measurement gets. `group` lists the ranks that take part, including this one."""

    place: Place
    trial: Trial
    options: Options
    group: tuple[int, ...]
    scratch: str  # a private directory on this host; removed at the end of the run

    @property
    def group_rank(self) -> int:
        """This rank's position in its group."""

    def step(self, label: str) -> None:
        """Announce the next step; the supervisor reads it from shared memory when this process hangs."""

    def barrier(self, offer: str = "") -> Opening:
        """Wait for all ranks of the group, and return the address and offer of the first one."""

    def exchange(self, offer: str) -> tuple[Opening, ...]:
        """Wait like `barrier`, and return addresses and offers of all ranks, in the group's order. For small groups."""

    @property
    def end(self) -> float:
        """The time at which the supervisor ends this trial, on the clock of `time.monotonic`."""

    def report(self, data: Struct, text: str) -> None:
        """Send the data measured so far, in case the trial is cut short. `text` describes the progress to people."""

    def timed(self, name: str, seconds: float) -> None:
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
