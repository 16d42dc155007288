"""A whole run of a simulated fleet: arrivals, the rounds that are planned, and what each rank would have answered.

Nothing is measured and nobody waits. The recording is one as any other: `ddpdiag judge` reads it.
"""

from collections.abc import Iterator, Sequence

from msgspec import Raw, structs

from ddpdiag.bandwidth import NETWORK_SHARE, factor
from ddpdiag.checks.api import Seen
from ddpdiag.checks.fabric.gpus import check as gpus
from ddpdiag.checks.fabric.hosts import check as fab001
from ddpdiag.checks.fabric.hosts.data import Data
from ddpdiag.checks.world import World
from ddpdiag.codec import encode
from ddpdiag.model import Arrival, Options, Outcome, Place, Recording, Status, Trial
from ddpdiag.model.bench import Limits
from ddpdiag.model.recording import End, Header, Skip
from ddpdiag.model.trial import spent_seconds
from ddpdiag.simulate.fleet import Fleet
from ddpdiag.stats import Samples

_BYTES = 64 << 20
# What a pair of hosts needs, beside the calls: to meet, to open a group, to connect.
_ROUND_SECONDS = 3.0
_HANG_SECONDS = 10.0


def simulate(
    fleet: Fleet, *, ranks_per_host: int = 1, options: Options | None = None, run_id: str = "sim"
) -> Recording:
    """The recording of one run; the same for the same fleet, seed and run id."""
    ranks = fleet.hosts * ranks_per_host
    wanted = options or Options(stages=("fabric",), backend="nccl")
    header = Header(run_id=run_id, world_size=ranks, launcher="simulated", options=wanted, created="", version="")
    arrivals = dict(_arrivals(fleet, ranks_per_host))
    world = World(size=ranks, launcher="simulated", options=wanted, arrivals=arrivals)
    known = Recording(header=header, arrivals=arrivals)
    for check in (fab001.CHECK, gpus.CHECK):
        while planned := check.plan(Seen(world, check, known)):
            known = _tried(fleet, known, planned, ranks_per_host)
        seen = Seen(world, check, known)
        reason = check.ground(world) or (check.moot(seen) if check.moot is not None and not seen.trials else None)
        if reason:
            skip = Skip(code=check.code, reason=reason, grounds=True)
            known = structs.replace(known, skips=(*known.skips, skip))
    seconds = spent_seconds(known.outcomes)
    # No budget ends what takes no time, so the run had at least what it took.
    given = structs.replace(wanted, budget_seconds=max(wanted.budget_seconds, seconds))
    return structs.replace(known, header=structs.replace(header, options=given), end=End(seconds=seconds))


def _tried(fleet: Fleet, known: Recording, planned: Sequence[Trial], ranks_per_host: int) -> Recording:
    """The run after these trials as well."""
    trials, outcomes = [*known.trials], [*known.outcomes]
    for trial in planned:
        begin = spent_seconds(outcomes)
        numbered = structs.replace(trial, number=len(trials) + 1, begin_seconds=begin)
        trials.append(numbered)
        outcomes += outcomes_of(fleet, numbered, ranks_per_host)
    return structs.replace(known, trials=tuple(trials), outcomes=tuple(outcomes))


def host_name(host: int) -> str:
    """Such as "n0007"."""
    return f"n{host:04d}"


def _arrivals(fleet: Fleet, ranks_per_host: int) -> Iterator[tuple[int, Arrival]]:
    for host in range(fleet.hosts):
        name, address = host_name(host), f"10.{host >> 16}.{host >> 8 & 255}.{host & 255}"
        for local_rank in range(ranks_per_host):
            rank = host * ranks_per_host + local_rank
            place = Place(
                rank=rank,
                world_size=fleet.hosts * ranks_per_host,
                node=name,
                launcher="simulated",
                local_rank=local_rank,
                local_world_size=ranks_per_host,
                node_rank=host,
            )
            yield rank, Arrival(place=place, host_id=name, pid=1000 + rank, address=address, gpus=ranks_per_host)


def outcomes_of(fleet: Fleet, trial: Trial, ranks_per_host: int) -> Iterator[Outcome]:
    """What every rank of a trial would have answered, one after the other."""
    fleet.next_round()
    # Cards for what is usual, so that a fleet far below is seen to be.
    nominal = fleet.usual / NETWORK_SHARE
    limits = Limits(nic="8 rails", nic_bytes_per_s=nominal, nic_ports=8, nic_port_bytes_per_s=nominal / 8)
    for group in trial.groups:
        hosts = sorted({rank // ranks_per_host for rank in group})
        if not fleet.ends(hosts):
            yield from _hung(fleet, trial, group, ranks_per_host)
            continue
        inside = tuple(rank % ranks_per_host for rank in group) if len(hosts) == 1 else ()
        data = Raw(encode(_data(len(group), fleet.rate(hosts, inside), limits)))
        for rank in group:
            yield Outcome(
                trial=trial.number, code=trial.code, rank=rank, status=Status.DONE, data=data, seconds=_ROUND_SECONDS
            )


def _data(ranks: int, rate: float, limits: Limits) -> Data:
    seconds = _BYTES * factor("all_reduce", ranks) / rate
    samples = Samples(min=seconds, median=1.005 * seconds, p95=1.02 * seconds, count=6)
    return Data(ranks, _BYTES, samples, limits=limits)


def _hung(fleet: Fleet, trial: Trial, group: tuple[int, ...], ranks_per_host: int) -> Iterator[Outcome]:
    for rank in group:
        host = rank // ranks_per_host
        status = Status.DIED if host in fleet.dead else Status.HUNG
        yield Outcome(
            trial=trial.number,
            code=trial.code,
            rank=rank,
            status=status,
            at="all_reduce",
            error="exit code -11" if status is Status.DIED else "",
            seconds=_HANG_SECONDS,
        )
