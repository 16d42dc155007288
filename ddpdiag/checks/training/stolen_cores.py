"""Processes of others on the cores of the ranks during training; for TRN001, and for the stragglers of TRN003."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from ddpdiag.checks.api import Seen
from ddpdiag.checks.hosts import names_text, ranks_text
from ddpdiag.model import Finding
from ddpdiag.probes.host.programs import BusyProcess, CoreUse
from ddpdiag.text import begun, count, share_text

D = TypeVar("D")

# A busy process next to two ranks on two cores uses half of the cores: its fair share is a third, and ranks also wait
# for messages (tests/benchmarks/stolen_cores.py). A rank that waits for a tenth of its time is 1.1 times slower; from
# this ratio on, TRN003 calls a rank a straggler.
OTHERS_SHARE, WAITED_SHARE = 0.2, 0.1
# A choice, not measured: more ranks than cores wait for each other, so others must use this multiple of the share.
_CROWDED = 2.0
# A choice, not measured: if the cores were less busy, ranks waited for another reason, such as a quota.
_LEAST_BUSY = 0.75
# A process that used less than this share of a core is not named.
_LEAST_CORES = 0.05


class Others(NamedTuple):
    """The use of the cores on which the `ranks` of a machine may run; `cores` is the number of these cores.

    `busy` counts all processes, `used` those of others, and `steal` other virtual machines: cores on average. `waited`
    is, by rank, the share of the time in which it could run but waited for a core (0: the kernel does not say).
    """

    ranks: tuple[int, ...]
    cores: int
    busy: float
    used: float
    steal: float
    waited: dict[int, float]
    processes: tuple[BusyProcess, ...]

    @property
    def share(self) -> float:
        """The share of these cores that other processes and other virtual machines used."""
        return (self.used + self.steal) / self.cores


def machines(seen: Seen[D], uses: Mapping[int, CoreUse]) -> Iterator[Others]:
    """The use of cores on each machine, if known. Containers of one machine are together: they share its boot id."""
    ranks: dict[object, list[int]] = {}
    for rank, arrival in seen.world.arrivals.items():
        ranks.setdefault(arrival.host_id or arrival.host, []).append(rank)
    for own in ranks.values():
        if all(rank in uses for rank in own) and (others := _others(seen, own, uses)) is not None:
            yield others


def _others(seen: Seen[D], ranks: Sequence[int], uses: Mapping[int, CoreUse]) -> Others | None:
    """The use of the cores of these ranks, from the first rank that could read the whole host's; None if none could."""
    whole = next((uses[rank] for rank in ranks if uses[rank].busy_seconds), None)
    if whole is None or not (cores := cores_of(seen, ranks) & whole.busy_seconds.keys()):
        return None
    workers = {uses[rank].pids[0] for rank in ranks}
    # The processes of the run: supervisors, workers, and the servers from which workers are forked.
    run_pids = {seen.world.arrivals[rank].pid for rank in ranks} | {pid for rank in ranks for pid in uses[rank].pids}
    busy = sum(whole.busy_seconds[core] for core in cores) / whole.seconds
    own = sum(uses[rank].own_seconds / uses[rank].seconds for rank in ranks)
    own += sum(process.cores for process in whole.processes if process.pid in run_pids - workers)
    return Others(
        ranks=tuple(ranks),
        cores=len(cores),
        busy=busy,
        used=max(0.0, busy - own),
        steal=sum(whole.steal_seconds.get(core, 0.0) for core in cores) / whole.seconds,
        waited={rank: uses[rank].waited_share or 0.0 for rank in ranks},
        processes=tuple(
            process
            for process in whole.processes
            if process.cores >= _LEAST_CORES and process.last_core in cores and process.pid not in run_pids
        ),
    )


def cores_of(seen: Seen[D], ranks: Sequence[int]) -> set[int]:
    """The numbers of the cores on which these ranks may run."""
    masks = {int(seen.world.arrivals[rank].cpus or "0", 16) for rank in ranks}
    return {core for mask in masks for core in range(mask.bit_length()) if mask >> core & 1}


def processes_beside(seen: Seen[D], rank: int, uses: Mapping[int, CoreUse]) -> tuple[BusyProcess, ...]:
    """Busy processes of others on the cores of `rank`; empty if the rank did not wait for a core."""
    others = next((others for others in machines(seen, uses) if rank in others.ranks), None)
    if others is None or others.waited[rank] < WAITED_SHARE:
        return ()
    cores = cores_of(seen, [rank])
    return tuple(own for own in others.processes if own.last_core in cores and own.cores >= OTHERS_SHARE)


def processes_text(processes: Sequence[BusyProcess]) -> str:
    """Processes in words, in the given order: "pid 4711 (python burn.py, user root) used 0.70 cores"."""
    return "; ".join(f"pid {own.pid} ({own.command}, user {own.user}) used {own.cores:.2f} cores" for own in processes)


def stolen_cores(
    seen: Seen[D], uses: Mapping[int, CoreUse], others_share: float, waited_share: float
) -> Iterator[Finding]:
    """A finding for each machine on whose cores others had that share, if a rank waited or it was mostly steal time."""
    for others in machines(seen, uses):
        least = others_share * (_CROWDED if len(others.ranks) > others.cores else 1)
        waiting, waited = max(others.waited.items(), key=lambda item: item[1])
        is_felt = waited >= waited_share and others.busy >= _LEAST_BUSY * others.cores
        if others.share < least or not (is_felt or others.steal > others.used):
            continue
        nodes = seen.world.hosts_of(others.ranks)
        where, names = names_text(nodes), processes_text(others.processes)
        stolen = f", and other virtual machines {others.steal:.1f} (steal time)" if others.steal >= _LEAST_CORES else ""
        yield seen.finding(
            "stolen-cores",
            f"others use {share_text(others.share)} of the cores of {where}",
            f"While {ranks_text(others.ranks)} on {where} trained, other processes used {others.used:.1f} of their "
            f"{count(others.cores, 'core')}{stolen}. Rank {waiting} waited for a core in "
            f"{share_text(waited)} of the time in which it could run. "
            + (
                f"{begun(names)}." if names else "No busy process is visible: it has ended, or is in another container."
            ),
            hosts=nodes,
            evidence={
                "others_share": others.share,
                "cores": others.cores,
                "waited_share": waited,
                "slower_share": max(waited, others.steal / others.cores),
                "pids": [process.pid for process in others.processes],
            },
            fix=f"Run `top` on {where}, and end what need not run there. Or ask for cores that no other job has: "
            "`sbatch --exclusive`, or from a cloud provider dedicated processors.",
        )
