"""What the ways of starting a training came to: judged, shown, and asked for."""

import json

import pytest

from ddpdiag.errors import UsageError
from ddpdiag.model.train import Ended
from ddpdiag.runtime.launchers import read_launch
from ddpdiag.runtime.launchers.launch import LaunchArgs
from ddpdiag.strategies.command import as_json, checked, refuse_launched, refuse_others, render
from ddpdiag.strategies.launchers import Compare, LaunchersReport, LaunchMethod, RankTimes, Start, judged
from ddpdiag.strategies.options import TrainOptions

ASKED = Compare(ranks=2)


def rank(number: int, *, group: float, step: float, threads: int, begun: float = 100.0) -> RankTimes:
    return RankTimes(
        rank=number,
        world_size=2,
        learnt_from="environment",
        threads=threads,
        backend="gloo",
        device="CPU",
        torch_version="2.13.0",
        began_at=begun + group / 4,
        imported_at=begun + group / 2,
        group_at=begun + group,
        step_seconds=(step, step * 9, step * 0.9),
    )


def works(method: LaunchMethod, *, group: float = 4.0, step: float = 0.01, threads: int = 1) -> Start:
    """A turn whose second rank is the slower one."""
    ranks = (
        rank(0, group=group / 2, step=step / 2, threads=threads),
        rank(1, group=group, step=step, threads=threads),
    )
    return Start(method=method, begun_at=100.0, seconds=group + 1, ended=Ended.WORKS, ranks=ranks)


def fails(method: LaunchMethod, ended: Ended = Ended.FAILS, reason: str = "rank 0: no") -> Start:
    return Start(method=method, begun_at=100.0, seconds=1.0, ended=ended, reason=reason)


def report(*starts: Start, controls=(), told: int | None = None) -> LaunchersReport:
    return judged(ASKED, starts, controls, host="n0", cores=2, seconds=61.0, told=told)


def everything(*, run_step: float = 0.01, spawn_step: float = 0.02, threads: int = 2, controls=()) -> LaunchersReport:
    """All ways work; spawn and by hand take more threads."""
    own = {
        LaunchMethod.RUN: (run_step, 1),
        LaunchMethod.SPAWN: (spawn_step, threads),
        LaunchMethod.BY_HAND: (spawn_step, threads),
    }
    starts = (
        works(method, step=own.get(method, (0.01, 1))[0], threads=own.get(method, (0.01, 1))[1])
        for method in LaunchMethod
    )
    return report(*starts, controls=controls)


def row(made: LaunchersReport, method: LaunchMethod):
    return next(each for each in made.rows if each.method is method)


def test_a_rank_that_comes_last_decides_and_the_median_of_its_steps():
    made = report(works(LaunchMethod.TORCHRUN, group=4.0, step=0.01), works(LaunchMethod.SPAWN, group=6.0, step=0.02))
    spawn = row(made, LaunchMethod.SPAWN)
    assert (spawn.start_seconds, spawn.launcher_seconds, spawn.import_seconds) == (6.0, 1.5, 1.5)
    assert (spawn.start_ratio, spawn.step_seconds, spawn.step_ratio) == (1.5, 0.02, 2.0)
    assert row(made, LaunchMethod.TORCHRUN).step_ratio == 1.0


def test_the_best_round_counts_for_each_figure():
    slow, fast = works(LaunchMethod.TORCHRUN, group=9.0, step=0.01), works(LaunchMethod.TORCHRUN, group=5.0, step=0.03)
    best = row(report(slow, fast), LaunchMethod.TORCHRUN)
    assert (best.start_seconds, best.step_seconds) == (5.0, 0.01)
    assert [each.start_seconds for each in best.rounds] == [9.0, 5.0]


@pytest.mark.parametrize(
    ("made", "code"),
    [
        (everything(), 0),
        (report(*(fails(method) if method is LaunchMethod.LAUNCH else works(method) for method in LaunchMethod)), 1),
        (report(*(fails(method) for method in LaunchMethod)), 1),
        (report(*(works(method) for method in LaunchMethod if method is not LaunchMethod.BY_HAND)), 3),
        (report(works(LaunchMethod.SPAWN), told=2), 130),
    ],
    ids=["all work", "one fails", "all fail", "one had no turn", "ended by Ctrl-C"],
)
def test_how_many_ways_work_is_said_and_decides(golden, made, code):
    assert made.exit_code == code
    golden(made.sentence, *dict.fromkeys(each.reason for each in made.rows if each.reason))


def test_a_way_that_fails_in_the_second_round_fails_and_keeps_its_figures(golden):
    starts = [*(works(method) for method in LaunchMethod), fails(LaunchMethod.SPAWN)]
    spawn = row(report(*starts), LaunchMethod.SPAWN)
    assert (spawn.ended, spawn.start_seconds) == (Ended.FAILS, 4.0)
    golden(spawn.reason)


def test_a_known_cause_comes_before_its_text(golden):
    made = report(fails(LaunchMethod.SPAWN, reason="rank 0: OSError: [Errno 24] Too many open files"))
    golden(row(made, LaunchMethod.SPAWN).reason)


def test_without_torchrun_nothing_is_compared():
    spawn = row(report(works(LaunchMethod.SPAWN), fails(LaunchMethod.TORCHRUN)), LaunchMethod.SPAWN)
    assert (spawn.start_ratio, spawn.step_ratio) == (None, None)


# Why -----------------------------------------------------------------------------------------------------------------


START_UP = everything(threads=1, spawn_step=0.0105).explained
HAND = {
    LaunchMethod.SPAWN: fails(LaunchMethod.SPAWN),
    LaunchMethod.BY_HAND: works(LaunchMethod.BY_HAND, step=0.03, threads=2),
}
EXPLAINED = {
    "threads are the difference": everything(controls=[works(LaunchMethod.SPAWN, step=0.0103)]),
    "threads are most of it": everything(spawn_step=0.044, controls=[works(LaunchMethod.SPAWN, step=0.0114)]),
    "threads do not explain it": everything(controls=[works(LaunchMethod.SPAWN, step=0.02)]),
    "threads make no difference": everything(spawn_step=0.0105, controls=[works(LaunchMethod.SPAWN, step=0.01)]),
    "threads were not tried": everything(),
    "the noise is as large": everything(run_step=0.02, spawn_step=0.025, controls=[works(LaunchMethod.SPAWN)]),
    "by hand stands in for spawn": report(
        *(HAND.get(method, works(method)) for method in LaunchMethod), controls=[works(LaunchMethod.BY_HAND)]
    ),
    "equal threads": everything(threads=1),
    "equal threads and much noise": everything(threads=1, run_step=0.02, spawn_step=0.018),
}


@pytest.mark.parametrize("made", EXPLAINED.values(), ids=EXPLAINED)
def test_only_what_was_measured_explains_a_difference(golden, made):
    golden(*(sentence for sentence in made.explained if sentence not in START_UP))


def test_of_ways_that_are_alike_only_the_start_up_is_explained(golden):
    golden(*START_UP)


# The page ------------------------------------------------------------------------------------------------------------


def page(made: LaunchersReport, width: int = 80) -> str:
    return render(made, color=False, width=width)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_table_fits_and_is_ascii(width):
    text = page(everything(controls=[works(LaunchMethod.SPAWN)]), width)
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize(
    "made",
    [
        everything(),
        report(fails(LaunchMethod.TORCHRUN, Ended.HANGS, "it was not over after 15 s\x1b[31m")),
        report(*(fails(method) for method in LaunchMethod)),
    ],
    ids=["all work", "one hangs", "all fail alike"],
)
def test_a_whole_page(golden, made):
    golden(page(made))


def test_json_has_its_schema_and_every_row():
    made = json.loads(as_json(everything()))
    assert made["schema"] == "ddpdiag.launchers/1"
    assert [each["way"] for each in made["rows"]] == [method.value for method in LaunchMethod]
    assert made["rows"][-1]["threads"] == [2, 2]


# What is asked for ---------------------------------------------------------------------------------------------------


def test_the_usual_is_taken():
    assert checked(TrainOptions(backend="GLOO"), 4) == Compare(ranks=4, backend="gloo")


@pytest.mark.parametrize(
    "changed",
    [
        {"steps": 5},
        {"batch_size": 3},
        {"rounds": 0},
        pytest.param({"budget": 20.0}, id="budget_seconds=20.0"),
        pytest.param({"budget": float("nan")}, id="budget_seconds=nan"),
        {"backend": " "},
        {"backend": "\udcff"},
    ],
    ids=lambda changed: "".join(f"{name}={value}" for name, value in changed.items()),
)
def test_what_makes_no_sense_is_told(golden, changed):
    with pytest.raises(UsageError) as caught:
        checked(TrainOptions(**changed), 4)
    golden(str(caught.value))


def test_a_folder_that_is_not_there_is_told():
    with pytest.raises(UsageError, match="--data-dir /no/such"):
        checked(TrainOptions(data_dir="/no/such"), 4)


def test_an_option_of_the_strategies_is_refused():
    with pytest.raises(UsageError, match=r"--port-range .*--compare-launchers"):
        refuse_others(["compare_launchers", "steps", "json", "port_range"])


def launched(env: dict[str, str], **asked):
    return read_launch(env, LaunchArgs(**asked), host="n0", gpus=0, cores=2, fresh="x")


def test_a_process_that_was_launched_is_refused(golden):
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n0", "MASTER_PORT": "29500"}
    with pytest.raises(UsageError) as caught:
        refuse_launched(launched({**ranks, "TORCHELASTIC_RUN_ID": "none"}))
    golden(str(caught.value))
    refuse_launched(launched({}, nproc_per_node=2))
