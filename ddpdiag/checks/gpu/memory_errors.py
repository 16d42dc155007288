"""Memory errors of each GPU: ECC, SRAM, row remapping, retired pages.

An uncorrectable error ends the process that meets it ("uncorrectable ECC error encountered", Xid 48, 94, 95), and until
the GPU is reset the bad row or page stays in use. This check reads every GPU of a host once, for GPU004 to GPU011 too.
Counters since the last load of the driver (volatile) and ever (aggregate) are kept apart. GPU010 reads them again at
the end of the run and names the GPU whose counters rose; to compare them over a job, run `nvidia-smi -q -d ECC` before
and after it.

Findings and what to do:

Causes: wear, heat, a bad card. A field that a model does not have (a consumer card has no ECC) is no finding.

Fix: reset or reboot as the finding says; replace a GPU whose errors return (RMA).

Confirm by hand: `nvidia-smi -q -d ECC,ROW_REMAPPER,PAGE_RETIREMENT` on the named host; look at volatile and aggregate
counts, and at "Pending".

Sources: NVIDIA GPU memory error management (docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt) and dynamic page retirement
(docs.nvidia.com/deploy/dynamic-page-retirement); NVML API reference (docs.nvidia.com/deploy/nvml-api).
"""

import os
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from msgspec import structs

from ddpdiag.checks.api import Check, Scope, Seen, Stage, new_trial
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.gpu import devices, present
from ddpdiag.checks.gpu.cards import Action, Card, Fault, Watch, cards_of, finding_of
from ddpdiag.checks.hosts import Host, answers_by_host, hosts_of, nvml_fix
from ddpdiag.model import Finding, Scalar, Trial
from ddpdiag.model.trial import Context
from ddpdiag.probes.gpu.health import Look, look
from ddpdiag.probes.gpu.kernel_log import kmsg_path, last_line
from ddpdiag.probes.host.kernel import sys_root
from ddpdiag.text import count

FINDINGS = {
    "uncorrected": FindingSpec.error("uncorrectable errors in DRAM since the driver was loaded. Reset."),
    "sram": FindingSpec.error(
        "uncorrectable errors in SRAM since the driver was loaded. Reset; above `sram_errors` ever, or NVIDIA's own "
        "threshold: isolate."
    ),
    **dict.fromkeys(
        ("remap-pending", "retirement-pending"), FindingSpec.error("a row or page waits to be replaced. Reset.")
    ),
    **dict.fromkeys(
        ("remap-failed", "remaps", "retired-pages"),
        FindingSpec.error("no spare is left to replace bad rows or pages. Isolate."),
    ),
    "corrected": FindingSpec.warning("more than `corrected_errors` correctable errors; ECC corrects them. Monitor."),
    "unreadable": FindingSpec.not_seen("a host has GPUs, but their health cannot be read."),
}

D = TypeVar("D")
ROW_IN_USE = "a bad memory row is still in use, because the GPU remaps it only at a reset"
PAGE_IN_USE = "a bad memory page is still in use, because the GPU retires it only at a reset"
WATCH_CORRECTED = Watch("nvidia-smi -q -d ECC -i {gpu}", "the number of correctable errors has risen")


def measure(ctx: Context) -> Look:
    """All GPUs that NVML shows to this rank; the step names the one that is read, should it hang."""
    ctx.step("kernel log")
    line, begin = last_line(kmsg_path(os.environ)), time.clock_gettime(time.CLOCK_BOOTTIME)
    return structs.replace(look(sys_root(os.environ), ctx.step), boot_seconds=begin, kernel_line=line)


def plan(seen: Seen[D]) -> Sequence[Trial]:
    """One rank of each host asks; of ranks that are bound to GPUs of their own, as many as see them all."""
    if seen.trials:
        return ()
    groups = tuple((rank,) for host in hosts_of(seen) if host.gpus for rank in _lookers(seen, host))
    return (new_trial(seen, groups=groups),) if groups else ()


def _lookers(seen: Seen[D], host: Host) -> Iterator[int]:
    visible = {rank: row.nvml.gpus for rank, row in seen.of(present.CHECK).by_rank.items() if rank in host.ranks}
    living = [rank for rank in host.ranks if rank in seen.world.living]
    known: set[str] = set()
    for rank in living:
        # Without GPU001's answer, each rank may see GPUs of its own.
        new = {gpu.uuid or str(gpu.index) for gpu in visible[rank]} - known if rank in visible else {str(rank)}
        if new or (rank == living[0] and not any(visible.values())):
            yield rank
        known |= new


def judge(seen: Seen[Look]) -> Iterator[Finding]:
    for host, looks in answers_by_host(seen):
        # GPUs that cannot be opened are GPU001's findings.
        if host.gpus and not any(gpu.error or gpu.is_told for own in looks.values() for gpu in own.gpus):
            error = next((own.error for own in looks.values() if own.error), "not supported")
            yield seen.finding(
                "unreadable",
                "the health of GPUs cannot be read",
                f"{host.name}: the health of its {count(host.gpus, 'GPU')} cannot be read (NVML: {error}), so it is "
                "not known whether they have memory errors or other faults.",
                ranks=tuple(looks),
                evidence={"error": error, "gpus": host.gpus},
                fix=nvml_fix(host.name),
            )
    for card in cards_of(seen):
        for fault in (*_errors(seen, card), *_replaced(seen, card)):
            yield finding_of(seen, card, fault)
        errors, most = card.health.memory.corrected or 0, most_corrected(seen)
        if errors > most:
            title = "GPU memory has too many correctable errors"
            said = f"{errors:,} correctable errors since the driver was loaded; at most {most:,.0f} expected"
            evidence = {"corrected": errors}
            fault = Fault("corrected", title, said, Action.MONITOR, evidence=evidence, watch=WATCH_CORRECTED)
            yield finding_of(seen, card, fault)


def most_corrected(seen: Seen[Look]) -> float:
    """How many correctable errors are no reason to worry."""
    return seen.number("corrected_errors")


def _errors(seen: Seen[Look], card: Card) -> Iterator[Fault]:
    """Uncorrectable ones, of DRAM and SRAM."""
    memory, least, most_ever = card.health.memory, seen.number("uncorrected_errors"), seen.number("sram_errors")
    recent, ever = memory.sram_uncorrected or 0, memory.sram_uncorrected_ever or 0
    in_dram = (memory.uncorrected or 0) - recent
    # GCM and AWS: any is a failure.
    if in_dram > least:
        said = f"{count(in_dram, 'uncorrectable DRAM error')} since the driver was loaded; 0 expected"
        title, advice = "GPU memory has uncorrectable errors", "If the errors return, have the GPU replaced."
        evidence = {"uncorrected": memory.uncorrected, "uncorrected_ever": memory.uncorrected_ever}
        yield Fault("uncorrected", title, said, Action.RESET, advice, evidence)
    flagged = bool(memory.sram_threshold_exceeded)
    worn = ever > most_ever or flagged
    if worn or recent > least:
        limit = "NVIDIA's own limit is exceeded" if flagged else f"at most {most_ever:g} in its lifetime expected"
        lifetime = f", {ever} in its lifetime" if ever else ""
        errors = f"{count(recent, 'uncorrectable SRAM error')} since the driver was loaded{lifetime}"
        said = f"{errors}; {limit if worn else '0 expected'}"
        action = Action.ISOLATE if worn else Action.RESET
        counts = {"sram_uncorrected": recent, "sram_uncorrected_ever": ever, "threshold_exceeded": flagged}
        yield Fault("sram", "GPU SRAM has uncorrectable errors", said, action, evidence=counts)


def _replaced(seen: Seen[Look], card: Card) -> Iterator[Fault]:
    """Rows and pages that were taken out of use, or should be."""
    memory = card.health.memory
    rows, pages = memory.uncorrectable_remaps or 0, memory.retired_pages or 0
    most_rows, most_pages = seen.number("remapped_rows"), seen.number("retired_pages")
    remapped: dict[str, Scalar | list[Scalar]] = {"remapped_rows": rows}
    retired: dict[str, Scalar | list[Scalar]] = {"retired_pages": pages}
    if memory.remap_failed:
        said = f"a memory row is bad, and no spare row is left ({count(rows, 'row')} remapped)"
        yield Fault("remap-failed", "a GPU could not remap a bad memory row", said, Action.ISOLATE, evidence=remapped)
    elif rows >= most_rows:
        said = f"{rows} memory rows remapped for uncorrectable errors; fewer than {most_rows:g} expected"
        yield Fault("remaps", "a GPU has remapped too many memory rows", said, Action.ISOLATE, evidence=remapped)
    if memory.remap_pending:
        title = "a GPU needs a reset to remap a bad memory row"
        yield Fault("remap-pending", title, ROW_IN_USE, Action.RESET, evidence=remapped)
    if pages >= most_pages:
        said = f"{pages} memory pages retired; fewer than {most_pages:g} expected"
        yield Fault("retired-pages", "a GPU has retired too many memory pages", said, Action.ISOLATE, evidence=retired)
    if memory.retirement_pending:
        title = "a GPU needs a reset to retire a bad memory page"
        yield Fault("retirement-pending", title, PAGE_IN_USE, Action.RESET, evidence=retired)


skip = devices.skip
Data = Look
SETTINGS = {
    # GCM and AWS take any for a failure.
    "uncorrected_errors": 0,
    # Azure reports above 20 million, GCM above 50 million.
    "corrected_errors": 20e6,
    # stas00's and NVIDIA's rule for a replacement: more than 4 in a lifetime.
    "sram_errors": 4,
    # DCGM fails from 512 on.
    "remapped_rows": 512,
    # DCGM (dcgm_gpu_hardware_limits.h) fails from 63 on, as NVIDIA's field diagnostic does.
    "retired_pages": 63,
}
# Some 200 questions to each GPU; a driver that is busy takes up to 0.1 s for one.
CHECK: Check[Data] = Check(__name__, "GPU003", "memory-errors", Stage.GPU, Scope.HOST, deadline=20.0)


def not_looked_at(seen: Seen[D]) -> Iterator[Finding]:
    """A finding of another check if the user's choice left out this one, which asks the GPUs."""
    code, options = CHECK.code, seen.options
    chosen = not options.select or code.startswith(options.select)
    if seen.world.gpus and not seen.of(CHECK).trials and (not chosen or code.startswith(options.ignore)):
        yield seen.finding(
            "unreadable",
            "the GPUs were not read",
            f"{code} ({CHECK.name}) was not selected. It reads the GPUs for this check too, so their state is not "
            "known.",
            fix=f"Add {code} to --select, or remove it from --ignore.",
        )
