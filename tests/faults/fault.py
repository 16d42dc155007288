"""What a fault of the gallery is. A module in `gallery/` has those of one stage; the benchmarks run them too.

A fault is an entry in the module of the stage that its first expected finding belongs to, under a name that no other
fault has:

    FAULTS = {
        "rank_segfaults": Fault(
            about='A rank crashes in its first all-reduce (G9): the others only see "Connection closed by peer".',
            expect=("RUN003.died",),             # any of these codes, with at least `severity`
            blame=Blame(ranks={2}),              # exactly these; Blame(hosts={"h1"}), Blame(links={"h0 -> h1"}), NOBODY
            inject="segv 2",                     # a fault inside of a process: see tests/inject/sitecustomize.py
            before=None, when_reached=None,      # what is done from outside: functions, see below
            bed=Bed(ranks=(2, 2)),               # two hosts with two ranks each, started by torchrun: see launch.Bed
            options=("--stage", "collective"),   # of `ddpdiag check`; none is the whole check
            budget=40,                           # --budget; the run must be over in this time
            deep=False,                          # runs by default; without it, only with -m deep
        ),
    }

How it is injected must not depend on the command that runs, because other tools and plain scripts meet the same faults.

- `before(network)` runs before the start. `network[1]` is host h1 (see network.Host): `.resolve(name, address)` edits
  its /etc/hosts, `.block(port=...)`, `.slow("100mbit")`, `.lose(0.02)`, `.swallow_large()` and `.cut()` harm its
  network, `.mount_tmpfs("/dev/shm", size)` and `.bind(source, target)` what it sees of the disk,
  `.add_bridge("docker0", "172.17.0.1/16")` adds an interface, `.hold_port(29500)` another job. One call is a lambda,
  `before=lambda network: network[0].block(port=29500)`, more are a function above FAULTS. `.variables[name]` are
  variables of all that starts there, `.prefix = ["taskset", "-c", "0"]` puts a command before it: `variable(1, name,
  value)` and `prefix(1, "taskset", "-c", "0")` are `before` functions that do only this; cgroups.limit_memory does so
  with a control group. Files go to `network.folder`; its folder `shared` is there, and is {shared} in `options`. What
  is made outside of the hosts is removed by `network.undo.callback(...)`.
- `inject` names faults in a process ("KIND RANK", several with commas). `when_reached(network, running)` runs as soon
  as the first of them begins: `running.in_fault(rank)` is the process in it, `running.launched(rank)` the one that
  the launcher started for the rank, both with `.kill(signal)`. The kind "pause" gives this function two seconds in the
  first all-reduce and does no harm of its own.

The expectation is what a user needs, not what the product says today: if it blames wrongly, the fault stays as it is.
By default one quick fault runs for each class of failure (`deep=False`); a new fault of a class that has one is deep.
"""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field

from launch import Bed, Launched, Launcher
from network import Network


@dataclass(frozen=True)
class Blame:
    """Whom the findings must name: ranks, hosts, links ("h0 -> h1"); nothing at all means that nobody may be named.

    Where ranks are given, their hosts may be named as well, and where hosts are given, their ranks; `tolerated` names
    further hosts that a finding may name, with their ranks, without doing wrong. Where links are given, no other host
    is to be named.
    """

    ranks: Set[int] = frozenset()
    hosts: Set[str] = frozenset()
    links: Set[str] = frozenset()
    tolerated: Set[str] = frozenset()


NOBODY = Blame()
THREE_HOSTS = Bed(ranks=(1, 1, 1), launcher=Launcher.ENV)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One failure: how it is made, and what must be said of it. `about` says to people what it is.

    Without `bed`, three hosts have one rank each, started with variables in its environment.
    `expect` may be empty where only a sentence is expected, or nothing: what disturbs ddpdiag and no job.
    `says` maps a job (a host under torchrun, "rank3" where each rank is started by itself) to words that its standard
    error must show. `exit_code` is the verdict's: 1 unfit, 3 unknown, 0 fit with a warning. `reports` is False where
    rank 0 itself cannot report. `keeps` names the jobs whose ranks lose rank 0 and so leave their records on disk.
    `good` are the hosts that the report must call good, if that is looked at; those whom an error blames must be bad
    then.
    """

    about: str
    expect: tuple[str, ...]
    blame: Blame
    severity: str = "error"
    exit_code: int = 1
    bed: Bed = THREE_HOSTS
    options: tuple[str, ...] = ()
    budget: float = 120.0  # the usual one for several hosts; whoever hangs is given less by its trial
    inject: str = ""
    before: Callable[[Network], None] | None = None
    when_reached: Callable[[Network, Launched], None] | None = None
    says: Mapping[str, str] = field(default_factory=dict)
    reports: bool = True
    keeps: Set[str] = frozenset()
    good: Set[str] | None = None
    deep: bool = True  # runs only with -m deep

    @property
    def is_whole(self) -> bool:
        """Does it meet the whole check, with nothing selected?"""
        return not {"--stage", "--skip-stage", "--select", "--ignore"}.intersection(self.options)


def variable(index: int, name: str, value: str) -> Callable[[Network], None]:
    """A `before` that sets a variable on one host."""

    def before(network: Network) -> None:
        network[index].variables[name] = value

    return before


def prefix(index: int, *words: str) -> Callable[[Network], None]:
    """A `before` that puts a command before all that starts on one host."""

    def before(network: Network) -> None:
        network[index].prefix = list(words)

    return before
