"""Soak: fixed-seed steps whose results differ between ranks in one bit.

`ddpdiag check --soak 30m` runs this check, after the other measurements. All ranks compute the same steps with
deterministic algorithms: a matrix product, whose dtype changes, and some steps of training. All-reduces and broadcasts
of known values follow, of 20 B to 4 MiB. After each step the ranks compare digests of all bits. In the first step with
a difference each rank repeats its part twice: a rank that differs from itself is at fault, even if there are only two.

Why: a processor or memory that computes a wrong value now and then raises no error. The next all-reduce spreads the
value to all ranks, and the loss diverges much later.

Only ranks on equal devices are compared (model of GPU or CPU, threads, driver, torch): others may round differently.
The soak has parts of one to ten minutes. A hang ends it `deadline_seconds` after the end of a part, a difference at the
end of its part. A finding lists the counters that HST006 and GPU010 read before and after, if they rose. A soak without
a difference is no proof: synthetic tests missed more than 60 % of the GPUs that corrupted real trainings (SDCHunter).

Findings:

Causes: a faulty GPU, core or memory module; heat or low voltage. Fix: exclude the named host, and have it tested.

Confirm by hand: `dcgmi diag -r 4` on the GPU; `stress-ng --matrix 0 --verify` and `memtester` on the host.

Sources: SDCHunter (ByteDance, OSDI 2026); Dixit et al., Silent data corruptions at scale, arXiv 2102.11245;
docs.pytorch.org/docs/stable/notes/randomness.html.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from msgspec import structs

from ddpdiag.checks.api import CONNECT_SECONDS_PER_RANK, Check, Scope, Seen, SkipReason, Stage, blocked, new_trial
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.gpu import counters as gpu_counters
from ddpdiag.checks.gpu import memory_errors
from ddpdiag.checks.gpu.signs import COUNTERS
from ddpdiag.checks.host import network_ports
from ddpdiag.checks.hosts import leave_out, names_text, ranks_text, subject_text
from ddpdiag.checks.p2p.fallback import check as fallback
from ddpdiag.checks.world import ONE_RANK_REASON, no_gpu_reason
from ddpdiag.model import Finding, Kind, Status, Trial
from ddpdiag.model.measurements import Soak, SoakDifference
from ddpdiag.model.trial import Context
from ddpdiag.stats import OddRanks, find_odd_ranks
from ddpdiag.text import begun, count, size_text

FINDINGS = {
    "differs": FindingSpec.error(
        "a rank computed or received other bits than most ranks on equal devices, or computed other bits than itself "
        "in a repetition. Of two ranks that both agree with themselves, none is blamed."
    ),
    "wrong": FindingSpec.error("all ranks received the same wrong values in a collective, so none is blamed."),
    "tried": FindingSpec.note("the number of steps and collectives that were compared, and their bytes."),
    "incomplete": FindingSpec.unchecked(
        "the budget ended the soak early, or a rank has a device like no other rank's, so its bits were not compared."
    ),
}
# A hang is found at the end of a part. The recording has a line per rank and part, so a long soak has long parts.
_MIN_PART_SECONDS, _MAX_PART_SECONDS, _USUAL_PARTS = 60.0, 600.0, 20
_PART_OVERHEAD_SECONDS = 3.0  # to open the group, and to load the inputs
_RESERVE_SECONDS = 5.0  # from the end of a part to that of the budget
_COMPLETE_SHARE = 0.95
_COLLECTIVES_PER_STEP = 3  # an all-reduce, a broadcast, and the exchange of digests

Data = Soak


def part_count(soak_seconds: float) -> int:
    """The number of parts of equal length into which a soak is divided."""
    part_seconds = min(_MAX_PART_SECONDS, max(_MIN_PART_SECONDS, soak_seconds / _USUAL_PARTS))
    return math.ceil(soak_seconds / part_seconds)


def extra_budget_seconds(soak_seconds: float, world_size: int) -> float:
    """The seconds by which the default budget grows for a soak: its length, and the overhead of its parts."""
    overhead = _PART_OVERHEAD_SECONDS + CONNECT_SECONDS_PER_RANK * world_size
    return math.ceil(soak_seconds + part_count(soak_seconds) * overhead)


def plan(seen: Seen[Data]) -> Sequence[Trial]:
    """Plan the next part, unless a part failed or had a difference, or the budget leaves too little time."""
    soak_seconds, done = seen.options.soak_seconds or 0.0, len(seen.trials)
    is_over = done >= part_count(soak_seconds) or not all(map(seen.succeeded, seen.trials))
    part_seconds = soak_seconds / max(1, part_count(soak_seconds))
    seconds = min(part_seconds, seen.left_seconds - _RESERVE_SECONDS)
    if is_over or any(row.data.different_steps for row in seen.rows) or (done and seconds < 1):
        return ()
    params: dict[str, str | int | float | bool] = {
        "backend": seen.world.backend,
        "seconds": max(1.0, seconds),
        "before_seconds": done * part_seconds,
        "first_step": int(_total(seen, "steps")) + 1,
    }
    trial = new_trial(seen, params=params, env=fallback.job_workarounds(seen))
    return (structs.replace(trial, deadline_seconds=trial.deadline_seconds + part_seconds),)


def skip(seen: Seen[Data]) -> SkipReason | None:
    """Skip with one rank, without needed GPUs, or if the backend fails."""
    reason = ONE_RANK_REASON if seen.world.size == 1 else no_gpu_reason(seen.world)
    return blocked(reason) or fallback.skip_failing_backend(seen)


def measure(ctx: Context) -> Data:
    from ddpdiag.workloads import mnist
    from ddpdiag.workloads.group import process_group
    from ddpdiag.workloads.soak import deterministic, run_steps

    params = ctx.trial.params

    def report(part: Soak) -> None:
        seconds = float(params["before_seconds"]) + part.seconds
        steps = f"{int(params['first_step']) + part.steps - 1:,} steps"
        different = f", {part.different_steps:,} different" if part.different_steps else ""
        ctx.report(part, f"{seconds:.0f} of {ctx.options.soak_seconds or 0.0:.0f} s soaked, {steps}{different}")

    ctx.step("read the digits")
    digits = mnist.load()
    with process_group(ctx, str(params["backend"])) as device, deterministic():
        return run_steps(ctx, digits, device, int(params["first_step"]), float(params["seconds"]), report)


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    """Findings about the first step with a difference, about missing comparisons, and a note on all that was tried."""
    steps, seconds, wanted = _total(seen, "steps"), _total(seen, "seconds"), seen.options.soak_seconds or 0.0
    differing = {row.place.rank: row.data for row in seen.all_rows if row.data.first_difference is not None}
    if differing:
        yield from _difference_findings(seen, differing)
    if not steps:
        return
    by_rank = {row.place.rank: row.data.device for row in seen.all_rows}
    devices = Counter(by_rank.values())
    alone = [rank for rank, device in by_rank.items() if devices[device] == 1]
    is_short = seconds < _COMPLETE_SHARE * wanted and all(o.status is Status.DONE for o in seen.outcomes)
    if alone or (is_short and not differing):
        yield seen.finding(
            "incomplete",
            "the soak could not compare all that was requested",
            f"No other rank has the same device as {ranks_text(alone)}, and only equal devices give equal bits: "
            f"{names_text([f'rank {rank} has {by_rank[rank]}' for rank in alone], limit=4)}."
            if alone
            else f"The budget left {seconds:.0f} s for the soak; --soak requested {wanted:.0f} s.",
            fix="Run the soak on hosts of one kind, with one driver, one version of torch and equal OMP_NUM_THREADS."
            if alone
            else "Run again with a longer --budget, or without it: then it grows with --soak.",
            is_about_run=True,
        )
    yield seen.finding(
        "tried",
        f"the soak compared {count(int(steps), 'step')}",
        f"{_tried_text(seen)}. {'' if differing else 'All compared bits were equal. '}Synthetic tests miss most silent "
        "corruption, so this does not prove that each host computes right.",
        evidence={
            "steps": int(steps),
            "collectives": int(steps) * _COLLECTIVES_PER_STEP,
            "bytes": int(_total(seen, "bytes")),
            "seconds": seconds,
            "devices": [f"{number} x {device}" for device, number in devices.items()],
        },
    )


def _total(seen: Seen[Data], name: str) -> float:
    """The sum of a field over all parts of the soak, of the rank that did least in each part."""
    by_trial: dict[int, list[float]] = defaultdict(list)
    for row in seen.all_rows:
        by_trial[row.trial.number].append(getattr(row.data, name))
    return sum(map(min, by_trial.values()))


def _tried_text(seen: Seen[Data]) -> str:
    steps, ranks = int(_total(seen, "steps")), len({row.place.rank for row in seen.all_rows})
    return (
        f"Tried: {count(steps, 'step')} with {_COLLECTIVES_PER_STEP} collectives each "
        f"({size_text(_total(seen, 'bytes'))}) on {count(ranks, 'rank')}, in {_total(seen, 'seconds'):.0f} s of the "
        f"{seen.options.soak_seconds or 0.0:.0f} s requested"
    )


def _difference_findings(seen: Seen[Data], differing: Mapping[int, Data]) -> Iterator[Finding]:
    """Yield a finding for each result and each collective that was wrong in the first step with a difference."""
    firsts = {rank: data.first_difference for rank, data in differing.items() if data.first_difference is not None}
    step = min(first.step for first in firsts.values())
    firsts = {rank: first for rank, first in firsts.items() if first.step == step}
    by_device: dict[str, dict[int, SoakDifference]] = defaultdict(dict)
    for rank, first in firsts.items():
        by_device[differing[rank].device][rank] = first
    is_explained = False
    for device, of_device in by_device.items():
        for result in next(iter(of_device.values())).digests:
            if odd := find_odd_ranks({rank: first.digests[result] for rank, first in of_device.items()}):
                is_explained = True
                yield _odd_finding(seen, f"the {result} on equal devices ({device})", result, odd, of_device)
                break  # with a wrong gradient, the parameters are wrong as well
    if not is_explained:  # collectives give all ranks the same values, whatever their devices
        sample = next(iter(firsts.values()))
        for result in (name for name in sample.digests if not any(name in each for each in sample.repeated)):
            if odd := find_odd_ranks({rank: first.digests[result] for rank, first in firsts.items()}):
                is_explained = True
                yield _odd_finding(seen, f"the {result}", result, odd, firsts)
    if not is_explained:
        yield seen.finding(
            "wrong",
            f"collectives gave wrong values in step {step:,} of the soak",
            f"{begun(ranks_text([*firsts]))} saw it. The results of equal devices are equal, so either all ranks "
            f"received the same wrong values, or the exchange of the digests was wrong. {_tried_text(seen)}.",
            evidence={"step": step, "ranks": [*firsts]},
            fix="Run `ddpdiag check --select COL001 --depth standard`, which shows whose values arrive wrong.",
        )


def _odd_finding(
    seen: Seen[Data], subject: str, result: str, odd: OddRanks, firsts: Mapping[int, SoakDifference]
) -> Finding:
    """The finding that ranks have different bits in `result`. Without a majority, repetitions decide who is blamed."""
    step, repeats = next(iter(firsts.values())).step, {rank: first.repeated for rank, first in firsts.items()}
    if any(result in each for repeated in repeats.values() for each in repeated):
        unsteady = tuple(
            rank
            for rank, first in firsts.items()
            if any(each[result] != first.digests[result] for each in repeats[rank])
        )
        # If no rank agrees with itself, the step is not repeatable here, and that is the fault of no rank.
        blamed = odd.ranks or (unsteady if len(unsteady) < len(firsts) else ())
        others = ranks_text(unsteady) if unsteady else "no rank"
        more = f"When all repeated the step, {others} got other bits than before."
        test = "`dcgmi diag -r 4`" if seen.world.gpu_count else "`memtester`, `stress-ng --matrix 0 --verify`"
        decide = "Run the soak again with another equal rank: of three ranks, two show which one is wrong."
    else:  # a collective: a few receivers with wrong values, or the sender, who has the only right ones
        sender = result.rpartition("from rank ")[2]
        blamed = tuple(rank for rank in odd.ranks if int(firsts[rank].digests[result], 16) or str(rank) == sender)
        wrong = [f"{int(str(value), 16):,} on {ranks_text(ranks)}" for value, ranks in odd.by_value.items()]
        more = f"Wrong elements: {names_text(wrong)}."
        test = "`ddpdiag check --select COL001` shows whose values arrive wrong"
        decide = f"Look for the cause: {test}."
    sentence = f"{begun(ranks_text([*firsts]))} got different bits in {subject}"
    if blamed and blamed == odd.ranks:
        sentence = f"{begun(subject_text(seen, odd.ranks))} got other bits in {subject} than most ranks"
    hosts = seen.world.host_names(blamed)
    risen = names_text([*_risen_counters(seen)]) or "none that HST006 or GPU010 read"
    uuids = {row.place.rank: row.data.uuid for row in seen.all_rows}
    return seen.finding(
        "differs",
        f"{ranks_text(blamed) if blamed else 'a rank'} has different bits in step {step:,} of the soak",
        f"{sentence}, in step {step:,}. {more} {_tried_text(seen)}. Counters that rose meanwhile: {risen}.",
        ranks=blamed,
        gpus=[uuid for rank in blamed if (uuid := uuids[rank])],
        evidence={"step": step, "result": result, **{ranks_text(r): str(value) for value, r in odd.by_value.items()}},
        fix=f"{begun(leave_out(hosts))}, and have it tested ({test}). Results of jobs that ran there are suspect."
        if blamed
        else decide,
    )


def _risen_counters(seen: Seen[Data]) -> Iterator[str]:
    """Yield the counters of errors that rose during the run, as HST006, GPU003 and GPU010 read them on each host."""
    for host, pair in network_ports.readings_by_host(seen.of(network_ports.CHECK)):
        rises = {f"TCP {name}": pair.tcp_rises.get(name, 0) for name in ("RetransSegs", "InCsumErrors")}
        for before, after in pair.port_pairs():
            ends = after.counters if after is not None else {}
            rises |= {f"{before.name} {name}": ends.get(name, 0) - old for name, old in before.counters.items()}
        yield from (f"{name} on {host.name} by {rise:,}" for name, rise in rises.items() if rise > 0)
    last = {gpu.uuid: gpu for row in seen.of(gpu_counters.CHECK).rows for gpu in row.data.gpus}
    readings = (gpu for row in seen.of(memory_errors.CHECK).rows for gpu in row.data.gpus if gpu.uuid in last)
    for gpu in readings:
        for counter in COUNTERS:
            values = (counter.read(health).values() for health in (gpu, last[gpu.uuid]))
            begin, end = (sum(number or 0 for number in numbers) for numbers in values)
            if end > begin:
                yield f"{counter.noun}s of GPU {gpu.uuid} by {end - begin:,}"
    yield from (f"{own.code} ({own.title})" for own in seen.findings_of("GPU010") if own.code == "GPU010.slowdown")


# Beyond the time of each part: the start of a worker, the last step, which may be slow, and the end of the group.
CHECK: Check[Data] = Check(__name__, "TRN004", "soak", Stage.TRAINING, Scope.WORLD, Kind.TORCH, deadline=30)
