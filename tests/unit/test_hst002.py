"""HST002: memory for every rank."""

import pytest
from seen import seen_of

from ddpdiag.checks.host.memory import CHECK, Data
from ddpdiag.checks.hosts import GIB, MIB
from ddpdiag.model import RunOptions, Severity


def found(*rows, **world):
    return list(CHECK.judge(seen_of(CHECK, dict(enumerate(rows)), **world)))


IN_GROUP = Data(available_bytes=64 * GIB, limit_bytes=2 * GIB, left_bytes=700 * MIB)
# The answer of a host, its ranks and GPUs, and the finding.
HOSTS = {
    "plenty": (Data(available_bytes=64 * GIB), 2, 0, None),
    "a limit alone": (Data(limit_bytes=8 * GIB, left_bytes=4 * GIB), 1, 0, None),
    "enough without a GPU": (Data(available_bytes=3 * GIB), 1, 0, None),
    "little with a GPU": (Data(available_bytes=3 * GIB), 1, 1, ("short", Severity.WARNING)),
    "little": (Data(available_bytes=1 * GIB), 2, 0, ("short", Severity.WARNING)),
    "too little to import torch": (Data(available_bytes=300 * MIB), 2, 0, ("short", Severity.ERROR)),
    "little for four ranks": (Data(available_bytes=3 * GIB), 4, 0, ("short", Severity.WARNING)),
    "a tight limit": (IN_GROUP, 1, 0, ("short", Severity.WARNING)),
    "unreadable": (Data(), 1, 0, ("unreadable", Severity.WARNING)),
    "earlier kills": (Data(available_bytes=64 * GIB, oom_kills=3), 1, 0, ("oom-kills", Severity.WARNING)),
}


@pytest.mark.parametrize("host", HOSTS)
def test_memory_that_is_short_or_unknown_is_one_finding_of_all_ranks(golden, host):
    data, ranks, gpus, expected = HOSTS[host]
    run = seen_of(CHECK, {0: data}, size=ranks, ranks_per_node=ranks, gpus=gpus)
    assert run.trials[0].groups == ((0,),)
    findings = list(CHECK.judge(run))
    words = [(finding.code.removeprefix("HST002."), finding.severity, finding.ranks) for finding in findings]
    assert words == ([] if expected is None else [(*expected, tuple(range(ranks)))])
    if findings:
        golden(*findings)


def test_the_threshold_can_be_set():
    assert found(Data(available_bytes=700 * MIB), options=RunOptions(settings={"HST002.cpu_mib": "512"})) == []
