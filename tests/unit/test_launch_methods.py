"""The command lines of each way of starting a training, and what the ways' output says."""

import sys

import pytest

from ddpdiag.codec import decode
from ddpdiag.strategies.launchers import Compare, LaunchMethod, RankError, typed
from ddpdiag.strategies.turns import commands, environment, first_error

ASKED = Compare(ranks=2, steps=8)
LAUNCHER = ("--nproc-per-node", "2", "--master-port", "1234")
PYTHON = (sys.executable, "-P")
WHERE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}


def of(method: LaunchMethod, asked: Compare = ASKED, torchrun: str | None = "/bin/torchrun"):
    return commands(method, torchrun, asked, port=1234, out="/out", seconds=15.4)


# By hand there is nothing before the training but this Python, and nothing behind it.
TRAINING = of(LaunchMethod.BY_HAND)[0].words[2:]


@pytest.mark.parametrize(
    ("method", "head"),
    [
        (LaunchMethod.TORCHRUN, ("/bin/torchrun",)),
        (LaunchMethod.RUN, (*PYTHON, "-m", "torch.distributed.run")),
        (LaunchMethod.LAUNCH, (*PYTHON, "-m", "torch.distributed.launch")),
        (LaunchMethod.LAUNCH_USE_ENV, (*PYTHON, "-m", "torch.distributed.launch", "--use-env")),
    ],
)
def test_a_launcher_is_one_command_with_the_training_behind_it(method, head):
    (command,) = of(method)
    assert command.words == (*head, *LAUNCHER, *TRAINING)
    assert command.variables == {}


def test_spawn_is_one_command_that_is_told_how_many():
    (command,) = of(LaunchMethod.SPAWN)
    assert command.words == (*PYTHON, *TRAINING, "--spawn")
    assert command.variables == WHERE


def test_by_hand_is_a_command_for_each_rank():
    first, second = of(LaunchMethod.BY_HAND)
    assert first.words == second.words == (*PYTHON, *TRAINING)
    assert first.variables == {"RANK": "0", "WORLD_SIZE": "2", **WHERE}
    assert second.variables == {"RANK": "1", "WORLD_SIZE": "2", **WHERE}


def test_without_torchrun_there_is_no_command_for_it():
    assert of(LaunchMethod.TORCHRUN, torchrun=None) is None
    assert of(LaunchMethod.RUN, torchrun=None) is not None


def test_the_training_is_told_the_same_in_every_way():
    asked = Compare(ranks=4, steps=9, batch_size=12, backend="gloo", data_dir="/digits")
    assert TRAINING[:-1] == ("-m", "ddpdiag.strategies.workloads.launched", "/out", "15")
    for method in LaunchMethod:
        words = [word for command in of(method, asked) for word in command.words]
        (training,) = {word for word in words if word.startswith("{")}
        assert decode(training.encode(), Compare) == asked
        assert words[words.index("--data-dir") + 1] == "/digits"
    assert "--data-dir" not in TRAINING


def test_what_an_earlier_launch_left_is_not_handed_on():
    env = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_PORT": "1", "PATH": "/bin", "OMP_NUM_THREADS": "4", "TMPDIR": "/old"}
    made = environment(env, {"OMP_NUM_THREADS": "1"}, folder="/new")
    assert made == {
        "PATH": "/bin",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": "/new",
        "PYTHONSAFEPATH": "1",
        "PYTHON_EXEC": sys.executable,
    }


@pytest.mark.parametrize("method", LaunchMethod)
def test_every_way_can_be_typed(method):
    assert "train.py" in typed(method, 2)


# What went wrong -----------------------------------------------------------------------------------------------------


def test_the_earliest_rank_is_the_cause_and_not_its_echoes(golden):
    errors = [
        RankError(rank=0, error="RuntimeError: Connection closed by peer", at=2.0),
        RankError(rank=1, error="DataError: no digits", at=1.0),
    ]
    golden(first_error(errors, "Traceback ..."))


def test_of_a_long_error_the_first_and_the_last_line_are_told(golden):
    error = RankError(rank=0, error="DistBackendError: NCCL error\nncclInvalidUsage\nDuplicate GPU detected\n", at=1.0)
    golden(first_error([error], ""))


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
def test_without_a_rank_s_word_the_output_is_read(log, told):
    assert first_error([], log).startswith(told)
    assert bool(first_error([], log)) == bool(told)
