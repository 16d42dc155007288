"""Other processes on the cores of the ranks while they trained; for TRN001, and for the stragglers of TRN003."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from ddpdiag.checks.api import Seen
from ddpdiag.checks.hosts import hosts_of, ranks_text
from ddpdiag.model import Finding
from ddpdiag.probes.host.programs import BusyProcess, CoreUse
from ddpdiag.text import share_text

D = TypeVar("D")

# Settings of TRN001, shares. TODO
OTHERS_SHARE, WAITED_SHARE = 0.2, 0.1
# Where the ranks themselves are more than the cores, others must take so many times as much.
_CROWDED = 2.0
# A process that used less of a core is not named, nor are more than the busiest few.
_LEAST_CORES, _MOST_NAMED = 0.05, 5


class Others(NamedTuple):
    """What ran beside the ranks of a host, on the cores on which these may run: cores on average.

    `used` was used by other processes, `steal` was given to other virtual machines. `waited` is the share of the time
    in which each rank could run and waited for a core; 0 where the kernel does not say.
    """

    cores: int
    used: float
    steal: float
    waited: dict[int, float]
    processes: tuple[BusyProcess, ...]

    @property
    def share(self) -> float:
        """The share of these cores that others had."""
        return (self.used + self.steal) / self.cores


def others_on(seen: Seen[D], ranks: Sequence[int], uses: Mapping[int, CoreUse]) -> Others | None:
    """What ran beside all ranks of a host, by the one of them that read it; None if it is not known."""
    arrivals = seen.world.arrivals
    host = next((uses[rank] for rank in ranks if rank in uses and uses[rank].busy_seconds), None)
    cores = cores_of(seen, ranks) & set(host.busy_seconds if host is not None else ())
    if host is None or not cores or not all(rank in uses for rank in ranks):
        return None
    workers = {uses[rank].pids[0] for rank in ranks}
    # Supervisors, and the servers that workers are forked from.
    beside = {*(arrivals[rank].pid for rank in ranks), *(pid for rank in ranks for pid in uses[rank].pids)} - workers
    own = sum(uses[rank].own_seconds / uses[rank].seconds for rank in ranks)
    own += sum(process.cores for process in host.processes if process.pid in beside)
    return Others(
        cores=len(cores),
        used=max(0.0, sum(host.busy_seconds[core] for core in cores) / host.seconds - own),
        steal=sum(host.steal_seconds.get(core, 0.0) for core in cores) / host.seconds,
        waited={rank: uses[rank].waited_share or 0.0 for rank in ranks},
        processes=tuple(
            process
            for process in host.processes
            if process.cores >= _LEAST_CORES and process.last_core in cores and process.pid not in workers | beside
        ),
    )


def cores_of(seen: Seen[D], ranks: Sequence[int]) -> set[int]:
    """The numbers of the cores on which these ranks may run."""
    masks = {int(seen.world.arrivals[rank].cpus or "0", 16) for rank in ranks}
    return {core for mask in masks for core in range(mask.bit_length()) if mask >> core & 1}


def processes_beside(seen: Seen[D], rank: int, uses: Mapping[int, CoreUse]) -> tuple[BusyProcess, ...]:
    """Busy processes on the cores of a rank that waited for a core; none where it did not."""
    others = others_on(seen, next(ranks for ranks in seen.world.hosts.values() if rank in ranks), uses)
    if others is None or others.waited[rank] < WAITED_SHARE:
        return ()
    cores = cores_of(seen, [rank])
    return tuple(own for own in others.processes if own.last_core in cores and own.cores >= OTHERS_SHARE)


def processes_text(processes: Sequence[BusyProcess]) -> str:
    """Such as "pid 4711 (python burn.py, user root) used 0.7 cores", of several the busiest."""
    shown = [
        f"pid {own.pid} ({own.command}, user {own.user}) used {own.cores:.2f} cores" for own in processes[:_MOST_NAMED]
    ]
    hidden = len(processes) - len(shown)
    return "; ".join(shown) + (f"; and {hidden} more" if hidden else "")


def stolen_cores(seen: Seen[D], uses: Mapping[int, CoreUse]) -> Iterator[Finding]:
    """Hosts whose ranks waited for cores that others had."""
    least = seen.number("others_share") * (_CROWDED if seen.world.ranks_per_core > 1 else 1)
    for host in hosts_of(seen):
        others = others_on(seen, host.ranks, uses)
        if others is None or others.share < least:
            continue
        is_virtual = others.steal > others.used
        waiting, waited = max(others.waited.items(), key=lambda item: item[1])
        if waited < seen.number("waited_share") and not is_virtual:
            continue
        used = f"{others.steal if is_virtual else others.used:.1f} of the {others.cores} cores"
        if is_virtual:
            text = f"the hypervisor gave {used} of {host.name} to other virtual machines (steal time of /proc/stat)"
        else:
            text = (
                f"other processes used {used} on which they may run, and rank {waiting} waited for a core in "
                f"{share_text(waited)} of the time in which it could run"
            )
        if others.processes:
            text += f". {processes_text(others.processes)}".replace(". pid", ". Pid")
        elif not is_virtual:
            text += ". No busy process can be seen from here: they are in other containers, or ended meanwhile"
        yield seen.finding(
            "stolen-cores",
            f"others use {share_text(others.share)} of the cores of {host.name}",
            f"While {ranks_text(host.ranks)} on {host.name} trained, {text}.",
            nodes=[host.name],
            evidence={
                "others_share": others.share,
                "cores": others.cores,
                "waited_share": waited,
                "pids": [process.pid for process in others.processes],
                **({} if is_virtual else {"slower_share": waited}),
            },
            fix="Ask the provider for dedicated processors, or take another host."
            if is_virtual
            else f"End these processes on {host.name} (`top` shows them), or ask their users to. Or ask for cores that "
            "no other job has: `sbatch --exclusive`.",
        )
