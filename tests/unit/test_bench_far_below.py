"""COL002: a collective over NCCL far below what its path can do, and sizes that were not measured."""

import pytest
from benched import benched, data_of, steady
from msgspec import Raw, structs
from speeds import FREE, GB, transport_of

from ddpdiag.bench.check import CHECK, plan
from ddpdiag.bench.data import AGAIN
from ddpdiag.bench.judge import bench_of
from ddpdiag.checks.api import Seen
from ddpdiag.codec import encode
from ddpdiag.model import Outcome, Severity, Status
from ddpdiag.model.bench import Bench, Limits
from ddpdiag.probes.gpu.health import GpuUsers

NVLINKED = Limits(
    nvlinks=18,
    nvlinks_max=18,
    nvlink_switched=True,
    nvlink_bytes_per_s=370.8 * GB,
    nic="eth0",
    nic_bytes_per_s=12.5 * GB,
)


def nccl(rate, size=2, sizes=None, **more):
    """What ranks with NVLinks give whose messages go at this rate."""
    known = {"backend": "nccl", "limits": NVLINKED, "copies": (1000 * GB,) * 5} | ({"sizes": sizes} if sizes else {})
    return {rank: data_of(rank, size, steady(20e-6, rate), **(known | more)) for rank in range(size)}


def run(rate, again=None, *, ranks_per_node=8, size=2, before=FREE, **path):
    """A sweep, and the second measurement that its plan asks for, unless `again` is None."""
    seen = benched(nccl(rate, size), ranks_per_node=ranks_per_node, bench=Bench(backend=("nccl",)))
    if again is None:
        return seen
    (trial,) = plan(seen)
    trial = structs.replace(trial, number=len(seen.recording.trials))
    size_bytes = int(trial.params[AGAIN])
    own = {
        rank: structs.replace(
            data_of(rank, size, steady(20e-6, again), sizes=[size_bytes], backend="nccl", copies=()),
            path=transport_of(rank, size, ranks_per_node, **path),
            before=before,
        )
        for rank in range(size)
    }
    outcomes = tuple(
        Outcome(trial=trial.number, code="COL002", rank=r, status=Status.DONE, data=Raw(encode(d)))
        for r, d in own.items()
    )
    recording = seen.recording
    recording = structs.replace(recording, trials=(*recording.trials, trial), outcomes=(*recording.outcomes, *outcomes))
    return Seen(seen.world, CHECK, recording)


def far(*rates, **more):
    return [finding for finding in CHECK.judge(run(*rates, **more)) if finding.code == "COL002.far-below"]


def only(*rates, **more):
    (finding,) = far(*rates, **more)
    return finding


def test_a_hundredth_of_nvlink_twice_is_an_error(golden):
    finding = only(1.8 * GB, 1.9 * GB)
    assert (finding.severity, finding.hosts, finding.ranks) == (Severity.ERROR, ("n0",), ())
    golden(finding)


def test_a_fast_machine_is_measured_once():
    assert plan(run(200 * GB)) == ()
    assert far(200 * GB) == []
    (trial,) = plan(run(1.8 * GB))
    assert (trial.params["backend"], trial.fresh, trial.env) == ("nccl", True, {})
    assert plan(run(1.8 * GB, 1.8 * GB)) == ()


def test_the_second_measurement_is_no_row_of_the_table():
    once, twice = bench_of(run(1.8 * GB)), bench_of(run(1.8 * GB, 1.9 * GB))
    assert (len(once.rows), once.complete) == (len(twice.rows), twice.complete)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"log": False}, "NCCL's log does not show the path"),
        ({"before": GpuUsers(used_bytes=20 << 30, pids=(4711,))}, "the GPU of rank 0 is used by pid 4711"),
        ({"before": GpuUsers()}, "whether another process uses the GPU of rank 0 is not known"),
        ({"kind": "SHM", "name": "direct"}, "the path that NCCL takes (SHM/direct) can do 24 GB/s only"),
    ],
)
def test_what_is_missing_for_an_error_makes_it_a_warning(more, said):
    finding = only(3 * GB, 3 * GB, **more)
    assert (finding.severity, finding.evidence["doubts"][0]) == (Severity.WARNING, said)


def test_measured_once_or_otherwise_it_is_a_warning():
    assert only(1.8 * GB).evidence["doubts"] == ["it was measured once only"]
    (doubt,) = only(1.8 * GB, 200 * GB).evidence["doubts"]
    assert doubt == "the second measurement does not agree with the first"


def test_p2p_that_is_off_is_the_cause_that_is_named(golden):
    finding = only(3 * GB, 3 * GB, kind="SHM", name="direct", NCCL_P2P_DISABLE="1")
    assert finding.evidence["causes"] == ["NCCL's log shows SHM/direct", "NCCL_P2P_DISABLE=1 limits NCCL"]
    golden(finding)


def test_tcp_between_hosts_is_never_held_against_a_cards_nominal_speed():
    assert far(0.2 * GB, 0.2 * GB, size=2, ranks_per_node=1, network="Socket") == []
    assert far(0.2 * GB, size=2, ranks_per_node=1) == [], "nor where no log shows what NCCL uses"


def test_infiniband_is_held_against_the_ports_that_nccls_log_shows():
    finding = only(0.2 * GB, 0.2 * GB, size=2, ranks_per_node=1)
    assert (finding.severity, finding.hosts) == (Severity.ERROR, ())


def test_gloo_is_never_far_below():
    rows = {rank: data_of(rank, 2, steady(20e-6, 1e6)) for rank in range(2)}
    assert plan(benched(rows)) == ()
    assert [own.code for own in CHECK.judge(benched(rows))] == []


# Sizes that were not measured -----------------------------------------------------------------------------------------

ASKED = Bench(minbytes=1 << 10, maxbytes=1 << 14, stepfactor=4.0)


def missing(sizes, **more):
    rows = {rank: data_of(rank, 2, steady(), sizes=sizes, **more) for rank in range(2)}
    return list(CHECK.judge(benched(rows, bench=ASKED)))


def test_sizes_that_were_not_measured_are_listed_and_it_is_not_fit(golden):
    (finding,) = missing([1 << 10], whole=False, notes=("the time was over before 4 KiB could be measured",))
    assert (finding.code, finding.evidence) == ("COL002.unmeasured", {"sizes_bytes": [1 << 12, 1 << 14], "kinds": []})
    golden(finding)


def test_a_sweep_that_is_whole_lacks_nothing():
    assert missing([1 << 10, 1 << 12, 1 << 14]) == []
