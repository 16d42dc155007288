"""The launchers compared: their command lines, why one failed, the table, and the options of the comparison."""

import json
import sys

import pytest

from ddpdiag.cli.options import CheckArgs
from ddpdiag.codec import decode, indented_json
from ddpdiag.errors import UsageError
from ddpdiag.model.launch import LaunchArgs
from ddpdiag.model.train import StrategyStatus, TrainRequest
from ddpdiag.render.page import Page
from ddpdiag.render.painter import paint
from ddpdiag.runtime.launchers import read_launch
from ddpdiag.strategies.blocks import launcher_blocks
from ddpdiag.strategies.command import refuse_launched, training_to_compare
from ddpdiag.strategies.launchers import LauncherRow, LaunchersReport, LaunchMethod, Training, judge
from ddpdiag.strategies.launching import commands, environment, first_error

TRAINING = Training(ranks=2, steps=8, batch_size=64, backend="gloo")
LAUNCHER = ("--nproc-per-node", "2", "--master-port", "1234")
PYTHON = (sys.executable, "-P")
WHERE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}


def of(method: LaunchMethod):
    return commands(method, "/bin/torchrun", TRAINING, port=1234, out="/out", seconds=15.4)


# By hand the command is this Python and the training, nothing else.
PROGRAM = of(LaunchMethod.BY_HAND)[0].arguments[2:]


@pytest.mark.parametrize(
    ("method", "words", "variables"),
    [
        (LaunchMethod.TORCHRUN, ("/bin/torchrun", *LAUNCHER, *PROGRAM), [{}]),
        (LaunchMethod.RUN, (*PYTHON, "-m", "torch.distributed.run", *LAUNCHER, *PROGRAM), [{}]),
        (LaunchMethod.LAUNCH, (*PYTHON, "-m", "torch.distributed.launch", *LAUNCHER, *PROGRAM), [{}]),
        (
            LaunchMethod.LAUNCH_USE_ENV,
            (*PYTHON, "-m", "torch.distributed.launch", "--use-env", *LAUNCHER, *PROGRAM),
            [{}],
        ),
        (LaunchMethod.SPAWN, (*PYTHON, *PROGRAM, "--spawn"), [WHERE]),
        (
            LaunchMethod.BY_HAND,
            (*PYTHON, *PROGRAM),
            [{"RANK": "0", "WORLD_SIZE": "2", **WHERE}, {"RANK": "1", "WORLD_SIZE": "2", **WHERE}],
        ),
    ],
)
def test_each_method_starts_the_same_training(method, words, variables):
    started = of(method)
    assert {command.arguments for command in started} == {words}
    assert [command.variables for command in started] == variables
    assert PROGRAM[:-1] == ("-m", "ddpdiag.strategies.workloads.launched", "/out", "15")
    assert decode(PROGRAM[-1].encode(), Training) == TRAINING


def test_variables_of_an_earlier_launch_are_not_passed_on():
    env = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_PORT": "1", "PATH": "/bin", "OMP_NUM_THREADS": "4", "TMPDIR": "/old"}
    assert environment(env, folder="/new") == {
        "PATH": "/bin",
        "OMP_NUM_THREADS": "4",
        "TMPDIR": "/new",
        "PYTHONSAFEPATH": "1",
        "PYTHON_EXEC": sys.executable,
    }


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (
            "Traceback (most recent call last):\n  File ...\nModuleNotFoundError: No module named 'torch'\n"
            "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n=====\n",
            "ModuleNotFoundError: No module named 'torch'",
        ),
        ("usage: launched.py\nlaunched.py: error: unrecognized arguments: -x\n====", "launched.py: error: unrec"),
        ("[rank1]:   File ...\n[rank1]: TypeError: no\n=====\n  ----\n", "TypeError: no"),
        ("Segmentation fault\n\n", "Segmentation fault"),
        ("ValueError: late\n[rank1]: OSError: [Errno 24] Too many open files\n", "OSError: [Errno 24] Too many open"),
        ("", ""),
    ],
)
def test_the_reason_is_read_from_the_output(log, reason):
    assert first_error(log).startswith(reason)
    assert bool(first_error(log)) == bool(reason)


def works(method: LaunchMethod, *, step: float = 0.01, threads: int = 1) -> LauncherRow:
    figures = {"start_seconds": 4.0, "step_seconds": step, "threads": (threads, threads)}
    return LauncherRow(method=method, status=StrategyStatus.WORKS, **figures)


def fails(
    method: LaunchMethod, status: StrategyStatus = StrategyStatus.FAILS, reason: str = "rank 0: no"
) -> LauncherRow:
    return LauncherRow(method=method, status=status, reason=reason)


def report(*starts: LauncherRow, stop_signal: int | None = None) -> LaunchersReport:
    setting = "gloo, CPU, torch 2.13.0"
    rows = {start.method: start for start in starts}
    return judge(TRAINING, rows, host="n0", cores=2, seconds=61.0, setting=setting, stop_signal=stop_signal)


def everything() -> LaunchersReport:
    """All methods work; ranks of mp.spawn and by hand have more threads."""
    free = (LaunchMethod.SPAWN, LaunchMethod.BY_HAND)
    return report(*(works(m, step=0.02, threads=2) if m in free else works(m) for m in LaunchMethod))


@pytest.mark.parametrize(
    ("made", "code"),
    [
        (everything(), 0),
        (report(*(fails(method) if method is LaunchMethod.LAUNCH else works(method) for method in LaunchMethod)), 1),
        (report(*(fails(method) for method in LaunchMethod)), 1),
        (report(*(works(method) for method in LaunchMethod if method is not LaunchMethod.BY_HAND)), 3),
        (report(works(LaunchMethod.SPAWN), stop_signal=2), 130),
        (report(fails(LaunchMethod.TORCHRUN, StrategyStatus.HANGS, "it did not end within 15 s\x1b[31m")), 1),
    ],
    ids=["all work", "one fails", "all fail", "one was not started", "ended by Ctrl-C", "one hangs"],
)
def test_the_table_counts_methods_that_work_and_decides(golden, made, code):
    assert made.exit_code == code
    for width in (60, 80):
        drawn = Page(color=False, width=width)
        paint(drawn, launcher_blocks(made))
        assert drawn.text().isascii()
        assert max(map(len, drawn.text().splitlines())) <= width
    golden(drawn.text())


def test_json_has_its_schema_and_every_row():
    made = json.loads(indented_json(everything()))
    assert made["schema"] == "ddpdiag.launchers/1"
    assert [each["method"] for each in made["rows"]] == [method.value for method in LaunchMethod]
    assert made["rows"][-1]["threads"] == [2, 2]


def test_the_defaults_are_taken():
    training = training_to_compare(TrainRequest(), CheckArgs(backend="gloo"), 4)
    assert training == Training(ranks=4, steps=30, batch_size=64, backend="gloo")


@pytest.mark.parametrize(
    "changed",
    [{"steps": 5}, {"batch_size": 3}, {"budget": 20.0}, {"budget": float("nan")}, {"backend": " "}],
    ids=lambda changed: "".join(f"{name}={value}" for name, value in changed.items()),
)
def test_a_value_that_makes_no_sense_is_refused(changed):
    (name,) = changed
    of_run = name == "backend"
    with pytest.raises(UsageError, match=rf"^--{name.replace('_', '-')}.*: "):
        training_to_compare(TrainRequest(**{} if of_run else changed), CheckArgs(**changed if of_run else {}), 4)


def test_a_process_that_was_launched_is_refused(golden):
    def launched(env: dict[str, str], **asked: int):
        return read_launch(env, LaunchArgs(**asked), host="n0", gpus=0, cores=2, unique_id="x")

    ranks = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n0", "MASTER_PORT": "29500"}
    with pytest.raises(UsageError) as caught:
        refuse_launched(launched({**ranks, "TORCHELASTIC_RUN_ID": "none"}))
    golden(str(caught.value))
    refuse_launched(launched({}, nproc_per_node=2))
