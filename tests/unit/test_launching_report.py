"""What the ways of starting a training came to: judged, shown, and asked for."""

import json

import pytest
from msgspec import structs

from ddpdiag.cli.launching import checked, refuse_launched, refuse_others
from ddpdiag.errors import UsageError
from ddpdiag.judgement.launching import Seen, judged
from ddpdiag.model.launching import Compare, LaunchersReport, RankTimes, Start, Way
from ddpdiag.model.train import Ended
from ddpdiag.render.launching import as_json, render
from ddpdiag.runtime.environment import Asked, read_launch

ASKED = Compare(ranks=2)
TYPED = {way: f"start {way.value}" for way in Way}


def rank(number: int, *, group: float, step: float, threads: int, begun: float = 100.0) -> RankTimes:
    return RankTimes(
        rank=number,
        local_rank=number,
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
        first_loss=2.3,
        last_loss=0.4,
    )


def works(way: Way, *, group: float = 4.0, step: float = 0.01, threads: int = 1) -> Start:
    """A turn whose second rank is the slower one."""
    ranks = (
        rank(0, group=group / 2, step=step / 2, threads=threads),
        rank(1, group=group, step=step, threads=threads),
    )
    return Start(way=way, begun_at=100.0, seconds=group + 1, ended=Ended.WORKS, ranks=ranks)


def fails(way: Way, ended: Ended = Ended.FAILS, reason: str = "rank 0: no") -> Start:
    return Start(way=way, begun_at=100.0, seconds=1.0, ended=ended, reason=reason)


def report(*starts: Start, controls=(), told: int | None = None) -> LaunchersReport:
    seen = Seen(starts=starts, controls=tuple(controls), host="n0", cores=2, seconds=61.0, told=told)
    return judged(ASKED, seen, TYPED)


def everything(*, spawn_step: float = 0.02, threads: int = 2, controls=(), **changed) -> LaunchersReport:
    """All ways work; spawn and by hand take more threads."""
    own = {Way.SPAWN: (spawn_step, threads), Way.BY_HAND: (spawn_step, threads)}
    starts = (works(way, step=own.get(way, (0.01, 1))[0], threads=own.get(way, (0.01, 1))[1]) for way in Way)
    return report(*starts, controls=controls, **changed)


def row(made: LaunchersReport, way: Way):
    return next(each for each in made.rows if each.way is way)


def test_a_rank_that_comes_last_decides_and_the_median_of_its_steps():
    made = report(works(Way.TORCHRUN, group=4.0, step=0.01), works(Way.SPAWN, group=6.0, step=0.02))
    spawn = row(made, Way.SPAWN)
    assert (spawn.start_seconds, spawn.launcher_seconds, spawn.import_seconds) == (6.0, 1.5, 1.5)
    assert (spawn.start_ratio, spawn.step_seconds, spawn.step_ratio) == (1.5, 0.02, 2.0)
    assert row(made, Way.TORCHRUN).step_ratio == 1.0


def test_the_best_round_counts_for_each_figure():
    slow, fast = works(Way.TORCHRUN, group=9.0, step=0.01), works(Way.TORCHRUN, group=5.0, step=0.03)
    best = row(report(slow, fast), Way.TORCHRUN)
    assert (best.start_seconds, best.step_seconds) == (5.0, 0.01)
    assert [each.start_seconds for each in best.rounds] == [9.0, 5.0]


def test_all_work():
    made = everything()
    assert (made.exit_code, made.sentence) == (0, "6 of 6 ways of starting 2 ranks work")


def test_one_that_fails_is_named_and_decides():
    starts = [fails(way) if way is Way.LAUNCH else works(way) for way in Way]
    made = report(*starts)
    assert made.exit_code == 1
    assert made.sentence == "5 of 6 ways of starting 2 ranks work; torch.distributed.launch does not"


def test_a_way_that_fails_in_the_second_round_fails_and_keeps_its_figures():
    starts = [*(works(way) for way in Way), fails(Way.SPAWN)]
    spawn = row(report(*starts), Way.SPAWN)
    assert (spawn.ended, spawn.reason, spawn.start_seconds) == (Ended.FAILS, "in round 2 of 2: rank 0: no", 4.0)


def test_what_had_no_turn_is_unknown():
    made = report(*(works(way) for way in Way if way is not Way.BY_HAND))
    assert made.exit_code == 3
    assert made.sentence.endswith("; of by hand nothing is known")
    assert "--budget" in row(made, Way.BY_HAND).reason


def test_a_signal_s_exit_code_is_the_shell_s():
    made = report(works(Way.SPAWN), told=2)
    assert made.exit_code == 130
    assert "ended before" in row(made, Way.BY_HAND).reason


def test_without_torchrun_nothing_is_compared():
    spawn = row(report(works(Way.SPAWN), fails(Way.TORCHRUN)), Way.SPAWN)
    assert (spawn.start_ratio, spawn.step_ratio) == (None, None)


# Why -----------------------------------------------------------------------------------------------------------------


def explained(**changed) -> str:
    return " ".join(everything(**changed).explained)


def test_the_threads_are_the_difference_if_it_goes_away_with_them():
    told = explained(controls=[works(Way.SPAWN, step=0.0103)])
    assert "each of their 2 ranks takes 2 threads, 4 on 2 cores" in told
    assert (
        "With OMP_NUM_THREADS=1, steps started by mp.spawn take 1.03 times as long as torchrun's, without it 2.00"
        in told
    )
    assert "the threads are the difference" in told


def test_a_large_difference_that_all_but_goes_away_is_explained():
    assert "the threads are the difference" in explained(spawn_step=0.044, controls=[works(Way.SPAWN, step=0.0114)])


def test_with_noise_as_large_as_the_difference_nothing_is_claimed():
    step = {Way.RUN: 0.02, Way.SPAWN: 0.025}
    starts = [works(way, step=step.get(way, 0.01), threads=2 if way is Way.SPAWN else 1) for way in Way]
    assert "does not tell whether" in " ".join(report(*starts, controls=[works(Way.SPAWN)]).explained)


def test_the_start_up_is_told_by_who_imports_torch():
    assert "1.0 s with mp.spawn, whose parent imports torch too, 1.0 s by hand, where nobody does." in explained()


def test_the_threads_are_not_blamed_if_it_stays():
    assert "do not explain it" in explained(controls=[works(Way.SPAWN, step=0.02)])


def test_threads_without_a_difference_are_said_to_make_none():
    assert "make no difference" in explained(spawn_step=0.0105, controls=[works(Way.SPAWN, step=0.01)])


def test_what_was_not_measured_is_not_claimed():
    assert "was not measured" in explained()


def test_by_hand_stands_in_for_a_spawn_that_fails():
    own = {Way.SPAWN: fails(Way.SPAWN), Way.BY_HAND: works(Way.BY_HAND, step=0.03, threads=2)}
    made = report(*(own.get(way, works(way)) for way in Way), controls=[works(Way.BY_HAND)])
    assert "With OMP_NUM_THREADS=1, steps started by hand take 1.00 times" in " ".join(made.explained)


def test_a_difference_with_equal_threads_has_no_known_cause():
    assert "nothing that was measured explains it" in explained(threads=1)
    assert "nothing that was measured" not in explained(threads=1, spawn_step=0.0105)


def test_a_program_that_differs_from_itself_shows_the_noise():
    starts = [works(way, step=0.02 if way is Way.RUN else 0.018 if way is Way.SPAWN else 0.01) for way in Way]
    told = " ".join(report(*starts).explained)
    assert "Noise: torchrun and torch.distributed.run are one program" in told
    assert "nothing that was measured explains it" not in told  # 1.8 is less than 2.0, which is noise
    assert "Noise" not in explained()


# The page ------------------------------------------------------------------------------------------------------------


def page(made: LaunchersReport, width: int = 80) -> str:
    return render(made, color=False, width=width)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_table_fits_and_is_ascii(width):
    text = page(everything(controls=[works(Way.SPAWN)]), width)
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= width


def test_a_line_holds_the_figures_of_a_way():
    lines = page(everything()).splitlines()
    (spawn,) = [line for line in lines if line.startswith("mp.spawn  ")]
    assert spawn.split() == ["mp.spawn", "works", "4.00", "s", "1.00", "1.00", "s", "20.0", "ms", "2.00", "2"]


def test_an_error_stands_below_with_what_to_type():
    text = page(report(fails(Way.TORCHRUN, Ended.HANGS, "it was not over after 15 s\x1b[31m")))
    assert "torchrun hangs: it was not over after 15 s\\x1b[31m\n    start torchrun\n" in text


def test_one_reason_of_all_is_told_once():
    made = report(*(fails(way) for way in Way))
    assert made.sentence == "none of 6 ways of starting 2 ranks work"
    assert page(made).count("rank 0: no") == 1


def test_json_has_its_schema_and_every_row():
    made = json.loads(as_json(everything()))
    assert made["schema"] == "ddpdiag.launchers/1"
    assert [each["way"] for each in made["rows"]] == [way.value for way in Way]
    assert made["rows"][-1]["threads"] == [2, 2]


# What is asked for ---------------------------------------------------------------------------------------------------


def test_the_usual_is_taken():
    assert checked(Compare(ranks=0, backend="GLOO"), 4) == Compare(ranks=4, backend="gloo")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"steps": 5}, "--steps 5: expected 6 to 2,000"),
        ({"batch_size": 3}, "--batch-size 3: expected 4 to"),
        ({"rounds": 0}, "--rounds 0: expected 1 to 20"),
        ({"budget_seconds": 20.0}, "--budget 20: expected 60 s or more"),
        ({"budget_seconds": float("nan")}, "--budget nan: expected"),
        ({"backend": " "}, "--backend: expected a name"),
        ({"backend": "\udcff"}, r"--backend \udcff: it is no UTF-8"),
        ({"data_dir": "/no/such"}, "--data-dir /no/such: no such directory"),
    ],
)
def test_what_makes_no_sense_is_told(changed, words):
    with pytest.raises(UsageError) as told:
        checked(structs.replace(ASKED, **changed), 4)
    assert words in str(told.value)


def test_an_option_of_the_strategies_is_refused():
    with pytest.raises(UsageError, match="--port-range has no meaning with --compare-launchers"):
        refuse_others(["compare_launchers", "steps", "json", "port_range"])


def launched(env: dict[str, str], **asked):
    return read_launch(env, Asked(**asked), host="n0", gpus=0, cores=2, fresh="x")


def test_a_process_that_was_launched_is_refused():
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n0", "MASTER_PORT": "29500"}
    with pytest.raises(UsageError, match=r"is rank 1 of 2 already \(launcher: torchrun\)"):
        refuse_launched(launched({**ranks, "TORCHELASTIC_RUN_ID": "none"}))
    refuse_launched(launched({}, nproc_per_node=2))
