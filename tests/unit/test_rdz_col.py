"""Rendezvous, names and all-reduce, judged."""

import pytest
from msgspec import structs
from seen import seen_of, skip_text, together, unseen, with_arrivals, world_of

from ddpdiag.checks.api import Seen
from ddpdiag.checks.collective import all_reduce
from ddpdiag.checks.rendezvous import coordinator_name, master_port, shared_dir
from ddpdiag.checks.rendezvous import methods as rdz001
from ddpdiag.checks.rendezvous.shared_dir import Data as Directory
from ddpdiag.model import FORK_STEP, Depth, ProcessState, RunOptions, Severity, Status
from ddpdiag.stats import Samples


def reduced(wrong: int = 0, seconds: float = 1e-3, ranks: int = 2) -> all_reduce.Data:
    return all_reduce.Data("gloo", ranks, 4, timing(1e-4), 1 << 20, timing(seconds), wrong)


def spoilt(*, wrong_from: tuple[int, ...] = (), ranks: int = 4) -> all_reduce.Data:
    """A rank with a wrong sum that received the broadcasts of the ranks in `wrong_from` wrong."""
    return structs.replace(reduced(7, ranks=ranks), senders=ranks, wrong_from=wrong_from)


def timing(seconds: float) -> Samples:
    return Samples(min=seconds, median=seconds, p95=seconds, count=8)


@pytest.mark.parametrize(
    ("rows", "blamed"),
    [
        pytest.param([reduced()] * 2, [], id="nowhere"),
        pytest.param([reduced(wrong=7)] * 4, [((), ())], id="everywhere"),
        pytest.param([reduced(wrong=1), *[reduced()] * 3], [((0,), ())], id="one of four"),
        pytest.param([reduced(), reduced(wrong=1)], [((), ())], id="one of two"),
        pytest.param(
            [spoilt(wrong_from=() if rank == 2 else (2,)) for rank in range(4)],
            [((2,), ())],
            id="broadcasts of one of four",
        ),
        pytest.param(
            [spoilt(wrong_from=(1,), ranks=2), spoilt(ranks=2)],
            [((), ("rank 1 -> rank 0",))],
            id="broadcasts of one of two",
        ),
    ],
)
def test_wrong_values_blame_the_rank_that_sends_them(golden, rows, blamed) -> None:
    found = list(all_reduce.judge(seen_of(all_reduce.CHECK, dict(enumerate(rows)), params={"backend": "gloo"})))
    assert [(finding.ranks, finding.links) for finding in found] == blamed
    assert {finding.code for finding in found} <= {"COL001.wrong"}
    golden(*found)


def test_the_slowest_rank_stands_in_the_figures_and_every_rank_in_its_row() -> None:
    seen = seen_of(all_reduce.CHECK, {0: reduced(seconds=1e-3), 1: reduced(seconds=2e-3)}, params={"backend": "gloo"})
    assert all_reduce.figures(seen)["all_reduce.gloo.busbw_bytes_per_s"] == pytest.approx((1 << 20) / 2e-3)
    assert all_reduce.columns(seen)[0]["busbw_bytes_per_s"] == pytest.approx((1 << 20) / 1e-3)


@pytest.mark.parametrize(("gpus", "planned"), [(2, ["nccl"]), (0, [])])
def test_gloo_is_tried_before_the_jobs_own_backend(gpus, planned) -> None:
    seen = seen_of(all_reduce.CHECK, {0: reduced(), 1: reduced()}, params={"backend": "gloo"}, gpus=gpus)
    assert [trial.params["backend"] for trial in all_reduce.plan(seen)] == planned


def test_a_collective_has_no_ground_for_one_rank_or_for_nccl_without_gpus(golden) -> None:
    nccl = RunOptions(backend="nccl")
    assert (
        skip_text(all_reduce.CHECK, world_of(2))
        is skip_text(all_reduce.CHECK, world_of(2, gpus=1, options=nccl))
        is None
    )
    golden(skip_text(all_reduce.CHECK, world_of(1)), skip_text(all_reduce.CHECK, world_of(2, options=nccl)))


@pytest.mark.parametrize(
    ("call_seconds", "left_seconds", "calls"),
    [(1e-3, 10.0, (2, 8)), (1.0, 10.0, (1, 4)), (2.0, 10.0, (1, 1)), (8.0, 7.0, (0, 1)), (1.0, -1.0, (0, 1))],
)
def test_a_slow_all_reduce_is_called_less_often(call_seconds: float, left_seconds: float, calls: object) -> None:
    assert all_reduce.affordable_calls(2, 8, call_seconds, left_seconds) == calls


def test_deadlines_grow_with_the_group_unless_given() -> None:
    def deadline(size: int, **options: object) -> float:
        options_ = RunOptions(**options)  # type: ignore[arg-type]
        return seen_of(all_reduce.CHECK, {}, size=size, options=options_).trials[0].deadline_seconds

    assert deadline(128) == pytest.approx(all_reduce.CHECK.deadline + 128 * 0.15)
    assert deadline(128, settings={"COL001.deadline_seconds": "7"}) == 7
    assert seen_of(coordinator_name.CHECK, {}, size=128).trials[0].deadline_seconds == coordinator_name.CHECK.deadline


@pytest.mark.parametrize(("backend", "gpus", "is_ready"), [("gloo", 0, False), ("gloo", 2, True), ("nccl", 2, False)])
def test_the_jobs_own_backend_decides_whether_a_check_is_ready(backend, gpus, is_ready) -> None:
    failed = {1: Status.DIED}
    seen = seen_of(all_reduce.CHECK, {0: reduced()}, statuses=failed, params={"backend": backend}, gpus=gpus)
    assert (not seen.failure_text) is is_ready


def test_every_depth_has_its_size() -> None:
    assert set(all_reduce.LARGE_BYTES) == set(Depth)


def met(method: str, statuses: dict[int, Status] | None = None, **world: object) -> Seen[rdz001.Data]:
    ranks = [rank for rank in range(2) if rank not in (statuses or {})]
    rows = {rank: rdz001.Data(method, 0.1) for rank in ranks}
    return seen_of(rdz001.CHECK, rows, statuses=statuses, params={"method": method}, size=2, **world)  # type: ignore[arg-type]


def unmet(**world: object) -> Seen[rdz001.Data]:
    """Two ranks that have tried nothing."""
    return unseen(rdz001.CHECK, met("tcp", **world).world)


SHARED = RunOptions(shared_dir="/shared")
ON_TWO_HOSTS = {"ranks_per_node": 1, "options": SHARED}


def methods(seen: Seen[rdz001.Data]) -> list[str]:
    """What is tried, if all goes well."""
    tried: list[str] = []
    while planned := rdz001.plan(seen):
        tried.append(str(planned[0].params["method"]))
        done = met(tried[-1], ranks_per_node=len(seen.world.hosts[next(iter(seen.world.hosts))]))
        trials = (*seen.recording.trials, structs.replace(planned[0], number=len(seen.recording.trials)))
        outcomes = tuple(structs.replace(outcome, trial=len(trials) - 1) for outcome in done.outcomes)
        recording = structs.replace(seen.recording, trials=trials, outcomes=(*seen.recording.outcomes, *outcomes))
        seen = Seen(seen.world, seen.check, recording)
    return tried


def test_a_file_needs_a_shared_directory_on_several_hosts() -> None:
    assert methods(unmet()) == ["tcp", "env", "file"]
    assert methods(unmet(ranks_per_node=1)) == ["tcp", "env"]
    assert methods(unmet(**ON_TWO_HOSTS)) == ["tcp", "env", "file"]
    (finding,) = rdz001.judge(met("tcp", ranks_per_node=1))
    assert (finding.code, finding.severity) == ("RDZ001.untested", Severity.NOTE)


@pytest.mark.parametrize("name", ["/shared?", "/a#b", "/two\nlines"])
def test_a_directory_that_torch_cannot_name_in_a_url_is_not_tried(golden, name) -> None:
    """urllib cuts it, and torch then ends with "IndexError: list index out of range"."""
    options = RunOptions(shared_dir=name)
    assert methods(unmet(options=options)) == ["tcp", "env"]
    (finding,) = rdz001.judge(met("tcp", options=options))
    assert (finding.code, finding.severity) == ("RDZ001.untested", Severity.NOTE)
    golden(finding)


FULL = {0: Directory(directory="/shared"), 1: Directory(directory="/shared", error="ENOSPC")}
TAKEN = {0: master_port.Data(name="n0", port=29500, error="EADDRINUSE")}


@pytest.mark.parametrize(
    ("other", "tried"),
    [
        pytest.param(seen_of(shared_dir.CHECK, FULL, **ON_TWO_HOSTS), ["tcp", "env"], id="directory"),
        pytest.param(seen_of(master_port.CHECK, TAKEN, size=2, params={"agent_store": False}), ["tcp"], id="port"),
    ],
)
def test_what_another_check_found_unusable_is_not_tried(other, tried) -> None:
    seen = together(unmet(ranks_per_node=1, options=SHARED if other.check is shared_dir.CHECK else RunOptions()), other)
    assert methods(seen) == tried
    assert list(rdz001.judge(seen)) == []


@pytest.mark.parametrize(("busy", "codes"), [(True, []), (False, ["RDZ001.method"])])
def test_a_method_for_which_the_workers_started_too_late_does_not_fail(busy, codes) -> None:
    """Seen on two hosts whose cores another job used as well."""
    process = ProcessState(pid=9, state="R", busy=busy, step_seconds=None)
    late = met("file", dict.fromkeys(range(2), Status.HUNG), options=SHARED)
    outcomes = tuple(structs.replace(o, last_step=FORK_STEP, process=process) for o in late.recording.outcomes)
    late = Seen(late.world, late.check, structs.replace(late.recording, outcomes=outcomes))
    assert [finding.code for finding in rdz001.judge(together(met("tcp", options=SHARED), late))] == codes


def test_the_file_lies_in_the_runs_own_folder() -> None:
    seen = unmet(**ON_TWO_HOSTS)
    arrivals = {rank: structs.replace(own, nonce=f"nonce-{rank}") for rank, own in seen.world.arrivals.items()}
    tried = together(together(with_arrivals(seen, arrivals), met("tcp")), met("env"))
    (trial,) = rdz001.plan(tried)
    assert (trial.params["method"], trial.env) == ("file", {rdz001.RUN_NONCE: "nonce-0"})


def test_one_failed_method_is_not_this_checks_finding_unless_another_works() -> None:
    assert list(rdz001.judge(met("tcp", {1: Status.HUNG}))) == []


def test_a_method_that_fails_over_gloo_is_a_warning_where_the_jobs_own_backend_works(golden) -> None:
    def over_gloo(method: str, statuses: dict[int, Status] | None = None) -> Seen[rdz001.Data]:
        rows = {rank: rdz001.Data(method, 0.1) for rank in range(2) if rank not in (statuses or {})}
        params = {"method": method, "backend": "gloo"}
        return seen_of(rdz001.CHECK, rows, statuses=statuses, params=params, size=2, gpus=2)

    tried = together(over_gloo("tcp"), over_gloo("env", {1: Status.RAISED}))
    nccl = seen_of(all_reduce.CHECK, {0: reduced(), 1: reduced()}, params={"backend": "nccl"}, gpus=2)
    (finding,) = rdz001.judge(tried)
    assert finding.severity is Severity.ERROR
    (finding,) = rdz001.judge(together(tried, nccl))
    assert (finding.code, finding.severity) == ("RDZ001.method", Severity.WARNING)
    golden(finding)


def test_a_method_that_fails_for_a_known_cause_says_which() -> None:
    env = met("env", {1: Status.RAISED})
    done, raised = env.recording.outcomes
    failed = structs.replace(raised, error="OSError: [Errno 24] Too many open files")
    env = Seen(env.world, env.check, structs.replace(env.recording, outcomes=(done, failed)))
    (finding,) = rdz001.judge(together(met("tcp"), env))
    assert (finding.code, finding.severity) == ("RDZ001.method", Severity.ERROR)
    assert finding.evidence.keys() >= {"known_error", "works", "fails"}
    assert "ulimit -n" in finding.fix


def named(
    addresses: tuple[str, ...] | None = ("10.0.0.1",), own: tuple[str, ...] = ("10.0.0.2",), **more: object
) -> coordinator_name.Data:
    values = {"name": "head.cluster", "seconds": 0.01, "own_name": "n1", "interface": None} | more
    return coordinator_name.Data(addresses=addresses, own_addresses=own, **values)  # type: ignore[arg-type]


def of_names(*rows: coordinator_name.Data, ranks_per_node: int = 1) -> Seen[coordinator_name.Data]:
    return seen_of(coordinator_name.CHECK, dict(enumerate(rows)), ranks_per_node=ranks_per_node)


LOOPBACK = named(addresses=("127.0.1.1",))


@pytest.mark.parametrize(
    "seen",
    [
        pytest.param(of_names(named(), named()), id="good names"),
        pytest.param(of_names(LOOPBACK, named(), ranks_per_node=2), id="loopback on one host"),
        pytest.param(of_names(named(), named(own=("127.0.1.1",), interface="eth0")), id="gloo's interface is named"),
    ],
)
def test_names_that_do_no_harm_are_silent(seen: Seen[coordinator_name.Data]) -> None:
    assert list(coordinator_name.judge(seen)) == []


@pytest.mark.parametrize(
    ("rows", "word", "severity", "hosts"),
    [
        pytest.param((named(), named(addresses=())), "unknown", Severity.ERROR, ("n1",), id="unknown"),
        pytest.param((LOOPBACK, named()), "loopback", Severity.ERROR, ("n0",), id="loopback on several hosts"),
        pytest.param((named(), named(own=("127.0.1.1",))), "own", Severity.ERROR, ("n1",), id="gloo offers loopback"),
        pytest.param(
            (named(), named(own=("127.0.1.1", "10.0.0.2")), named(own=("10.0.0.3", "127.0.1.1"))), "own",
            Severity.ERROR, ("n1",), id="gloo takes the first address, though a better one follows",
        ),
        pytest.param((named(seconds=3.0), named()), "slow", Severity.WARNING, ("n0",), id="slow look-up"),
        pytest.param((named(), named(None, seconds=12.0)), "slow", Severity.ERROR, ("n1",), id="no answer"),
        pytest.param((named(), named(reverse_seconds=6.1)), "slow", Severity.WARNING, ("n1",), id="slow reverse"),
        pytest.param((named(), named(reverse_seconds=None)), "slow", Severity.WARNING, ("n1",), id="silent reverse"),
        pytest.param(
            (named(("10.0.0.1", "fe80::1")), named(), named(("192.168.7.1",))), "differs", Severity.WARNING, ("n2",),
            id="one of three has another address",
        ),
        pytest.param((named(), named(("10.0.0.9",))), "differs", Severity.WARNING, (), id="two that differ"),
    ],
)  # fmt: skip
def test_the_host_whose_names_are_wrong_is_named(golden, rows, word, severity, hosts) -> None:
    (finding,) = coordinator_name.judge(of_names(*rows))
    assert (finding.code, finding.severity, finding.hosts) == (f"RDZ002.{word}", severity, hosts)
    golden(finding)


def test_a_loopback_on_the_coordinators_own_host_is_a_warning_where_the_ranks_met() -> None:
    seen = of_names(LOOPBACK, named())
    (finding,) = coordinator_name.judge(together(seen, met("tcp", ranks_per_node=1)))
    assert (finding.code, finding.severity) == ("RDZ002.loopback", Severity.WARNING)
    (finding,) = coordinator_name.judge(together(seen, met("tcp", {1: Status.HUNG}, ranks_per_node=1)))
    assert finding.severity is Severity.ERROR


def test_keys_of_an_earlier_process_in_the_agents_store_are_named(golden) -> None:
    rows = {0: rdz001.Data("env", 0.1, stale_keys=("default_pg/0//cpu//0/0", "default_pg/0//cpu//0/1"))}
    rows[1] = rdz001.Data("env", 0.1)
    seen = seen_of(rdz001.CHECK, rows, params={"method": "env", "backend": "gloo", "agent_store": True})
    (finding,) = (finding for finding in rdz001.judge(seen) if finding.code == "RDZ001.stale")
    assert (finding.severity, finding.ranks, finding.hosts) == (Severity.WARNING, (), ())
    golden(finding)
