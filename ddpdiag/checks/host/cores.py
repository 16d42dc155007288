"""Cores for every rank.

A rank needs at least one core of its own: its main thread feeds the GPU, and gloo, NCCL's proxy and the data loader
have more threads. If ranks share one core, or start many more threads than there are cores, every collective waits for
the threads that are not scheduled.

Findings:

Causes: Slurm's --cpus-per-task that srun does not inherit (since 22.05), a binding to one core, a container's quota,
OMP_NUM_THREADS unset, so that every rank starts as many threads as the host has cores. Fix: set OMP_NUM_THREADS to
cores per rank; `export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK`; widen the binding.

Confirm by hand: In each rank, `nproc; taskset -pc $$; echo $OMP_NUM_THREADS; cat /sys/fs/cgroup/cpu.max`.

Sources: sched_getaffinity(2); control groups v2, cpu.max (docs.kernel.org/admin-guide/cgroup-v2.html); srun(1),
--cpus-per-task: since Slurm 22.05 srun does not read SLURM_CPUS_PER_TASK; torch/distributed/run.py (OMP_NUM_THREADS=1).
"""

import os
from collections.abc import Iterator, Mapping

from msgspec import Struct

from ddpdiag.checks.api import Check, Scope, Seen, Stage
from ddpdiag.checks.findings import Explained
from ddpdiag.checks.hosts import Host, answers_by_host, ranks_text
from ddpdiag.model import Finding
from ddpdiag.model.trial import Context
from ddpdiag.probes.host.kernel import proc_root, sys_root
from ddpdiag.probes.host.limits import affinity, cgroup, cores
from ddpdiag.text import count

FINDINGS = {
    "one-core": Explained.warning("several ranks of a host may use only one core."),
    "scarce": Explained.note(
        "more ranks than cores, or than the quota allows: a note, since bandwidth is not judged then."
    ),
    "oversubscribed": Explained.warning("ranks start many more threads than there are cores."),
    "unreadable": Explained.not_seen("the cores of a host could not be read."),
}


class Data(Struct, frozen=True, kw_only=True):
    """Cores of the host (None: not known), those on which this rank may run (empty: not known), its quota in cores
    (None: no limit), and OMP_NUM_THREADS (None: unset)."""

    cores: int | None
    affinity: tuple[int, ...]
    quota: float | None = None
    omp_threads: int | None = None


def measure(ctx: Context) -> Data:
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return Data(
        cores=cores(),
        affinity=affinity(),
        quota=cgroup(proc_root(os.environ), sys_root(os.environ)).cpus,
        omp_threads=int(threads) if threads.isdecimal() else None,
    )


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    for host, rows in answers_by_host(seen):
        usable = usable_cores(rows)
        # Is the binding unknown, or is it one core for several ranks of a host that may have more of them?
        unbound = [rank for rank, row in rows.items() if not row.affinity]
        crowded = len(rows) > 1 and usable.cores == 1
        if unbound or (crowded and all(row.cores is None for row in rows.values())):
            what = f"on which cores {ranks_text(unbound)} may run" if unbound else "how many cores the host has"
            whose = "its rank has" if len(rows) == 1 else f"each of its {len(rows)} ranks has"
            yield seen.finding(
                "unreadable",
                "the cores cannot be counted",
                f"{host.name}: the system does not report {what}, so it is not known whether {whose} a core of its "
                "own.",
                ranks=unbound or tuple(rows),
                fix="Mount /proc into the container, and let it call sched_getaffinity (docker --security-opt "
                "seccomp=...).",
            )
        elif crowded and any((row.cores or 1) > 1 for row in rows.values()):
            core = next(iter(rows.values())).affinity[:1]
            yield seen.finding(
                "one-core",
                "all ranks of a host share one core",
                f"{host.name}: {ranks_text(tuple(rows))} may run on core {', '.join(map(str, core))} only; "
                f"a core for each of {len(rows)} ranks is expected.",
                ranks=tuple(rows),
                evidence={"ranks": len(rows), "cores": 1},
                fix="Widen the binding (srun --cpus-per-task, --cpu-bind; mpirun --bind-to none), "
                "and export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK.",
            )
        else:
            yield from _too_many(seen, host, rows, usable)


class Usable(Struct, frozen=True):
    """Cores that a host's ranks may use together, and what limits them."""

    cores: float
    why: str


def usable_cores(rows: Mapping[int, Data]) -> Usable:
    """Cores that these ranks of one machine may use together."""
    bound = len({core for row in rows.values() for core in row.affinity})
    quota = min((row.quota for row in rows.values() if row.quota is not None), default=None)
    if quota is not None and quota < bound:
        return Usable(quota, f"{quota:g} cores (quota of the control group)")
    return Usable(bound, count(bound, "core"))


def _too_many(seen: Seen[Data], host: Host, rows: Mapping[int, Data], usable: Usable) -> Iterator[Finding]:
    """More ranks, or more of their threads, than cores."""
    ranks = tuple(rows)
    if len(ranks) > usable.cores:
        yield seen.finding(
            "scarce",
            "more ranks than cores",
            f"{host.name}: {usable.why} for {count(len(ranks), 'rank')}; the ranks wait for a core, so bandwidth is "
            "not judged.",
            ranks=ranks,
            evidence={"ranks": len(ranks), "cores": usable.cores},
            fix="Start fewer ranks on this host, or ask for more cores.",
        )
    threads = sum(row.omp_threads or len(row.affinity) for row in rows.values())
    if threads > seen.number("threads_per_core") * usable.cores:
        fitting = max(1, int(usable.cores) // len(ranks))
        # If ranks start one thread each, there are too many of them, and no variable helps.
        many = threads <= len(ranks)
        unset = all(row.omp_threads is None for row in rows.values())
        yield seen.finding(
            "oversubscribed",
            "more threads than cores",
            f"{host.name}: {count(len(ranks), 'rank')} {'starts' if len(ranks) == 1 else 'start'} {threads} compute "
            f"threads on {usable.why}{' because OMP_NUM_THREADS is unset' if unset else ''}; at most "
            f"{usable.cores:g} expected.",
            ranks=ranks,
            evidence={"ranks": len(ranks), "threads": threads, "cores": usable.cores},
            fix="Start fewer ranks on this host, or ask for more cores: each rank already starts only one thread."
            if many
            else f"Set OMP_NUM_THREADS={fitting} (cores per rank).",
            env={} if many else {"OMP_NUM_THREADS": str(fitting)},
        )


CHECK = Check(
    "HST001",
    "cores",
    Stage.HOST,
    Scope.RANK,
    manual=__doc__ or "",
    findings=FINDINGS,
    measure=measure,
    judge=judge,
    data=Data,
    settings={"threads_per_core": 2},
)
