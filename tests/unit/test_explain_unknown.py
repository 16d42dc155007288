"""Texts that no card knows: the first one is quoted as the failure, unless it follows from a known one."""

import json

import pytest

from ddpdiag.explain.card import Role
from ddpdiag.explain.matcher import Explanation, explain_log
from ddpdiag.explain.render import render

PEER = "RuntimeError: [x/pair.cc:553] Connection closed by peer [10.0.0.1]:8066. This is typically"
SYSTEM = "RuntimeError: NCCL error in: ../ProcessGroupNCCL.cpp:1191, unhandled system error, NCCL version 2.21.5"
WARNING = "n0:71:90 [0] transport/net.cc:12 NCCL WARN The moon is in the wrong phase"
WAIT = "RuntimeError: [x/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation to complete"
CRASH = "  exitcode  : -11 (pid: 17)  (SIGSEGV)"
TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "/job/train.py", line 12, in main',
    "    client.read(key)",
    '  File "/venv/lib/python3.11/site-packages/etcd/client.py", line 5, in read',
    "    raise error",
    "etcd.EtcdKeyNotFound: Key not found : /torchelastic",
)
HANDLING = ("", "During handling of the above exception, another exception occurred:", "")


def explained(*lines: str) -> Explanation:
    return explain_log(["\n".join(lines).encode()], "job.log")


def roles(found: Explanation) -> list[tuple[str, str]]:
    return [(one.card.name, one.card.role.value) for one in found.sightings]


def raised(exception: str, frame: str = '  File "/job/train.py", line 3, in step') -> tuple[str, ...]:
    return "Traceback (most recent call last):", frame, exception


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (WARNING, "unknown-nccl-warning"),
        ("n0:7:9 [0] create_plugin:213 NCCL WARN NET/OFI Failed to find provider", "unknown-network-plugin"),
        ("NCCL error: ncclInvalidArgument: Invalid value for an argument", "unknown-nccl-error"),
        ("all_reduce: ncclCommInitRank failed: 7", "unknown-nccl-error"),
        ("Test NCCL failure all_reduce.cu:42 'internal'", "unknown-nccl-test-failure"),
        ("RuntimeError: CUDA error: out of luck", "cuda-error"),
        ("what(): CUDA driver error: 217", "unknown-cuda-driver-error"),
        ("cudaErrorLaunchMaxDepthExceeded", "unknown-cuda-error"),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear", "unknown-gpu-library-error"),
        ("ValueError: batch of 3 images", "exception"),
        ("binascii.Error: Incorrect padding", "exception"),
        ("omegaconf.errors.ConfigKeyError", "exception-bare"),
    ],
)
def test_an_unknown_text_is_quoted_under_its_subsystem(line: str, name: str) -> None:
    (one,) = explain_log([line.encode()], "").sightings
    assert (one.card.name, one.card.role) == (name, Role.FAILURE)
    assert one.excerpt == line


@pytest.mark.parametrize(
    ("prefix", "who"),
    [
        ("", ()),
        ("3: ", (3,)),
        (" 3: ", (3,)),
        ("[1,3]<stderr>:", (3,)),
        ("[1,mpirank:3,algo-1]<stderr>:", (3,)),
        ("[rank3]:", (3,)),
        ("[default3]:", (3,)),
        ("2024-05-01T10:00:00.123456789Z stderr F ", ()),
        ("2024-05-01T10:00:00.123Z stderr F [rank3]: ", (3,)),
        ("2024-05-01T10:00:00.123000+00:00 ", ()),
        ("2024-05-01 10:00:00,123 ", ()),
        ("1714557600000 ", ()),
        ("trainer-1  | ", ("trainer-1",)),
        ("[pod/train-worker-0/pytorch] ", ("train-worker-0",)),
        ("(RayTrainWorker pid=123, ip=1.2.3.4) ", ("1.2.3.4",)),
        ("(RayTrainWorker pid=123) ", ()),
        ("n1: ", ("n1",)),
        ("worker-1: ", ()),
    ],
)
def test_a_traceback_is_read_behind_prefixes(prefix: str, who: tuple[int | str, ...]) -> None:
    (one,) = explained(*(prefix + line for line in TRACEBACK)).sightings
    assert one.card.name == "exception-named"
    assert one.frame == "/job/train.py, line 12, in main"
    assert (one.ranks or one.tasks or one.local_ranks or one.hosts) == who


@pytest.mark.parametrize("key", ["log", "message", "msg"])
def test_json_lines_are_read(key: str) -> None:
    lines = [json.dumps({"stream": "stderr", key: f"{line}\n", "time": "2024"}) for line in TRACEBACK]
    whole = json.dumps({"level": "ERROR", key: "\n".join(f"[rank3]: {line}" for line in TRACEBACK)})
    for found in explained(*lines), explained(json.dumps({key: "\n".join(TRACEBACK)})):
        (one,) = found.sightings
        assert (one.excerpt, one.frame) == (TRACEBACK[-1], "/job/train.py, line 12, in main")
    assert explained(whole).sightings[0].ranks == (3,)
    assert roles(explained(json.dumps({key: PEER}))) == [("peer-closed", "echo")]


def test_ranks_that_write_between_each_others_lines_are_kept_apart() -> None:
    lines = [f"[rank{rank}]: {line}" for line in TRACEBACK for rank in (0, 1)]
    (one,) = explained(*lines).sightings
    assert (one.count, one.ranks) == (2, (0, 1))


def test_torchruns_table_is_indented() -> None:
    first, *others = raised("my.Boom: 3", '  File "a.py", line 1')
    (one,) = explained(f"  traceback : {first}", *(f"  {line}" for line in others)).sightings
    assert (one.excerpt, one.frame) == ("my.Boom: 3", "a.py, line 1")


def test_a_known_text_wins_over_an_unknown_one_before_it() -> None:
    known = "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert roles(explained("ValueError: x", known)) == [("illegal-access", "failure"), ("exception", "failure")]
    assert roles(explained(WAIT, "ValueError: x")) == [("gloo-operation-timeout", "wait"), ("exception", "failure")]


def test_an_exception_wins_over_what_only_shows_that_a_process_ended() -> None:
    assert roles(explained("ValueError: x", CRASH)) == [("exception", "failure"), ("worker-signal", "failure")]
    assert roles(explained("[rank1]: ValueError: x", f"[rank0]: {WAIT}"))[0] == ("exception", "failure")


def test_a_warning_is_the_failure_only_where_nothing_else_is() -> None:
    assert roles(explained(WARNING)) == [("unknown-nccl-warning", "hint")]
    assert not explained(WARNING).is_explained
    assert roles(explained(WARNING, SYSTEM))[0] == ("unknown-nccl-warning", "failure")
    assert roles(explained(WARNING, PEER))[0] == ("unknown-nccl-warning", "failure")
    assert roles(explained(WARNING, CRASH))[1] == ("unknown-nccl-warning", "hint")
    assert roles(explained(WARNING, WAIT))[1] == ("unknown-nccl-warning", "hint")


def test_an_exception_after_an_echo_of_its_own_process_is_one_too() -> None:
    found = explained(f"[rank0]: {PEER}", "[rank0]: app.Error: cannot go on", "[rank1]: ValueError: x")
    assert [(one.card.role, one.ranks) for one in found.sightings] == [
        (Role.FAILURE, (1,)),
        (Role.ECHO, (0,)),
        (Role.ECHO, (0,)),
    ]


def test_an_exception_raised_because_of_an_echo_is_one_too() -> None:
    assert roles(explained(*raised(PEER), *HANDLING, *raised("app.Fatal: no"))) == [
        ("peer-closed", "echo"),
        ("exception-named", "echo"),
    ]


def test_the_last_exception_of_a_chain_is_the_failure() -> None:
    lines = (*raised("KeyError: 'lr'"), *HANDLING, *raised("app.Fatal: no lr"))
    found = explained(*(f"[rank2]: {line}".rstrip() for line in lines))
    assert found.sightings[0].excerpt == "app.Fatal: no lr"
    assert found.sightings[1].card.role is Role.ECHO


def test_exceptions_that_python_ignores_are_no_failure() -> None:
    assert explained("Exception ignored in: <function X.__del__ at 0x7>", *raised("AssertionError: x")).sightings == ()
    assert explained(*raised("KeyboardInterrupt")).sightings == ()


def test_the_page_shows_the_line_and_its_frame(golden) -> None:
    golden(render(explained(*(f"[rank3]: {line}" for line in TRACEBACK)), width=80, color=False))
    golden(render(explained(WARNING, SYSTEM), width=80, color=False))
    golden(render(explained(WARNING), width=80, color=False))
