"""The launchers compared: their command lines, why one failed, the table, and the options of the comparison."""

import json
import sys

import pytest

from ddpdiag.cli.options import CheckOptions
from ddpdiag.codec import decode, pretty
from ddpdiag.errors import UsageError
from ddpdiag.model.launch import LaunchArgs
from ddpdiag.model.train import Ended, Train
from ddpdiag.render.page import Page
from ddpdiag.render.painter import paint
from ddpdiag.runtime.launchers import read_launch
from ddpdiag.strategies.blocks import launcher_blocks
from ddpdiag.strategies.command import checked, refuse_launched, refuse_others
from ddpdiag.strategies.launchers import Compare, LaunchersReport, LaunchMethod, RankTimes, Start, judge
from ddpdiag.strategies.launching import commands, environment, first_error

ASKED = Compare(ranks=2, steps=8)
LAUNCHER = ("--nproc-per-node", "2", "--master-port", "1234")
PYTHON = (sys.executable, "-P")
WHERE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}


def of(method: LaunchMethod, asked: Compare = ASKED, torchrun: str | None = "/bin/torchrun"):
    return commands(method, torchrun, asked, port=1234, out="/out", seconds=15.4)


# By hand the command is this Python and the training, nothing else.
TRAINING = of(LaunchMethod.BY_HAND)[0].words[2:]


@pytest.mark.parametrize(
    ("method", "words", "variables"),
    [
        (LaunchMethod.TORCHRUN, ("/bin/torchrun", *LAUNCHER, *TRAINING), [{}]),
        (LaunchMethod.RUN, (*PYTHON, "-m", "torch.distributed.run", *LAUNCHER, *TRAINING), [{}]),
        (LaunchMethod.LAUNCH, (*PYTHON, "-m", "torch.distributed.launch", *LAUNCHER, *TRAINING), [{}]),
        (
            LaunchMethod.LAUNCH_USE_ENV,
            (*PYTHON, "-m", "torch.distributed.launch", "--use-env", *LAUNCHER, *TRAINING),
            [{}],
        ),
        (LaunchMethod.SPAWN, (*PYTHON, *TRAINING, "--spawn"), [WHERE]),
        (
            LaunchMethod.BY_HAND,
            (*PYTHON, *TRAINING),
            [{"RANK": "0", "WORLD_SIZE": "2", **WHERE}, {"RANK": "1", "WORLD_SIZE": "2", **WHERE}],
        ),
    ],
)
def test_commands_of_each_method(method, words, variables):
    started = of(method)
    assert {command.words for command in started} == {words}
    assert [command.variables for command in started] == variables


def test_without_torchrun_there_is_no_command_for_it():
    assert of(LaunchMethod.TORCHRUN, torchrun=None) is None
    assert of(LaunchMethod.RUN, torchrun=None) is not None


def test_every_method_starts_the_same_training():
    asked = Compare(ranks=4, steps=9, batch_size=12, backend="gloo")
    assert TRAINING[:-1] == ("-m", "ddpdiag.strategies.workloads.launched", "/out", "15")
    for method in LaunchMethod:
        words = [word for command in of(method, asked) for word in command.words]
        (training,) = {word for word in words if word.startswith("{")}
        assert decode(training.encode(), Compare) == asked


def test_variables_of_an_earlier_launch_are_not_passed_on():
    env = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_PORT": "1", "PATH": "/bin", "OMP_NUM_THREADS": "4", "TMPDIR": "/old"}
    assert environment(env, folder="/new") == {
        "PATH": "/bin",
        "OMP_NUM_THREADS": "4",
        "TMPDIR": "/new",
        "PYTHONSAFEPATH": "1",
        "PYTHON_EXEC": sys.executable,
    }


# Why one failed ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("log", "told"),
    [
        (
            "Traceback (most recent call last):\n  File ...\nModuleNotFoundError: No module named 'torch'\n"
            "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n=====\n",
            "ModuleNotFoundError: No module named 'torch'",
        ),
        ("usage: launched.py\nlaunched.py: error: unrecognized arguments: -x\n====", "launched.py: error: unrec"),
        ("[rank1]:   File ...\n[rank1]: TypeError: no\n=====\n  ----\n", "TypeError: no"),
        ("terminate called after throwing\n  what(): x\ntraceback : Signal 6 (SIGABRT)\n", "terminate called"),
        ("Segmentation fault\n\n", "Segmentation fault"),
        ("ValueError: late\n[rank1]: OSError: [Errno 24] Too many open files\n", "OSError: [Errno 24] Too many open"),
        ("", ""),
    ],
)
def test_the_reason_is_read_from_the_output(log, told):
    assert first_error(log).startswith(told)
    assert bool(first_error(log)) == bool(told)


# The table -----------------------------------------------------------------------------------------------------------


def rank(number: int, *, group: float, step: float, threads: int) -> RankTimes:
    return RankTimes(
        rank=number,
        world_size=2,
        threads=threads,
        backend="gloo",
        device="CPU",
        torch_version="2.13.0",
        began_at=100.0 + group / 4,
        group_at=100.0 + group,
        step_seconds=(step, step * 9, step * 0.9),
    )


def works(method: LaunchMethod, *, group: float = 4.0, step: float = 0.01, threads: int = 1) -> Start:
    """A start whose second rank is the slower one."""
    ranks = (
        rank(0, group=group / 2, step=step / 2, threads=threads),
        rank(1, group=group, step=step, threads=threads),
    )
    return Start(method=method, begun_at=100.0, seconds=group + 1, ended=Ended.WORKS, ranks=ranks)


def fails(method: LaunchMethod, ended: Ended = Ended.FAILS, reason: str = "rank 0: no") -> Start:
    return Start(method=method, begun_at=100.0, seconds=1.0, ended=ended, reason=reason)


def report(*starts: Start, stop_signal: int | None = None) -> LaunchersReport:
    return judge(Compare(ranks=2), starts, host="n0", cores=2, seconds=61.0, stop_signal=stop_signal)


def everything() -> LaunchersReport:
    """All methods work; ranks of mp.spawn and by hand have more threads."""
    free = (LaunchMethod.SPAWN, LaunchMethod.BY_HAND)
    return report(*(works(m, step=0.02, threads=2) if m in free else works(m) for m in LaunchMethod))


def row(made: LaunchersReport, method: LaunchMethod):
    return next(each for each in made.rows if each.method is method)


def test_the_slowest_rank_and_the_median_of_its_steps_count():
    spawn = row(report(works(LaunchMethod.SPAWN, group=6.0, step=0.02)), LaunchMethod.SPAWN)
    assert (spawn.start_seconds, spawn.launcher_seconds, spawn.step_seconds) == (6.0, 1.5, 0.02)


def test_the_better_start_counts_for_each_figure():
    slow, fast = works(LaunchMethod.TORCHRUN, group=9.0, step=0.01), works(LaunchMethod.TORCHRUN, group=5.0, step=0.03)
    best = row(report(slow, fast), LaunchMethod.TORCHRUN)
    assert (best.start_seconds, best.step_seconds) == (5.0, 0.01)


@pytest.mark.parametrize(
    ("made", "code"),
    [
        (everything(), 0),
        (report(*(fails(method) if method is LaunchMethod.LAUNCH else works(method) for method in LaunchMethod)), 1),
        (report(*(fails(method) for method in LaunchMethod)), 1),
        (report(*(works(method) for method in LaunchMethod if method is not LaunchMethod.BY_HAND)), 3),
        (report(works(LaunchMethod.SPAWN), stop_signal=2), 130),
    ],
    ids=["all work", "one fails", "all fail", "one was not started", "ended by Ctrl-C"],
)
def test_the_sentence_counts_methods_that_work_and_decides(golden, made, code):
    assert made.exit_code == code
    golden(made.sentence, *dict.fromkeys(each.reason for each in made.rows if each.reason))


def test_a_method_that_fails_in_its_second_start_keeps_its_figures(golden):
    starts = [*(works(method) for method in LaunchMethod), fails(LaunchMethod.SPAWN)]
    spawn = row(report(*starts), LaunchMethod.SPAWN)
    assert (spawn.ended, spawn.start_seconds) == (Ended.FAILS, 4.0)
    golden(spawn.reason)


def test_a_known_cause_precedes_its_text(golden):
    made = report(fails(LaunchMethod.SPAWN, reason="rank 0: OSError: [Errno 24] Too many open files"))
    golden(row(made, LaunchMethod.SPAWN).reason)


def page(made: LaunchersReport, width: int = 80) -> str:
    drawn = Page(color=False, width=width)
    paint(drawn, launcher_blocks(made))
    return drawn.text()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_table_fits_and_is_ascii(width):
    text = page(everything(), width)
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
    made = json.loads(pretty(everything()))
    assert made["schema"] == "ddpdiag.launchers/1"
    assert [each["method"] for each in made["rows"]] == [method.value for method in LaunchMethod]
    assert made["rows"][-1]["threads"] == [2, 2]


# Options -------------------------------------------------------------------------------------------------------------


def test_the_defaults_are_taken():
    assert checked(Train(), CheckOptions(backend="gloo"), 4) == Compare(ranks=4, backend="gloo")


@pytest.mark.parametrize(
    "changed",
    [
        {"steps": 5},
        {"batch_size": 3},
        {"budget": 20.0},
        {"budget": float("nan")},
        {"backend": " "},
    ],
    ids=lambda changed: "".join(f"{name}={value}" for name, value in changed.items()),
)
def test_a_value_that_makes_no_sense_is_refused(changed):
    (name,) = changed
    of_run = name == "backend"
    with pytest.raises(UsageError, match=rf"^--{name.replace('_', '-')}.*: "):
        checked(Train(**{} if of_run else changed), CheckOptions(**changed if of_run else {}), 4)


def test_an_option_of_the_strategies_is_refused():
    with pytest.raises(UsageError, match=r"--port-range .*--compare-launchers"):
        refuse_others(["compare_launchers", "steps", "json", "port_range"])


def test_a_process_that_was_launched_is_refused(golden):
    def launched(env: dict[str, str], **asked: int):
        return read_launch(env, LaunchArgs(**asked), host="n0", gpus=0, cores=2, fresh="x")

    ranks = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n0", "MASTER_PORT": "29500"}
    with pytest.raises(UsageError) as caught:
        refuse_launched(launched({**ranks, "TORCHELASTIC_RUN_ID": "none"}))
    golden(str(caught.value))
    refuse_launched(launched({}, nproc_per_node=2))
