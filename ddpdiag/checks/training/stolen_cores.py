"""Use of the ranks' cores by processes outside the run during training; for TRN001, and for stragglers of TRN003."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from ddpdiag.checks.api import Seen
from ddpdiag.checks.hosts import names_text, ranks_text
from ddpdiag.model import Finding
from ddpdiag.probes.host.programs import BusyProcess, CoreUse
from ddpdiag.text import begun, count, share_text

D = TypeVar("D")
# The least share of the ranks' cores that others use, and of a rank's time in which it waits for a core, in a finding.
# A busy process that shares two cores with two ranks uses half of the cores. Its fair share is a third, but ranks also
# wait for messages (tests/benchmarks/stolen_cores.py). A rank that waits for a tenth of its time is 1.1 times slower;
# from this ratio on, TRN003 calls a rank a straggler.
MIN_OTHERS_SHARE, MIN_WAITED_SHARE = 0.2, 0.1
# A choice, not measured: if ranks are more than cores, ranks wait for each other, so the limit of the share is doubled.
_CROWDED_FACTOR = 2.0
# A choice, not measured: if a smaller share of the cores was busy, ranks waited for another reason, such as a quota.
_MIN_BUSY_SHARE = 0.75
# A process that used less than this share of a core is not named.
_MIN_PROCESS_CORES = 0.05


class MachineCores(NamedTuple):
    """The use of those cores of a machine on which its `ranks` may run; `core_count` is their number.

    Average numbers of cores in use: `busy_cores` by all processes, `others_cores` by processes outside the run, and
    `steal_cores` by other virtual machines. `processes` are the busiest outside the run. `waited_shares` is, by rank,
    the share of the rank's runnable time in which it waited for a core (0 if the kernel does not report it).
    """

    ranks: tuple[int, ...]
    core_count: int
    busy_cores: float
    others_cores: float
    steal_cores: float
    waited_shares: dict[int, float]
    processes: tuple[BusyProcess, ...]

    @property
    def others_share(self) -> float:
        """The share of these cores that other processes and other virtual machines used."""
        return (self.others_cores + self.steal_cores) / self.core_count


def cores_by_machine(seen: Seen[D], uses: Mapping[int, CoreUse]) -> Iterator[MachineCores]:
    """Yield the use of cores on each machine if all its ranks measured. Containers with one boot id share a machine."""
    ranks_by_machine: dict[object, list[int]] = {}
    for rank, arrival in seen.world.arrivals.items():
        ranks_by_machine.setdefault(arrival.host_id or arrival.host, []).append(rank)
    for ranks in ranks_by_machine.values():
        if all(rank in uses for rank in ranks) and (machine := _machine_cores(seen, ranks, uses)) is not None:
            yield machine


def _machine_cores(seen: Seen[D], ranks: Sequence[int], uses: Mapping[int, CoreUse]) -> MachineCores | None:
    """The use of the cores of a machine's ranks, from the first rank that measured all cores; None if none did."""
    host_use = next((uses[rank] for rank in ranks if uses[rank].busy_seconds), None)
    if host_use is None or not (cores := _core_indices(seen, ranks) & host_use.busy_seconds.keys()):
        return None
    workers = {uses[rank].pids[0] for rank in ranks}
    # The processes of the run: supervisors, workers, and the servers from which workers are forked.
    run_pids = {seen.world.arrivals[rank].pid for rank in ranks} | {pid for rank in ranks for pid in uses[rank].pids}
    busy_cores = sum(host_use.busy_seconds[core] for core in cores) / host_use.seconds
    own_cores = sum(uses[rank].own_seconds / uses[rank].seconds for rank in ranks)
    own_cores += sum(process.cores for process in host_use.processes if process.pid in run_pids - workers)
    return MachineCores(
        ranks=tuple(ranks),
        core_count=len(cores),
        busy_cores=busy_cores,
        others_cores=max(0.0, busy_cores - own_cores),
        steal_cores=sum(host_use.steal_seconds.get(core, 0.0) for core in cores) / host_use.seconds,
        waited_shares={rank: uses[rank].waited_share or 0.0 for rank in ranks},
        processes=tuple(
            process
            for process in host_use.processes
            if process.cores >= _MIN_PROCESS_CORES and process.last_core in cores and process.pid not in run_pids
        ),
    )


def _core_indices(seen: Seen[D], ranks: Sequence[int]) -> set[int]:
    """The indices of the cores on which these ranks may run."""
    masks = {int(seen.world.arrivals[rank].cpu_mask or "0", 16) for rank in ranks}
    return {core for mask in masks for core in range(mask.bit_length()) if mask >> core & 1}


def intruding_processes(seen: Seen[D], rank: int, uses: Mapping[int, CoreUse]) -> tuple[BusyProcess, ...]:
    """Busy processes that are not the run's, on the cores of `rank`. Empty if the rank hardly waited for a core."""
    machine = next((machine for machine in cores_by_machine(seen, uses) if rank in machine.ranks), None)
    if machine is None or machine.waited_shares[rank] < MIN_WAITED_SHARE:
        return ()
    cores = _core_indices(seen, [rank])
    return tuple(each for each in machine.processes if each.last_core in cores and each.cores >= MIN_OTHERS_SHARE)


def processes_text(processes: Sequence[BusyProcess]) -> str:
    """The processes in words, such as "pid 4711 (python burn.py, user root) used 0.70 cores"."""
    return "; ".join(f"pid {p.pid} ({p.command}, user {p.user}) used {p.cores:.2f} cores" for p in processes)


def stolen_core_findings(
    seen: Seen[D], uses: Mapping[int, CoreUse], others_share: float, waited_share: float
) -> Iterator[Finding]:
    """Findings on machines where others use at least `others_share` of the ranks' cores (twice that if ranks share
    cores), and where this delays ranks: a rank waits for a core in at least `waited_share` of its time while the cores
    are busy, or most of what others use is steal time."""
    for machine in cores_by_machine(seen, uses):
        min_share = others_share * (_CROWDED_FACTOR if len(machine.ranks) > machine.core_count else 1)
        waiting_rank, wait_share = max(machine.waited_shares.items(), key=lambda item: item[1])
        delays_ranks = wait_share >= waited_share and machine.busy_cores >= _MIN_BUSY_SHARE * machine.core_count
        if machine.others_share < min_share or not (delays_ranks or machine.steal_cores > machine.others_cores):
            continue
        hosts = seen.world.host_names(machine.ranks)
        hosts_text, names = names_text(hosts), begun(processes_text(machine.processes))
        names = names or "No busy process is visible: it has ended, or is in another container"
        steal = machine.steal_cores
        steal_text = f", and other virtual machines {steal:.1f} (steal time)" if steal >= _MIN_PROCESS_CORES else ""
        yield seen.finding(
            "stolen-cores",
            f"others use {share_text(machine.others_share)} of the cores of {hosts_text}",
            f"While {ranks_text(machine.ranks)} on {hosts_text} trained, other processes used "
            f"{machine.others_cores:.1f} of their {count(machine.core_count, 'core')}{steal_text}. Rank {waiting_rank} "
            f"waited for a core in {share_text(wait_share)} of the time in which it could run. {names}.",
            hosts=hosts,
            evidence={
                "others_share": machine.others_share,
                "cores": machine.core_count,
                "waited_share": wait_share,
                # Without the others, the ranks could have used these cores as well. The time for which a rank waited
                # is longer, because ranks also wait for each other.
                "slower_share": (machine.others_cores + steal) / (machine.busy_cores + steal),
                "pids": [process.pid for process in machine.processes],
            },
            fix=f"Run `top` on {hosts_text}, and end what need not run there. Or ask for cores that no other job has: "
            "`sbatch --exclusive`, or from a cloud provider dedicated processors.",
        )
