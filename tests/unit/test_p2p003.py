"""P2P003 as a whole: recordings of simulated worlds, from the plan to the finding."""

import pytest
from cards import host_of
from fallback_runs import HANGS, P2P, WORKS, Run, hangs_unless, uuid_of
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from paths import host_of as paths_of
from paths import translating

from ddpdiag.checks.gpu import devices, memory_errors
from ddpdiag.checks.host import shared_memory
from ddpdiag.checks.p2p import paths
from ddpdiag.checks.p2p.copies import check as copies
from ddpdiag.checks.p2p.fallback import check as fallback
from ddpdiag.checks.p2p.fallback import conditions
from ddpdiag.checks.registry import all_checks
from ddpdiag.judgement import judge
from ddpdiag.model import Event, EventKind, Outcome, RunOptions, Severity, Skip, Status
from ddpdiag.model.measurements import Copies, PairCopies
from ddpdiag.model.trial import CONNECT_STEP, ProcessState
from ddpdiag.probes.gpu.links import Fabric
from ddpdiag.probes.host.limits import SharedMemory
from ddpdiag.render import shell

LONG = RunOptions(budget_seconds=600.0)


def only(run):
    (finding,) = run.findings()
    return finding


def copied(run, **changes):
    """What P2P002 saw: two direct copies."""
    own = {"access": True, "bytes_per_s": 50e9, "words": 1024}
    pairs = (PairCopies(source=0, target=1, **(own | changes)), PairCopies(source=1, target=0, **own))
    run.told(copies.CHECK, {0: Copies(pairs=pairs, done=2, jobs=2)})
    return run


def hangs_once():
    answers = iter([HANGS])
    return lambda _group, _env: next(answers, WORKS)


def works_twice():
    works = iter([WORKS, WORKS])
    return lambda _group, env: next(works, HANGS) if P2P.items() <= env.items() else HANGS


RUNS = {
    "a set that works on one host": (
        Run(8, hangs_unless(P2P, pair=(2, 5)), options=LONG),
        ("fallback", Severity.ERROR, P2P, ("n0",), ()),
        [("all ranks", ""), *[("all ranks", "P2P")] * 3],
    ),
    "two hosts, of which one fails inside": (
        Run(4, hangs_unless(P2P, pair=(2, 3)), per_host=2, options=LONG),
        ("fallback", Severity.ERROR, P2P, ("n1",), (uuid_of(2), uuid_of(3))),
        None,
    ),
    "a failure that does not come back": (
        Run(4, hangs_once(), options=LONG),
        ("transient", Severity.WARNING, {}, (), ()),
        [("all ranks", "")] * 3,
    ),
    "a set that works and then hangs": (
        Run(2, works_twice(), options=LONG),
        ("nothing", Severity.ERROR, {}, ("n0",), ()),
        [("all ranks", ""), *[("all ranks", "P2P")] * 3],
    ),
}


@pytest.mark.parametrize(("run", "expected", "tried"), RUNS.values(), ids=RUNS)
def test_the_search_names_the_set_that_works_and_no_rank(golden, run, expected, tried):
    found = only(run.search())
    word, severity, env, hosts, gpus = expected
    assert (found.code, found.severity, found.env) == (f"P2P003.{word}", severity, env)
    assert (found.hosts, found.gpus, found.ranks, found.links) == (hosts, gpus, (), ())
    assert fallback.job_workarounds(run.seen) == env
    assert tried is None or run.tried()[: len(tried)] == tried
    golden(found, "\n".join(found.evidence["tried"]))


def test_ranks_with_different_process_groups_are_no_question_of_how_gpus_are_joined(golden):
    run = Run(8, hangs_unless(P2P), variables={3: {"TORCH_DIST_USE_NCCL2": "0"}}, options=LONG).search()
    assert (run.findings(), run.tried()) == ([], [])
    golden(conditions.why_no_search(run.seen))


def interrupted(run, status=Status.SKIPPED, **changes):
    """The next trial of the search, which ends like that on all ranks."""
    (trial,) = fallback.plan(run.seen)
    trial = structs.replace(trial, number=len(run.recording.trials) + 1, **changes)
    outcomes = [Outcome(trial=trial.number, code="P2P003", rank=rank, status=status) for rank in trial.ranks]
    run.recording = structs.replace(
        run.recording, trials=(*run.recording.trials, trial), outcomes=(*run.recording.outcomes, *outcomes)
    )
    return run


def test_what_ctrl_c_ends_has_not_failed(golden):
    run = Run(4, hangs_unless(P2P))
    run.take(*fallback.plan(run.seen))
    run = interrupted(run)
    event = Event(kind=EventKind.SIGNAL, seconds=30.0, detail="2")
    run.recording = structs.replace(run.recording, events=(event,))
    found = only(run)
    assert found.code == "P2P003.unfinished"
    assert found.evidence["tried"] == ["as it is: hangs"]
    golden(found)


def test_a_hang_in_less_time_than_usual_is_no_answer():
    run = interrupted(Run(4, hangs_unless(P2P)), Status.HUNG, is_shortened=True, deadline_seconds=2.0)
    assert (only(run).code, only(run).evidence["tried"]) == ("P2P003.unfinished", [])


def test_a_rank_that_is_lost_ends_the_search(golden):
    run = Run(4, hangs_unless(P2P))
    run.take(*fallback.plan(run.seen))
    run = interrupted(run, Status.UNHEARD)
    run.lose(2)
    assert fallback.plan(run.seen) == ()
    assert (only(run).code, fallback.job_workarounds(run.seen)) == ("P2P003.unfinished", {})
    golden(only(run))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_recording_cut_anywhere_is_judged(data):
    answers = {
        "pair": hangs_unless(P2P, pair=(1, 2)),
        "nothing": lambda _group, _env: HANGS,
        "well": lambda _group, _env: WORKS,
        "plugin": hangs_unless({"NCCL_NET_PLUGIN": "none"}),
    }
    answer = answers[data.draw(st.sampled_from(sorted(answers)))]
    variables = {0: {"NCCL_P2P_DISABLE": "1"}} if data.draw(st.booleans()) else {}
    run = Run(8, answer, per_host=data.draw(st.sampled_from([8, 4, 1])), variables=variables, options=LONG).search()
    seen = run.cut(data.draw(st.integers(0, len(run.recording.outcomes))))
    found = list(fallback.judge(seen))
    assert len(found) <= 1
    # What is recommended was tried, and worked, three times with all ranks.
    if wanted := fallback.job_workarounds(seen):
        good = [t for t in seen.trials if t.env == wanted and len(t.groups) == 1 and seen.succeeded(t)]
        assert len(good) >= 3
    report = judge(seen.recording, all_checks())
    assert not any("P2P003" in note for note in report.recording_problems)
    assert report.workarounds == wanted
    assert Severity.ERROR not in [f.severity for f in found] or report.exit_code


def failed_with(run, error, detail=""):
    """The same run, in which COL001 over nccl failed with this error, and this output."""
    own = max(outcome.trial for outcome in run.recording.outcomes if outcome.code == "COL001")
    outcomes = (
        structs.replace(o, status=Status.RAISED, error=error, detail=detail) if o.trial == own else o
        for o in run.recording.outcomes
    )
    run.recording = structs.replace(run.recording, outcomes=tuple(outcomes))
    return run


def on_a_fabric(run, **fabric):
    """The same run, whose GPUs are on a board with NVSwitches."""
    per_host = len(next(iter(run.world.hosts.values())))
    looks = {
        ranks[0]: host_of(
            {index: {"fabric": Fabric(**{"state": 3, "status": 0, "health": 1} | fabric)} for index in range(per_host)},
            host=number,
            count=per_host,
        )
        for number, ranks in enumerate(run.world.hosts.values())
    }
    run.told(memory_errors.CHECK, looks)
    return run


LAST_ERROR = (
    "DistBackendError: NCCL error in: /pytorch/NCCLUtils.cpp:94, unhandled cuda error, NCCL version 2.27.7\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 401", "NVLS"),
        ("Error: failed to extend /dev/shm/nccl-03v824 to 4194660 bytes", "SHM"),
        ("cuMemImportFromShareableHandle failed", "CUMEM"),
        ("Cuda failure 217 'peer access is not supported between these two devices'", "CUMEM_HOST"),
        ("Error while attaching to shared memory segment /dev/shm/nccl-oDfT5Q (size 0), error: ...", "CUMEM_HOST"),
        ("Call to ibv_create_qp failed with error Cannot allocate memory", "IB"),
    ],
)
def test_the_order_follows_what_the_error_says(text, name):
    run = failed_with(Run(4, hangs_unless(P2P), options=LONG), LAST_ERROR + text).search()
    assert [own for part, own in run.tried() if part == "all ranks"][1] == name
    assert only(run).env == P2P


def test_shared_memory_that_needs_peer_access_keeps_shared_memory(golden):
    # NCCL 1838: any of these avoids it, and the first costs nothing.
    avoiding = [{"NCCL_CUMEM_HOST_ENABLE": "0"}, {"NCCL_SHM_DISABLE": "1"}, {"NCCL_CUMEM_ENABLE": "0"}]

    def answer(_group, env):
        return WORKS if any(own.items() <= env.items() for own in avoiding) else HANGS

    error = "Cuda failure 217 'peer access is not supported between these two devices'"
    run = failed_with(Run(2, answer, options=LONG), LAST_ERROR + error).search()
    assert run.tried() == [("all ranks", ""), *[("all ranks", "CUMEM_HOST")] * 3]
    assert only(run).env == avoiding[0]
    golden(only(run))
    assert only(Run(2, answer, options=LONG).search()).env == avoiding[0], "without a text, too"


def test_what_a_check_suspects_is_tried_first():
    run = on_a_fabric(Run(4, hangs_unless({"NCCL_NVLS_ENABLE": "0"}), options=LONG)).search()
    assert run.tried() == [("all ranks", ""), *[("all ranks", "NVLS")] * 3]
    run = Run(4, hangs_unless({"NCCL_SHM_DISABLE": "1"}), options=LONG)
    run.told(shared_memory.CHECK, {0: shared_memory.Data(SharedMemory(64 << 20, 1 << 20, None))})
    assert run.search().tried()[1] == ("all ranks", "SHM")


@pytest.mark.parametrize("name", ["NCCL_IB_DISABLE=1", "NCCL_PXN_DISABLE=1", "NCCL_NET_PLUGIN=none"])
def test_what_fails_between_hosts_only_blames_no_host(golden, name):
    variables = dict([name.split("=")])

    def answer(group, env):
        return HANGS if max(group) > 3 > min(group) and not variables.items() <= env.items() else WORKS

    found = only(Run(8, answer, per_host=4, options=LONG).search())
    assert (found.env, found.hosts) == (variables, ())
    golden(found.message)
    alone = Run(2, lambda _group, _env: HANGS, per_host=1, options=LONG).search()
    assert not any("PXN" in name for _, name in alone.tried())


def test_nvlinks_between_hosts_are_tried_where_there_may_be_some():
    def answer(group, env):
        return HANGS if max(group) > 3 > min(group) and env.get("NCCL_MNNVL_ENABLE") != "0" else WORKS

    domain = Run(8, answer, per_host=4, options=LONG)
    assert only(on_a_fabric(domain, cluster="7a3f").search()).env == {"NCCL_MNNVL_ENABLE": "0"}
    board = on_a_fabric(Run(8, answer, per_host=4, options=LONG), cluster="0").search()
    assert not any("MNNVL" in name for _, name in board.tried())
    assert "NCCL_MNNVL_ENABLE (no GPU belongs" in f"{only(board).evidence['not_tried']}"


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: Failed to initialize NCCL communicator: invalid usage (run with NCCL_DEBUG=WARN for details)",
        f"{LAST_ERROR}Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000",
    ],
)
def test_ranks_that_share_a_gpu_are_no_question_of_variables(error, golden):
    run = failed_with(Run(2, hangs_unless(P2P)), error)
    shared = devices.Data(torch="2", cuda="13", gpus=(devices.TorchGpu("H100", uuid_of(0)),), chosen=0)
    if "Duplicate" not in error:
        assert fallback.plan(run.seen) != ()
        run.told(devices.CHECK, {0: shared, 1: shared})
    assert fallback.plan(run.seen) == ()
    assert run.findings() == []
    golden(conditions.why_no_search(run.seen))


def test_direct_copies_that_were_right_clear_acs_and_the_iommu(golden):
    run = Run(2, hangs_unless(P2P), options=LONG).search()
    run.told(paths.CHECK, {0: paths_of(surroundings=translating(count=2, ports=(0, 1)), count=2)})
    assert "(P2P001.acs)" in only(run).message
    before = only(run).message
    assert only(copied(run, wrong=3)).message == before
    golden(only(run), only(copied(run)))


@pytest.mark.parametrize(
    ("error", "searches"),
    [("AssertionError: Unknown backend type ncll", False), ("DistBackendError: unhandled system error", True)],
)
def test_no_variable_is_looked_for_where_none_can_help(error, searches):
    run = failed_with(Run(4, hangs_unless(P2P)), error)
    assert bool(fallback.plan(run.seen)) is searches
    assert (conditions.why_no_search(run.seen) is None) is searches


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [(hangs_unless(P2P), P2P), (lambda _group, _env: HANGS, {}), (lambda _group, _env: WORKS, {})],
    ids=["found", "nothing-helps", "nothing-needed"],
)
def test_a_file_of_exports_says_why_it_is_empty(golden, answer, wanted):
    run = Run(4, answer, options=LONG).search()
    if reason := conditions.why_no_search(run.seen):
        skip = Skip(code="P2P003", reason=reason, is_inapplicable=True)
        run.recording = structs.replace(run.recording, skips=(skip,))
    report = judge(run.recording, all_checks())
    assert report.workarounds == wanted
    golden(shell.render(report))


@pytest.mark.parametrize(
    ("answer", "codes"),
    [
        (hangs_unless(P2P), {"RUN003.hung", "P2P003.fallback"}),
        (lambda _group, _env: HANGS, {"RUN004.unfinished", "P2P003.nothing"}),
    ],
    ids=["works with variables", "hangs whatever is set"],
)
def test_a_first_collective_that_works_with_variables_did_not_lack_time(answer, codes):
    run = Run(2, answer, options=RunOptions(budget_seconds=60.0, uses_workarounds=True))
    own = max(outcome.trial for outcome in run.recording.outcomes)
    state = ProcessState(pid=1, state="S", step_seconds=20.0)
    outcomes = (
        structs.replace(o, last_step=f"{CONNECT_STEP}: post", step_count=3, process=state) if o.trial == own else o
        for o in run.recording.outcomes
    )
    trials = (structs.replace(t, first_use_seconds=9.0) if t.number == own else t for t in run.recording.trials)
    run.recording = structs.replace(run.recording, outcomes=tuple(outcomes), trials=tuple(trials))
    report = judge(run.search().recording, all_checks())
    assert {finding.code for finding in report.findings if finding.code.startswith(("RUN", "P2P"))} == codes
