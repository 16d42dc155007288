"""Copies between the GPUs of a host, and to its memory: right values, and rates.

One rank of each host copies between the GPUs of the host's ranks: first between each GPU and the host's memory, then
over one ordered pair of GPUs after the other. Every 32-bit word of a copy depends on its position and its path, and is
compared on arrival: CUDA and NVML also allow peer-to-peer access that an IOMMU or ACS breaks. A copy has 64 MiB between
GPUs and 32 MiB to or from the host, or less if that takes too long. A rate is that of the fastest of several batches,
timed by CUDA events. The host's memory is on the GPU's NUMA node, if the firmware names that node.

A copy between two GPUs through pinned memory of the host cannot be faster than the slower of their two links to the
host. This copy is measured only if the direct copy is below `indirect_ratio` of that, wrong, or without peer access.

torch cannot switch peer access off again in a process, so "without P2P" is the copy through pinned memory, as NCCL does
it with NCCL_P2P_DISABLE=1. If each rank sees only its own GPU (Slurm --gpus-per-task), no process can copy between two
GPUs. Then only the links to the host are measured, one rank after the other.

Findings and their causes:

Fix: NCCL_P2P_DISABLE=1 makes NCCL go through the host's memory; turn ACS off, and the IOMMU off or to `iommu=pt`.

Confirm by hand: CUDA samples' p2pBandwidthLatencyTest and simpleP2P; `nvbandwidth`; if ACS is suspected, both
with and without it.

Sources: PyTorch issue 84803; CUDA C++ programming guide, peer-to-peer memory access; NVIDIA nvbandwidth
(github.com/NVIDIA/nvbandwidth).
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from statistics import median

from ddpdiag.checks.api import Check, Contribution, Scope, Seen, SkipReason, Stage, new_trial, unneeded
from ddpdiag.checks.failure_evidence import crash_line, state_text
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.gpu import devices as gpu002
from ddpdiag.checks.hosts import Host, hosts_of, leave_out, names_text
from ddpdiag.checks.known_errors import cause_in
from ddpdiag.checks.launch import variables
from ddpdiag.checks.p2p.copies.judge import (
    ACS_FIX,
    HOST_MEMORY,
    NO_P2P_FIX,
    REPEAT_PREFIX,
    RankCopies,
    copies_by_rank,
    is_repetition,
    links_to_repeat,
    slow_findings,
    wrong_findings,
)
from ddpdiag.checks.p2p.fallback import check as fallback
from ddpdiag.checks.rates import FAR_BELOW_SHARE
from ddpdiag.model import EventKind, Finding, Kind, Matrix, Outcome, Scalar, Status, Trial
from ddpdiag.model.measurements import NO_PEERS_LEFT, Copies, GpuCopies
from ddpdiag.model.trial import CONTEXT_STEP, Context
from ddpdiag.probes.gpu.nvml import EXCLUSIVE

_NO_P2P_VARIABLE = "NCCL_P2P_DISABLE"
# Findings on copies between two GPUs. They are errors only for a job that makes such copies.
_PAIR_FINDINGS = ("P2P002.wrong", "P2P002.slow", "P2P002.hung", "P2P002.died", "P2P002.raised")

FINDINGS = {
    "wrong": FindingSpec.error(
        "words differ after a copy between two GPUs. Data is lost without an error, so a job may train on wrong values."
    ),
    "host-wrong": FindingSpec.error(
        "words differ after a copy between a GPU and the host: the GPU, its link or the host's memory."
    ),
    **dict.fromkeys(
        ("hung", "died", "raised", "unheard"),
        FindingSpec.error("a copy did not end, or ended its process; the step names the GPUs."),
    ),
    "slow": FindingSpec(
        "less than `far_ratio` of what the NVLinks or the PCIe switch between two GPUs carry, `slow_ratio` of what "
        "most GPUs of the host reach on paths of the same kind (with or without peer access), `asymmetric_ratio` of "
        "the other direction, or `indirect_ratio` of the rate through the host's memory (try NCCL_P2P_DISABLE=1; paths "
        "across a processor do not count, unless it is of AMD and the host has two ranks: NCCL uses the host's memory "
        "there by itself). Between groups of GPUs (sockets, bridges) it is a note. An error below `far_ratio` of the "
        "links or of other paths like it, where it was measured twice and nothing else uses the GPUs; a note where the "
        "second measurement is fast enough."
    ),
    "host-slow": FindingSpec(
        "less than `host_slow_ratio` of GPUs of that model on the host, or than `expected_ratio` of what copies reach "
        "over such a slot (not in a virtual machine, whose bus is made up): half of the lanes, a lower generation. A "
        "warning; an error below `far_ratio` of these GPUs, where it was measured twice and nothing else uses the GPU."
    ),
    "unmeasured": FindingSpec.unchecked(
        "there was no time for all copies, or torch shows no GPU where some are expected, so that there is nothing to "
        "copy between (GPU001 and GPU002 find out why)."
    ),
    "untested": FindingSpec.note(
        "one process cannot copy between all GPUs: ranks see GPUs of their own, or use them exclusively, or there are "
        "more than the 8 peers that CUDA allows a GPU in one process (NVSwitches do not count).",
        same_item=True,
    ),
}

_VERBS = {
    Status.HUNG: "does not end",
    Status.DIED: "ended its process",
    Status.RAISED: "failed",
    Status.UNHEARD: "gave no result",
}
_GPU = re.compile(r"GPU (\d+)")


def measure(ctx: Context) -> Copies:
    """Measure all copies of this rank, or in a repetition the links that the trial's parameters name."""
    ctx.step(CONTEXT_STEP)
    from ddpdiag.workloads.copies import CudaDevices, measure_copies

    # Each rank uses cuda:local_rank; GPUs with higher numbers may belong to another job, and be full and busy.
    devices = CudaDevices(ctx.place.local_world_size)
    if not devices.count:
        return Copies()  # other checks report why this rank has no GPU
    words = str(ctx.trial.params.get(f"{REPEAT_PREFIX}{ctx.place.rank}", "")).split()
    selected_jobs = tuple(tuple(map(int, word.split(">"))) for word in words)  # as `links_to_repeat` writes them
    return measure_copies(devices, ctx, selected_jobs=selected_jobs, indirect_ratio=SETTINGS["indirect_ratio"])


def plan(seen: Seen[Copies]) -> Sequence[Trial]:
    """Plan one rank of each host at a time, until all GPUs were covered; last, measure slow links again."""
    measured_ranks = {rank for trial in seen.trials for rank in trial.ranks}
    candidates = [set(_measuring_ranks(seen, host)) - measured_ranks for host in hosts_of(seen) if host.gpu_count]
    ranks = [min(ranks_of_host) for ranks_of_host in candidates if ranks_of_host]
    params: dict[str, int | str] = {}
    if not ranks and not any(map(is_repetition, seen.trials)):
        all_copies = copies_by_rank(seen)
        slow_links = {copies.rank: links_to_repeat(seen, copies, all_copies) for copies in all_copies}
        ranks = [rank for rank, links in slow_links.items() if links and rank in seen.world.living_ranks]
        params = {f"{REPEAT_PREFIX}{rank}": slow_links[rank] for rank in ranks}
    groups = tuple((rank,) for rank in ranks)
    return (new_trial(seen, groups=groups, params=params, may_fail=True),) if groups else ()


def skip(seen: Seen[Copies]) -> SkipReason | None:
    """Skip if GPU002 is skipped, or if torch shows no GPU to any rank."""
    is_without_gpus = not seen.trials and not plan(seen)
    return gpu002.skip(seen) or unneeded(gpu002.NO_GPU_IN_TORCH if is_without_gpus else None)


def _measuring_ranks(seen: Seen[Copies], host: Host) -> Iterator[int]:
    """Yield ranks that together see all GPUs of the host. GPU002 recorded the GPUs that torch shows to each rank."""
    shown_by_torch = seen.of(gpu002.CHECK)
    living = [rank for rank in host.ranks if rank in seen.world.living_ranks]
    gpus_by_rank = {
        rank: {gpu.uuid or f"{rank} {index}" for index, gpu in enumerate(shown_by_torch.by_rank[rank].gpus)}
        for rank in living
        if rank in shown_by_torch.by_rank
    }
    if not shown_by_torch.trials:
        # GPU002 did not run. Assume that all ranks see the same GPUs if a rank has several, else a different one each.
        gpu_counts = {rank: seen.world.arrivals[rank].gpus for rank in living}
        ranks_see_all = max(gpu_counts.values(), default=0) > 1
        gpus_by_rank = {rank: {"all"} if ranks_see_all else {str(rank)} for rank in living if gpu_counts[rank]}
    covered_gpus: set[str] = set()
    for rank in sorted(gpus_by_rank, key=lambda rank: (-len(gpus_by_rank[rank]), rank)):
        if gpus_by_rank[rank] - covered_gpus:
            yield rank
        covered_gpus |= gpus_by_rank[rank]


def judge(seen: Seen[Copies]) -> Iterator[Finding]:
    all_copies = copies_by_rank(seen)
    yield from failure_findings(seen, all_copies)
    for copies in all_copies:
        yield from wrong_findings(seen, copies)
        yield from slow_findings(seen, copies, all_copies)
    yield from unmeasured_findings(seen, all_copies)
    yield from untested_findings(seen, all_copies)


def failed_outcomes(seen: Seen[Copies]) -> tuple[Outcome, ...]:
    """Outcomes of ranks that failed, without ranks that the run itself stopped (`interrupted`)."""
    return tuple(o for o in seen.outcomes if o.status in _VERBS and not o.interrupted)


def failure_findings(seen: Seen[Copies], all_copies: Sequence[RankCopies]) -> Iterator[Finding]:
    """One finding for each rank whose copies failed, unless the rank was lost or another finding reports it."""
    by_rank = {copies.rank: copies for copies in all_copies}
    lost_ranks = {event.rank for event in seen.recording.events if event.kind is EventKind.LOST}
    for outcome in failed_outcomes(seen):
        copies = by_rank.get(outcome.rank)
        is_unfinished = copies is not None and was_making_progress(seen, outcome)
        if outcome.rank not in lost_ranks and not is_unfinished and not _is_gpu_busy(outcome, copies):
            yield _failure_finding(seen, outcome, copies)


def _is_gpu_busy(outcome: Outcome, copies: RankCopies | None) -> bool:
    """Whether the copies failed because the GPUs allow one process each (compute mode 'exclusive process', GPU008)."""
    modes = [card.health.compute_mode for card in copies.cards.values()] if copies is not None else []
    return "busy or unavailable" in outcome.error and any(mode in EXCLUSIVE for mode in modes)


def was_making_progress(seen: Seen[Copies], outcome: Outcome) -> bool:
    """Whether a hung rank was still working at its deadline: not stopped, and under `hung_seconds` in its last step."""
    process = outcome.process
    if outcome.status is not Status.HUNG or process is None or (process.state or "") in "TtD":
        return False
    return process.step_seconds is not None and process.step_seconds < seen.setting("hung_seconds")


def _failure_finding(seen: Seen[Copies], outcome: Outcome, copies: RankCopies | None) -> Finding:
    host = seen.world.host_name(outcome.rank)
    step = copies.with_nvml_indices(outcome.last_step) if copies is not None else outcome.last_step
    gpus = tuple(dict.fromkeys(map(int, _GPU.findall(outcome.last_step)))) if copies is not None else ()
    is_pair = len(gpus) == 2 and "host" not in outcome.last_step
    what = f"'{step}'" if step else "copying between GPUs"
    verb = _VERBS[outcome.status]
    gpus_text = f": {', '.join(map(copies.full_label, gpus))}" if copies is not None and gpus else ""
    undone_text = ""
    if copies is not None and copies.jobs - copies.done > 1:
        undone_text = f" {copies.jobs - copies.done} of {copies.jobs} steps of this test were not done."
    # The known-error card for a full GPU is about a job's model and batch, which this test does not have.
    known_cause = None if "out of memory" in outcome.error else cause_in(outcome)
    return seen.finding(
        outcome.status.value,
        f"{what} {verb} on {host}",
        f"{what} {verb} on {host} (rank {outcome.rank}){gpus_text}.{_failure_text(outcome)}{undone_text}",
        ranks=(copies.ranks_of(gpus) if copies is not None else ()) or (outcome.rank,),
        hosts=(host,),
        gpus=copies.uuids(gpus) if copies is not None else (),
        evidence=_evidence(outcome, step),
        fix=_fix(outcome, host, is_pair=is_pair),
        known_error=known_cause,
    )


def _failure_text(outcome: Outcome) -> str:
    """A sentence on the failure (the state of the process if it hung, else the error) after a space, or empty."""
    process = outcome.process
    if outcome.status is Status.HUNG and process is not None:
        survived = " and survived SIGKILL" if process.survived else ""
        where = f", in {process.stack[0]}" if process.stack else ""
        since = f" after {process.step_seconds:.0f} s in that step" if process.step_seconds is not None else ""
        return f" Its process (pid {process.pid}) was still {state_text(process)}{survived}{where}{since}."
    words = outcome.error.partition("\n")[0].rstrip(".")
    return f" {words}." if words else ""


def _evidence(outcome: Outcome, step: str) -> dict[str, Scalar | list[Scalar]]:
    process = outcome.process
    return {
        "last_step": step,
        "rank": outcome.rank,
        "trial": outcome.trial,
        "seconds": round(outcome.seconds, 1),
        **({"pid": process.pid, "state": process.state, "wchan": process.wchan} if process else {}),
        **({"output": said} if (said := crash_line(outcome.detail)) else {}),
    }


def _fix(outcome: Outcome, host: str, *, is_pair: bool) -> str:
    process = outcome.process
    if process is not None and process.survived:
        return f"Reboot {host}, or reset the GPU that process {process.pid} waits for; the process cannot be killed."
    if process is not None and process.state == "T":
        return f"Run `kill -CONT {process.pid}` on {host}. Find what stopped it: a debugger or a suspended job."
    if "out of memory" in outcome.error:
        return f"End the process that uses the GPU's memory on {host} (`nvidia-smi`, `fuser -v /dev/nvidia*` as root)."
    xid_fix = f"Run `dmesg -T | grep -i xid` on {host}. If it shows one of these GPUs, {leave_out([host])}."
    other_fix = f"{NO_P2P_FIX} {ACS_FIX}" if is_pair else f"Otherwise reset the GPU as root, or reboot {host}."
    return f"{xid_fix} {other_fix}"


def unmeasured_findings(seen: Seen[Copies], all_copies: Sequence[RankCopies]) -> Iterator[Finding]:
    """Findings on hosts without a failure whose copies were not all measured: time ran out, or torch shows no GPU."""
    failed_ranks = {outcome.rank for outcome in failed_outcomes(seen) if not was_making_progress(seen, outcome)}
    hosts_with_gpus = {copies.host for copies in all_copies if copies.gpus}
    budget, deadline = seen.options.budget_seconds, seen.check.deadline
    for copies in all_copies:
        name, jobs_left = copies.host.name, copies.jobs - copies.done
        if jobs_left > 0 and copies.rank not in failed_ranks:
            why = f"the time was over before {jobs_left} of {copies.jobs} steps of this test"
            fix = (
                f"Run again with more time: --budget {2 * budget:.0f} --set {seen.check.code}.deadline_seconds="
                f"{2 * deadline:.0f}. Or find what keeps {name} busy (`top`)."
            )
        elif copies.host not in hosts_with_gpus and not copies.jobs:
            why = f"torch shows no GPU, {copies.host.gpu_count} expected from CUDA_VISIBLE_DEVICES or the driver's list"
            fix = (
                "Run `ddpdiag check --select GPU001,GPU002`, which finds the cause. To train on CPUs, set "
                "CUDA_VISIBLE_DEVICES= (empty)."
            )
        else:
            continue
        yield seen.finding(
            "unmeasured",
            "not all copies between GPUs were measured",
            f"{name}: {why}, so it is not known whether all copies work.",
            hosts=(name,) if jobs_left > 0 else (),
            evidence={"done": copies.done, "of": copies.jobs},
            fix=fix,
            is_about_run=True,
        )


def untested_findings(seen: Seen[Copies], all_copies: Sequence[RankCopies]) -> Iterator[Finding]:
    """Notes on hosts on which one process cannot copy between all GPUs, although nothing is at fault."""
    by_rank = {copies.rank: copies for copies in all_copies}
    failed = failed_outcomes(seen)
    busy = [by_rank[each.rank] for each in failed if _is_gpu_busy(each, by_rank.get(each.rank))]
    partial_views = [copies for copies in all_copies if not copies.sees_all_gpus]
    for limited, reason in (
        (partial_views, "each rank sees only some of the GPUs (Slurm: --gpu-bind=none)"),
        (busy, "the GPUs allow one process each (compute mode 'exclusive process', GPU008), and the ranks use them"),
        ([each for each in all_copies if each.refused], f"CUDA allows a GPU only 8 peers there ('{NO_PEERS_LEFT}')"),
    ):
        if hosts := list(dict.fromkeys(copies.host.name for copies in limited)):
            pairs = [copies.link_label(pair) for copies in limited for pair in copies.refused]
            yield seen.finding(
                "untested",
                "not all pairs of GPUs can be tested in one process",
                f"{names_text(hosts)}: {reason}. Only the collectives test the other pairs.",
                evidence={"hosts": [*hosts], "pairs": [*pairs]},
                fix="Nothing to do for the job.",
            )


def figures(all_copies: Sequence[RankCopies]) -> Mapping[str, Scalar]:
    """The lowest and the median rate of all pairs of GPUs, and of all links to and from the hosts' memory."""
    rates_by_figure: dict[str, Scalar] = {}
    for name, in_memory in (("p2p.copy", False), ("p2p.host", True)):
        rates = [rate for each in all_copies for link, rate in each.rates.items() if (HOST_MEMORY in link) is in_memory]
        if rates:
            rates_by_figure |= {f"{name}.min_bytes_per_s": min(rates), f"{name}.median_bytes_per_s": median(rates)}
    return rates_by_figure


def matrices(all_copies: Sequence[RankCopies]) -> Iterator[Matrix]:
    """Tables of rates: between GPUs for each rank with several GPUs, and between GPUs and memory for each host."""
    for copies in all_copies:
        if len(copies.gpus) > 1:
            gpus = copies.gpus_in_order
            labels = tuple(map(copies.label, gpus))
            rates = {link: pair.bytes_per_s for link, pair in copies.pairs.items()}
            yield Matrix(
                name=f"p2p.copy.{copies.host.name}{'' if copies.sees_all_gpus else f'.rank{copies.rank}'}",
                title="Copies between GPUs (P2P where CUDA allows it)",
                rows=labels,
                columns=labels,
                cells=tuple(tuple(rates.get((a, b)) for b in gpus) for a in gpus),
                unit="bytes_per_s",
                gpus=_uuids((copies.label(index), copies.gpus[index]) for index in gpus),
            )
    for host in dict.fromkeys(copies.host for copies in all_copies if copies.gpus):
        yield _host_matrix(host, [copies for copies in all_copies if copies.host == host])


def _host_matrix(host: Host, all_copies: Sequence[RankCopies]) -> Matrix:
    # Ranks may share a GPU, so the keys are UUIDs.
    gpus_by_key = {
        copies.gpus[index].uuid or (copies.rank, index): (copies.label(index), copies.gpus[index])
        for copies in all_copies
        for index in copies.gpus_in_order
    }
    gpus = list(gpus_by_key.values())
    return Matrix(
        name=f"p2p.host.{host.name}",
        title="Copies between the host's memory and its GPUs",
        rows=("to-device", "from-device"),
        columns=tuple(label for label, _ in gpus),
        cells=(tuple(gpu.to_bytes_per_s for _, gpu in gpus), tuple(gpu.from_bytes_per_s for _, gpu in gpus)),
        unit="bytes_per_s",
        gpus=_uuids(gpus),
    )


def _uuids(gpus: Iterable[tuple[str, GpuCopies]]) -> dict[str, str]:
    return {label: gpu.uuid for label, gpu in gpus if gpu.uuid}


def excuse(seen: Seen[Copies], finding: Finding) -> str | None:
    """The reason why a finding on copies between GPUs is no error (the job works without such copies), or None."""
    if finding.code not in _PAIR_FINDINGS or not _job_avoids_p2p(seen):
        return None
    return "NCCL_P2P_DISABLE=1 is set for the job, so that NCCL makes no such copies, and it works."


@lru_cache(maxsize=1)
def _job_avoids_p2p(seen: Seen[Copies]) -> bool:
    """Whether the job's NCCL makes no copies between GPUs, by P2P003's workarounds or by variables on all ranks."""
    if seen.options.uses_workarounds and fallback.job_workarounds(seen).get(_NO_P2P_VARIABLE) == "1":
        return True
    rows = seen.of(variables.CHECK).by_rank
    is_set_everywhere = bool(rows) and all(row.variables.get(_NO_P2P_VARIABLE) == "1" for row in rows.values())
    return is_set_everywhere and seen.job_backend_works


def report(seen: Seen[Copies]) -> Contribution:
    all_copies = copies_by_rank(seen)
    return Contribution(excuse=partial(excuse, seen), figures=figures(all_copies), matrices=tuple(matrices(all_copies)))


Data = Copies
SETTINGS = {
    # Both directions of PCIe and NVLink are alike; nvbandwidth shows them within some percent of each other.
    "asymmetric_ratio": 0.7,
    # Half the rate means that a part is missing (x8, a PCIe generation, one link of two). Noise is smaller.
    "slow_ratio": 0.5,
    # See `FAR_BELOW_SHARE`.
    "far_ratio": FAR_BELOW_SHARE,
    # Eight A40 were faster with peer-to-peer off (nccl-tests issue 74). A tenth is noise. A larger value takes effect
    # only where copies through the host were measured.
    "indirect_ratio": 0.9,
    # x8 gives 0.5. GPUs of one host differ by less than 0.1, or by up to 0.3 if the memory is at the other socket.
    "host_slow_ratio": 0.6,
    # AzNHC fails below 76 to 87 % of this expectation; clouds and old boards reach 60 to 70 %.
    "expected_ratio": 0.5,
    # A step takes less than a second on the slowest link that works.
    "hung_seconds": 5.0,
}
# On 8 GPUs the contexts take about 3 s, and 16 links to the host and 56 between GPUs less than 10 s.
CHECK: Check[Data] = Check(__name__, "P2P002", "copies", Stage.P2P, Scope.HOST, Kind.TORCH, deadline=25.0)
