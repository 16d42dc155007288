"""Memory errors of each GPU: ECC, SRAM, row remapping, retired pages.

An uncorrectable error ends the process that meets it ("uncorrectable ECC error encountered", Xid 48, 94, 95), and until
the GPU is reset the bad row or page stays in use. This check reads every GPU of a host once, for GPU004 to GPU011 too.
Errors count since the last load of the driver. GPU010 reads them again at the end of the run and names the GPU whose
counters rose.

Findings and what to do:

Causes: wear, heat, a bad card. A field that a model does not have (a consumer card has no ECC) is no finding.

Fix: reset or reboot as the finding says; replace a GPU whose errors return (RMA).

Confirm by hand: `nvidia-smi -q -d ECC,ROW_REMAPPER,PAGE_RETIREMENT` on the named host; look at volatile counts and at
"Pending".

Sources: NVIDIA GPU memory error management (docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt) and dynamic page retirement
(docs.nvidia.com/deploy/dynamic-page-retirement); NVML API reference (docs.nvidia.com/deploy/nvml-api).
"""

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import structs

from ddpdiag.checks.api import Check, Contribution, Scope, Seen, Stage, new_trial
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.gpu import devices, present
from ddpdiag.checks.gpu.cards import card_findings
from ddpdiag.checks.gpu.signs import state_faults, total_faults, totals
from ddpdiag.checks.hosts import Host, data_by_host, hosts_of, nvml_fix
from ddpdiag.model import Counters, Finding, Trial
from ddpdiag.model.trial import Context
from ddpdiag.probes.gpu.health import GpuReading, read_gpus
from ddpdiag.probes.gpu.kernel_log import kmsg_path, newest_line_number
from ddpdiag.text import count

FINDINGS = {
    "uncorrected": FindingSpec.error("uncorrectable errors in DRAM since the driver was loaded. Reset."),
    "sram": FindingSpec.error(
        "uncorrectable errors in SRAM since the driver was loaded: reset. Above NVIDIA's own threshold: isolate."
    ),
    **dict.fromkeys(
        ("remap-pending", "retirement-pending"), FindingSpec.error("a row or page waits to be replaced. Reset.")
    ),
    "remap-failed": FindingSpec.error("no spare row is left to replace a bad one. Isolate."),
    "corrected": FindingSpec.warning("more than `corrected_errors` correctable errors; ECC corrects them. Monitor."),
    "unreadable": FindingSpec.unchecked("a host has GPUs, but their health cannot be read."),
}


def measure(ctx: Context) -> GpuReading:
    """Read all GPUs that NVML shows to this rank. Announces each GPU as a step, in case the reading hangs."""
    ctx.step("kernel log")
    line, begin = newest_line_number(kmsg_path(os.environ)), time.clock_gettime(time.CLOCK_BOOTTIME)
    return structs.replace(read_gpus(ctx.step), boot_seconds=begin, kernel_line=line)


def plan(seen: Seen[Any]) -> Sequence[Trial]:
    """Plan one trial with one rank of each host, or with several ranks if each sees only a part of the GPUs."""
    if seen.trials:
        return ()
    groups = tuple((rank,) for host in hosts_of(seen) if host.gpu_count for rank in _reading_ranks(seen, host))
    return (new_trial(seen, groups=groups),) if groups else ()


def _reading_ranks(seen: Seen[Any], host: Host) -> Iterator[int]:
    visible = {rank: row.nvml.gpus for rank, row in seen.of(present.CHECK).by_rank.items() if rank in host.ranks}
    living = [rank for rank in host.ranks if rank in seen.world.living_ranks]
    known: set[str] = set()
    for rank in living:
        # Without data of GPU001, each rank may see different GPUs.
        new = {gpu.uuid or str(gpu.index) for gpu in visible[rank]} - known if rank in visible else {str(rank)}
        if new or (rank == living[0] and not any(visible.values())):
            yield rank
        known |= new


def judge(seen: Seen[GpuReading]) -> Iterator[Finding]:
    for host, readings in data_by_host(seen):
        # GPUs that cannot be opened are GPU001's findings.
        if host.gpu_count and not any(gpu.error or gpu.is_known for answer in readings.values() for gpu in answer.gpus):
            error = next((answer.error for answer in readings.values() if answer.error), "not supported")
            yield seen.finding(
                "unreadable",
                "the health of GPUs cannot be read",
                f"{host.name}: the health of its {count(host.gpu_count, 'GPU')} cannot be read (NVML: {error}), so it "
                "is not known whether they have memory errors or other faults.",
                ranks=tuple(readings),
                evidence={"error": error, "gpus": host.gpu_count},
                fix=nvml_fix(host.name),
            )
    yield from card_findings(seen, lambda card: (*state_faults(card.health), *total_faults(seen, card.health)))


def report(seen: Seen[GpuReading]) -> Contribution:
    """Contribute the counters of each GPU that has a UUID, also of GPUs that this job does not use."""
    rows = {
        health.uuid: Counters(host=host.name, part=health.uuid, totals=totals(health))
        for host, readings in data_by_host(seen)
        for reading in readings.values()
        for health in reading.gpus
        if health.uuid is not None and health.error is None
    }
    return Contribution(counters=tuple(rows.values()))


skip = devices.skip
Data = GpuReading
# Azure reports above 20 million, GCM above 50 million.
SETTINGS = {"corrected_errors": 20e6}
# Each GPU gets some 200 queries, and a busy driver takes up to 0.1 s for one.
CHECK: Check[Data] = Check(__name__, "GPU003", "memory-errors", Stage.GPU, Scope.HOST, deadline=20.0)
