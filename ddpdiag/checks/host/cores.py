"""Cores for every rank.

A rank needs at least one core: its main thread feeds the GPU, and gloo, NCCL's proxy and the data loader have more
threads. With too few cores every collective waits for the threads that are not scheduled.

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

from ddpdiag.checks.api import Check, Contribution, Scope, Seen, Stage
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.hosts import Host, data_by_host, ranks_text
from ddpdiag.model import Finding, Severity
from ddpdiag.model.trial import Context
from ddpdiag.probes.host.kernel import proc_root, read_pairs, read_text, sys_root
from ddpdiag.probes.host.limits import affinity, cgroup
from ddpdiag.text import begun, count

FINDINGS = {
    "one-core": FindingSpec.warning("several ranks of a host may use only one core."),
    "oversubscribed": FindingSpec(
        "more ranks than cores, or than the quota allows: a note, since bandwidth is not judged then. A warning where "
        "the ranks also start more than `threads_per_core` (2) compute threads for each core."
    ),
    "unreadable": FindingSpec.unchecked("the cores of a host could not be read."),
}


class Data(Struct, frozen=True, kw_only=True):
    """The number of cores of the host, and what limits the rank: `affinity` lists the cores on which it may run (empty:
    not known), `quota` is the control group's limit in cores (None: no limit), `omp_threads` is OMP_NUM_THREADS (None:
    unset). `model` is the processor's name, and `kernel` the release of the kernel. `cores`, `model` and `kernel` are
    None if they are not known."""

    cores: int | None
    affinity: tuple[int, ...]
    quota: float | None = None
    omp_threads: int | None = None
    model: str | None = None
    kernel: str | None = None


def measure(ctx: Context) -> Data:
    proc, threads = proc_root(os.environ), os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return Data(
        cores=os.cpu_count(),
        affinity=affinity(),
        quota=cgroup(proc, sys_root(os.environ)).cpus,
        omp_threads=int(threads) if threads.isdecimal() else None,
        model=read_pairs(proc / "cpuinfo", ":").get("model name"),
        kernel=read_text(proc / "sys" / "kernel" / "osrelease") or None,
    )


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    for host, rows in data_by_host(seen):
        answers, bound_cores = rows.values(), {core for row in rows.values() for core in row.affinity}
        unknown_ranks = [rank for rank, row in rows.items() if not row.affinity]
        is_crowded = len(rows) > 1 and len(bound_cores) == 1
        # Several ranks on one core are normal on a host with one core, so the number of cores must be known.
        if unknown_ranks or (is_crowded and all(row.cores is None for row in answers)):
            missing = "on which cores ranks may run" if unknown_ranks else "how many cores it has"
            yield seen.finding(
                "unreadable",
                f"the cores of {host.name} cannot be counted",
                f"The system does not report {missing}. So it is not known whether each rank has its own core.",
                ranks=unknown_ranks or tuple(rows),
                fix=f"Run `nproc; taskset -pc $$` in the job on {host.name}: at least {count(len(rows), 'core')} "
                "should be shown. In a container mount /proc, and allow sched_getaffinity in the seccomp profile.",
            )
        elif is_crowded and any((row.cores or 1) > 1 for row in answers):
            yield seen.finding(
                "one-core",
                f"all ranks of {host.name} share one core",
                f"{begun(ranks_text(tuple(rows)))} on {host.name} may run on core {min(bound_cores)} only. At "
                f"least {len(rows)} cores are expected, one for each rank.",
                ranks=tuple(rows),
                evidence={"ranks": len(rows), "cores": 1},
                fix=f"Under Slurm give each task more cores: `srun --cpus-per-task={len(rows)} ...`, or do not bind "
                "it: `srun --cpu-bind=none ...`. With Open MPI use `mpirun --bind-to none ...`. Without these, remove "
                "`taskset` or `numactl` from the command.",
            )
        else:
            yield from _oversubscription(seen, host, rows)


def usable_cores(rows: Mapping[int, Data]) -> float:
    """The number of cores that these ranks of one host may use together: all cores of their bindings, or the lowest
    quota if that is less."""
    cores = len({core for row in rows.values() for core in row.affinity})
    return min((row.quota for row in rows.values() if row.quota is not None and row.quota < cores), default=cores)


def _oversubscription(seen: Seen[Data], host: Host, rows: Mapping[int, Data]) -> Iterator[Finding]:
    """The finding if a host's ranks, or their compute threads, are more than the cores allow; empty if they are not."""
    ranks, usable = tuple(rows), usable_cores(rows)
    limit, is_quota = max(1, int(usable)), usable in [row.quota for row in rows.values()]
    threads = sum(row.omp_threads or len(row.affinity) for row in rows.values())
    ranks_exceed = len(ranks) > usable
    threads_exceed = threads > seen.setting("threads_per_core") * usable
    fixes, env = [], {}
    if ranks_exceed:
        fixes.append(
            f"Start at most {count(limit, 'rank')} on {host.name} (`torchrun --nproc-per-node={limit}`). Or ask for "
            f"{len(ranks)} cores: `sbatch --cpus-per-task={len(ranks)}` with one torchrun per host, or `docker run "
            f"--cpus={len(ranks)}`."
        )
    # If each rank starts one thread only, the ranks are too many, and a lower OMP_NUM_THREADS is not possible.
    if threads_exceed and threads > len(ranks):
        env = {"OMP_NUM_THREADS": str(max(1, limit // len(ranks)))}
        fixes.append(f"Run `export OMP_NUM_THREADS={env['OMP_NUM_THREADS']}` before the launcher.")
    is_unset = env and all(row.omp_threads is None for row in rows.values())
    if ranks_exceed or threads_exceed:
        yield seen.finding(
            "oversubscribed",
            f"more {'ranks' if ranks_exceed else 'threads'} than cores on {host.name}",
            f"{count(len(ranks), 'rank')} on {host.name} {'starts' if len(ranks) == 1 else 'start'} "
            f"{count(threads, 'compute thread')} on {usable:g} core{'' if usable == 1 else 's'}"
            f"{' (quota of the control group)' if is_quota else ''}"
            f"{', because OMP_NUM_THREADS is unset' if is_unset else ''}. At most "
            f"{count(limit, 'rank' if ranks_exceed else 'thread')} {'is' if limit == 1 else 'are'} expected, with one "
            "thread per core."
            + (" Ranks wait for a core, so ddpdiag does not judge the bandwidth." if ranks_exceed else ""),
            severity=Severity.WARNING if threads_exceed else Severity.NOTE,
            ranks=ranks,
            evidence={"ranks": len(ranks), "threads": threads, "cores": usable},
            fix=" ".join(fixes),
            env=env,
        )


def report(seen: Seen[Data]) -> Contribution:
    """Contribute to the report each host's CPU, the cores that its ranks may use and the model, and its kernel."""
    inventory = {}
    for host, rows in data_by_host(seen):
        row, usable = next(iter(rows.values())), usable_cores(rows)
        parts = {"kernel": row.kernel} if row.kernel else {}
        if total := row.cores or usable:
            cores = f"{usable:g} of {total:g} cores" if 0 < usable < total else count(int(total), "core")
            model = (row.model or "model unknown").replace("(R)", "").replace("(TM)", "")
            parts["CPU"] = f"{cores} ({' '.join(model.split())})"
        inventory[host.ranks[0]] = parts
    return Contribution(inventory=inventory)


SETTINGS = {"threads_per_core": 2}
CHECK: Check[Data] = Check(__name__, "HST001", "cores", Stage.HOST, Scope.RANK)
