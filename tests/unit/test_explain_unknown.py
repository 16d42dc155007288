"""Texts that no card knows: the first one is quoted as the failure, unless it follows from a known one.

In the logs of healthy jobs there is none.
"""

import json

import pytest

from ddpdiag.explain.card import Role, all_cards
from ddpdiag.explain.matcher import Explanation, explain_log
from ddpdiag.explain.render import log_blocks, render

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
        ("all_reduce: ncclCommInitRank failed: 7", "unknown-nccl-error"),
        ("Test NCCL failure all_reduce.cu:42 'internal'", "unknown-nccl-test-failure"),
        ("RuntimeError: CUDA error: out of luck", "cuda-error"),
        ("what(): CUDA driver error: 217", "unknown-cuda-driver-error"),
        ("cudaErrorLaunchMaxDepthExceeded", "unknown-cuda-error"),
        ("RuntimeError: cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling", "unknown-gpu-library-error"),
        ("  what():  basic_string::_M_create", "unknown-cpp-exception"),
        ("ValueError: batch of 3 images", "exception"),
        ("binascii.Error: Incorrect padding", "exception"),
        ("omegaconf.errors.ConfigKeyError", "exception-bare"),
    ],
)
def test_an_unknown_text_is_quoted_under_its_subsystem(line: str, name: str) -> None:
    (one,) = explain_log([line.encode()], "").sightings
    assert (one.card.name, one.card.role) == (name, Role.FAILURE)
    assert one.first.excerpt == line.strip()


@pytest.mark.parametrize(
    ("prefix", "who"),
    [
        ("", ()),
        ("3: ", (3,)),
        (" 3: ", (3,)),
        ("[1,3]<stderr>:", (3,)),
        ("[1,mpirank:3,algo-1]<stderr>:", (3,)),
        ("[2024-02-27T21:35:28.419846Z] fa88a9df [rank=3] || ", (3,)),
        ("[2021-12-07 10:42:16] 6ed813d5 || ", ()),
        ("(EngineCore_DP1 pid=197) ERROR 11-20 11:23:40 [core.py:708] ", ()),
        ("ERROR 12-25 01:10:28 multiproc_worker_utils.py:229] ", ()),
        ("2025-07-17 17:00:39 | ERROR | stderr | ", ()),
        ("2023/10/26 12:12:06 ", ()),
        ("(worker1, rank=3, pid=2455, ip=10.0.0.9) ", (3,)),
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
        ("10.1.20.11: 10.1.20.11: ", ("10.1.20.11",)),
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
        assert (one.first.excerpt, one.frame) == (TRACEBACK[-1], "/job/train.py, line 12, in main")
    assert explained(whole).sightings[0].ranks == (3,)
    assert roles(explained(json.dumps({key: PEER}))) == [("peer-closed", "echo")]


def test_a_log_may_begin_inside_of_a_traceback() -> None:
    (one,) = explained(*TRACEBACK[1:]).sightings
    assert (one.card.name, one.first.excerpt, one.first.line) == ("exception-named", TRACEBACK[-1], 5)


def test_a_message_that_begins_on_the_next_line_is_quoted() -> None:
    (one,) = explained(
        "3: lit.MisconfigurationException: ", "0: step 1", "3:     You requested [0, 1]", "3: "
    ).sightings
    assert one.first.excerpt == "lit.MisconfigurationException: You requested [0, 1]"


CALL = "n0:71:90 [0] NCCL INFO transport/net.cc:223 -> "
ILLEGAL = "RuntimeError: CUDA error: an illegal memory access was encountered"
CLIENT = "[W socket.cpp:601] [c10d] The client socket has failed to connect to [n0]:29500 (errno: 111 - Refused)."


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ((WARNING, f"{CALL}2"), [("unknown-nccl-warning", "failure"), ("nccl-call-failed", "echo")]),
        ((f"{CALL}0",), []),
        (("ValueError: x", ILLEGAL), [("illegal-access", "failure"), ("exception", "failure")]),
        ((WAIT, "ValueError: x"), [("gloo-operation-timeout", "wait"), ("exception", "failure")]),
        (("ValueError: x", CRASH), [("exception", "failure"), ("worker-signal", "failure")]),
        ((WARNING,), [("unknown-nccl-warning", "hint")]),
        ((*raised(PEER), *HANDLING, *raised("app.Fatal: no")), [("peer-closed", "echo"), ("exception-named", "echo")]),
        ((CLIENT,), [("client-failed", "hint")]),
        ((CLIENT, WAIT), [("gloo-operation-timeout", "wait"), ("client-failed", "note")]),
        ((CLIENT, PEER), [("client-failed", "hint"), ("peer-closed", "echo")]),
    ],
)
def test_texts_have_their_roles_beside_each_other(lines: tuple[str, ...], expected: list[tuple[str, str]]) -> None:
    assert roles(explained(*lines)) == expected


def test_ranks_that_write_between_each_others_lines_are_kept_apart() -> None:
    lines = [f"[rank{rank}]: {line}" for line in TRACEBACK for rank in (0, 1)]
    (one,) = explained(*lines).sightings
    assert (one.count, one.ranks) == (2, (0, 1))


def test_torchruns_table_is_indented() -> None:
    first, *others = raised("my.Boom: 3", '  File "a.py", line 1')
    (one,) = explained(f"  traceback : {first}", *(f"  {line}" for line in others)).sightings
    assert (one.first.excerpt, one.frame) == ("my.Boom: 3", "a.py, line 1")


def test_texts_that_only_show_that_a_process_died_say_so() -> None:
    died = [card for card in all_cards() if card.role is Role.FAILURE and card.code == "RUN003.died"]
    assert [card.name for card in died if card.shows_only != "process" and not card.is_fallback] == []


def test_a_warning_is_the_failure_only_where_nothing_else_is() -> None:
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


def test_a_host_may_have_several_processes() -> None:
    assert explained(f"n1: {PEER}", "n1: ValueError: x").sightings[0].card.role is Role.FAILURE
    closed = "n0:71:90 [0] NCCL WARN socketProgress: Connection closed by remote peer n1<41234>"
    assert not explained(closed, WARNING).is_explained


def test_an_exception_that_follows_a_cause_is_a_note() -> None:
    cause = "ModuleNotFoundError: No module named 'apex'"
    for found in (
        explained(*raised(cause), *HANDLING, *raised("app.Fatal: no")),
        explained(f"[rank0]: {cause}", "[rank0]: app.Error: no"),
    ):
        assert [one.card.role for one in found.sightings] == [Role.CAUSE, Role.NOTE]


def test_the_last_exception_of_a_chain_is_the_failure() -> None:
    lines = (*raised("KeyError: 'lr'"), *HANDLING, *raised("app.Fatal: no lr"))
    found = explained(*(f"[rank2]: {line}".rstrip() for line in lines))
    assert found.sightings[0].first.excerpt == "app.Fatal: no lr"
    assert found.sightings[1].card.role is Role.NOTE


def test_exceptions_that_python_ignores_are_no_failure() -> None:
    assert explained("Exception ignored in: <function X.__del__ at 0x7>", *raised("AssertionError: x")).sightings == ()
    assert [one.card.role for one in explained(*raised("KeyboardInterrupt")).sightings] == [Role.NOTE]


def test_the_page_shows_the_line_and_its_frame(golden) -> None:
    golden(render(log_blocks(explained(*(f"[rank3]: {line}" for line in TRACEBACK))), width=80, color=False))
    golden(render(log_blocks(explained(WARNING, SYSTEM)), width=80, color=False))
    golden(render(log_blocks(explained(WARNING)), width=80, color=False))


# What healthy jobs print, from the start of torchrun to the end of the script.
HEALTHY = """\
W1122 05:12:27.271 16 torch/distributed/run.py:876] Setting OMP_NUM_THREADS environment variable for each process \
to be 1
/venv/torch/distributed/launch.py:208: FutureWarning: The module torch.distributed.launch is deprecated
[W1122 05:12:27.271453898 socket.cpp:207] [c10d] The hostname of the client socket cannot be retrieved. err=-3
[W1122 05:12:27.271 socket.cpp:697] [c10d] The client socket has failed to connect to [n0]:29500 (errno: 111 - Refused).
[rank0]:[W1122 ProcessGroupNCCL.cpp:4561] [PG ID 0 PG GUID 0 Rank 0]  using GPU 0 to perform barrier as devices used \
by this process are currently unknown. This can potentially cause a hang if this rank to GPU mapping is incorrect.
n0:71:71 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.1<0>
n0:71:71 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.
n0:71:71 [0] NCCL INFO NET/Plugin : dlerror=libnccl-net.so: cannot open shared object file: No such file or directory
n0:71:71 [0] NCCL INFO cudaDriverVersion 12040
n0:71:71 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to eth0
n0:71:90 [0] NCCL INFO Failed to open libibverbs.so[.1]
n0:71:90 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0> [1]docker0:172.17.0.1<0> [2]veth0a:fe80::1%veth0a<0>
n0:71:90 [0] NCCL INFO NET/IB : No device found.
n0:71:90 [0] NCCL INFO Using network Socket
n0:71:90 [0] NCCL INFO P2P is disabled between GPU 0 and 1 by NCCL_P2P_DISABLE
n0:71:90 [0] NCCL INFO NCCL_P2P_LEVEL set by environment to LOC
n0:71:90 [0] NCCL INFO Channel 00/02 :    0   1
n0:71:90 [0] NCCL INFO Channel 00 : 0[1000] -> 1[2000] via SHM/direct/direct
n0:71:90 [0] NCCL INFO Connected all rings
n0:71:90 [0] NCCL INFO Connected all trees
n0:71:90 [0] NCCL INFO comm 0x55d0 rank 0 nranks 2 cudaDev 0 busId 1000 commId 0x1f - Init COMPLETE
n0:71:91 [0] NCCL INFO [Service thread] Connection closed by localRank 0
n0:71:71 [0] NCCL INFO comm 0x55d0 rank 0 nranks 2 cudaDev 0 busId 1000 - Abort COMPLETE
/venv/torch/nn/parallel/distributed.py:1100: UserWarning: find_unused_parameters=True was specified in DDP \
constructor, but did not find any unused parameters in the forward pass.
/venv/torch/optim/lr_scheduler.py:143: UserWarning: Detected call of `lr_scheduler.step()` before `optimizer.step()`.
Epoch 1:  42%|####      | 42/100 [00:10<00:14,  4.1it/s, loss=0.31]\rEpoch 1: 100%|##########| 100/100 [00:24<00:00]
step 100 loss 0.31 MeanAbsoluteError: 0.12
Error rate: 0.12, errors: 0, exceptions: 0
INFO:root:retrying after ConnectionError (attempt 1 of 5)
validation accuracy 0.91
[rank0]:[W1122 ProcessGroupNCCL.cpp:1250] Warning: WARNING: process group has NOT been destroyed before we destruct \
ProcessGroupNCCL. destroy_process_group() was not called before program exit
Exception ignored in: <function _MultiProcessingDataLoaderIter.__del__ at 0x7f>
Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py", line 1618, in __del__
    self._shutdown_workers()
AssertionError: can only test a child process
"""


def test_a_healthy_log_has_no_failure() -> None:
    for prefix in ("", "0: ", "[rank0]: ", "2024-05-01T10:00:00.123Z stderr F "):
        found = explained(*(prefix + line for line in HEALTHY.splitlines()))
        shown = [one.card.name for one in found.sightings if one.card.role not in (Role.HINT, Role.NOTE)]
        assert (shown, found.has_failure) == ([], False)
        assert "No failure found in this log." in render(log_blocks(found), width=200, color=False)


# The last exception is one that Python ignores.
@pytest.mark.parametrize("line", HEALTHY.splitlines()[:-1])
def test_no_line_of_a_healthy_log_is_a_failure(line: str) -> None:
    assert not explained(line).has_failure
