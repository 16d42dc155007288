"""Error texts of others: each is recognised, causes come before echoes, and no log is too long or too strange."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import ValidationError
from runs import faults

from ddpdiag.explain.card import PLACEHOLDER, Card, Role, all_cards, read_cards
from ddpdiag.explain.matcher import Explanation, explain_log, read_line
from ddpdiag.explain.render import log_blocks, render

RECORDINGS = Path(__file__).parent.parent / "recordings"
# What torch 2.15 and torchrun print of some faults, over either class of process groups for NCCL.
GROUPS = RECORDINGS / "process_groups"

relaxed = settings(deadline=None)

RAISED = b"[rank1]: ValueError: batch of 3 images\n"
PEER = b"[rank0]: RuntimeError: [x/pair.cc:553] Connection closed by peer [10.0.0.1]:8066. This is typically\n"
PORT = b"message: address already in use\n"

# Lines of jobs that went well, or that name no fault of the allocation.
INNOCENT = (
    "n0:7:9 [0] NCCL INFO NET/Plugin : dlerror=libnccl-net.so: cannot open shared object file: No such file or "
    "directory No plugin found (libnccl-net.so), using internal implementation",
    "libnccl-tuner.so: cannot open shared object file: No such file or directory",
    "n0:7:9 [0] NCCL INFO socketPollConnect: connect returned Connection refused, retrying (1/35) after sleep",
    "socketPollConnect: connect to 10.0.0.2<41234> returned Connection refused, retrying (3/35) after sleep",
    "E0101 tensorboard: Address already in use, trying 6007",
    "aiohttp.client_exceptions.ClientConnectorError: Cannot connect to host s3.example:443 [No route to host]",
    "wandb: Network error: Connect timeout [10.0 s], will retry",
    "slurmstepd: error: Detected 0 oom_kill events in StepId=4711.batch.",
    "MeanSquaredError: 0.01",
    "[rank0]: RelativeError: -1.25e-3",
    "3: [rank7]: MeanAbsoluteError: 12.5 ",
    "Mean of RelativeError",
    "ERROR: ld.so: object '/x/libx.so' from LD_PRELOAD cannot be preloaded (cannot open shared object file): ignored.",
    "ERROR: pip's dependency resolver does not currently take into account all the packages that are installed.",
    "epoch 3 mean ERROR 0.1234",
    "socket read: Resource temporarily unavailable, will try again",
)


def explained(*lines: bytes) -> Explanation:
    return explain_log([b"".join(lines)], "job.log")


def names(found: Explanation) -> list[str]:
    return [one.card.name for one in found.sightings]


@pytest.mark.parametrize("card", all_cards(), ids=lambda card: card.name)
def test_a_real_text_is_recognised(card: Card) -> None:
    assert names(explained(card.example.encode())) == [card.name]


@pytest.mark.parametrize("line", INNOCENT)
def test_an_innocent_log_has_no_cause(line: str) -> None:
    found = explained(line.encode() + b"\n")
    assert [one for one in found.sightings if one.card.role in (Role.CAUSE, Role.FAILURE)] == []


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("BlockingIOError: [Errno 11] Resource temporarily unavailable", "no-process"),
        ("bash: fork: retry: Resource temporarily unavailable", "no-process"),
        ("libgomp: Thread creation failed: Resource temporarily unavailable", "no-process"),
        ("OSError: [Errno 37] (unable to lock file, errno = 37, 'No locks available')", "hdf5-lock"),
        ("RuntimeError: Address already in use", "port-taken"),
        ("[rank0]: AssertionError", "exception-bare"),
        ("[rank0]: mine.BatchException: no. 7 is empty", "exception-other"),
        ("KeyError: 3", "exception"),
        ("ValueError: 0.5 is no batch size", "exception"),
        ("OSError: error while attempting to bind on ('0.0.0.0', 80): address already in use", "port-in-use"),
        ("Detected 10 oom_kill events in StepId=4711.0.", "slurm-oom"),
        ("socketStartConnect: Connect to 10.0.0.2<41234> failed : Software caused", "nccl-connect"),
        ("NCCL WARN socketStartConnect: Connect to 172.31.0.2<41093> failed : Software caused", "nccl-connect"),
        # An address of Docker's bridge needs the host's network.
        ("NCCL WARN socketStartConnect: Connect to 172.17.0.2<41093> failed : Software caused", "nccl-docker-bridge"),
        ("n0:7:9 [0] NCCL INFO NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'", "gdr-disabled"),
    ],
)
def test_the_same_words_of_another_program_mean_something_else(line: str, name: str) -> None:
    assert names(explained(line.encode())) == [name]


def test_there_are_many_and_each_has_a_name_of_its_own() -> None:
    every = all_cards()
    assert len({card.name for card in every}) == len(every) > 100
    assert all(card.meaning and card.confirm and card.fix and card.source for card in every)


CARD = """[boom]
role = "cause"
anchor = "boom"
code = "RUN001"
meaning = "It went off."
confirm = "Listen"
fix = "Take cover."
example = "boom!"
source = "observed"
"""


def test_a_card_is_added_without_touching_code() -> None:
    found = explain_log([b"3: big boom\n"], "x", read_cards(CARD))
    assert (names(found), found.sightings[0].tasks) == (["boom"], (3,))


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ('fix = "Take cover."', ""),
        ('fix = "Take cover."', 'todo = "Take cover."'),
        ('source = "observed"', "source = 3"),
        ('source = "observed"', 'source = "observed"\nin_tabel = true'),
        ('role = "cause"', 'role = "culprit"'),
    ],
    ids=["missing", "of another name", "of another type", "misspelled", "of no such role"],
)
def test_a_card_with_a_wrong_field_is_refused(line: str, instead: str) -> None:
    with pytest.raises(ValidationError):
        read_cards(CARD.replace(line, instead))


GROUPS_READ = {
    "rank",
    "other",
    "host",
    "missing",
    "work",
    "kind",
    "operation",
    "elements",
    "group",
    "world",
    "reporter",
}


def placeholders(card: Card) -> set[str]:
    return {name for text in (card.meaning, card.confirm, card.fix) for name in PLACEHOLDER.findall(text)}


@pytest.mark.parametrize("card", [card for card in all_cards() if card.pattern], ids=lambda card: card.name)
def test_the_groups_of_a_pattern_are_read_by_the_matcher_or_shown(card: Card) -> None:
    assert set(re.compile(card.pattern).groupindex) <= GROUPS_READ | placeholders(card)


@pytest.mark.parametrize("card", [card for card in all_cards() if placeholders(card)], ids=lambda card: card.name)
def test_every_placeholder_has_a_group_or_a_default(card: Card) -> None:
    assert placeholders(card) <= set(re.compile(card.pattern).groupindex) | set(card.defaults)
    assert set(card.defaults) <= placeholders(card)
    (one,) = explained(card.example.encode()).sightings
    assert placeholders(one.card) == set()


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("The server socket has failed to bind to [::]:29511 (errno: 98 - Address already in use)", '"sport = :29511"'),
        ("The server socket has failed. port: 29502, name: EADDRINUSE, address already in use", "29502"),
        ("RuntimeError: Address already in use", '"sport = :$MASTER_PORT"'),
        ("The client socket has timed out after 6ms while trying to connect to (n7, 29511).", "nc -vz n7 29511"),
        ("The client socket has timed out after 6ms", "nc -vz $MASTER_ADDR $MASTER_PORT"),
        ("The client socket has failed to connect to [n7]:29511 (errno: 113 - No path).", "failed: No path"),
        ("NVRM: Xid (PCI:0000:65:00): 171, pid=7, name=python, Timeout", "list for Xid 171"),
        ("NVRM: Xid (PCI:0000:65:00): 119, pid=7, name=python, Timeout", "PCI address 0000:65:00"),
        ("ImportError: libfoo.so.9: cannot open shared object file: No such file", "library libfoo.so.9 is"),
        ("ModuleNotFoundError: No module named 'a.b'", "module a.b is"),
        ("Timed out after 60 seconds waiting for clients. 3/4 clients joined.", "3 of 4"),
    ],
)
def test_what_the_line_names_is_shown(line: str, shown: str) -> None:
    (one,) = explained(line.encode()).sightings
    assert shown in f"{one.card.meaning} {one.card.confirm} {one.card.fix}"


def test_a_value_that_a_shell_obeys_is_not_shown() -> None:
    line = b"[c10d] The IPv6 network addresses of ($(reboot), 29500) cannot be retrieved (gai error: -2 - x)."
    (one,) = explained(line).sightings
    assert "reboot" not in one.card.confirm
    assert "$MASTER_ADDR" in one.card.confirm


def test_both_ranks_of_a_pair_are_named() -> None:
    pair = b"NCCL WARN Duplicate GPU detected : rank 5 and rank 1 both on CUDA device 1000"
    assert explained(pair).sightings[0].ranks == (1, 5)
    card = next(card for card in all_cards() if card.name == "collective-mismatch")
    assert explained(card.example.encode()).sightings[0].ranks == (0, 1)


def test_an_xid_that_follows_another_one_is_an_echo() -> None:
    line = b"NVRM: Xid (PCI:0018:01:00): %s\n"
    found = explained(line % b"45, pid=7, caused by previous Xid 149", line % b"149, pid=7, NETIR_LINK_EVT")
    assert [(one.card.name, one.card.role) for one in found.sightings] == [
        ("xid-nvlink", Role.CAUSE),
        ("xid-consequence", Role.ECHO),
    ]
    assert explained(line % b"45, pid=7, caused by previous Xid 149").sightings[0].card.role is Role.FAILURE
    assert len(explained(line % b"79, x", line % b"94, x").sightings) == 2


@pytest.mark.parametrize("log", sorted((RECORDINGS / "logs").glob("*.log")), ids=lambda log: log.stem)
def test_the_log_of_a_failed_job_names_the_fault(log: Path) -> None:
    expected = faults()[log.stem].expect  # what the check itself must find
    found = explain_log([log.read_bytes()], log.name)
    assert found.sightings[0].card.code in expected
    assert found.sightings[0].card.role not in (Role.ECHO, Role.NOTE)


def of_group(name: str) -> Explanation:
    return explain_log([(GROUPS / f"{name}.log").read_bytes()], "job.log")


@pytest.mark.parametrize(
    ("log", "first", "ranks"),
    [
        ("nccl2-stall", "nccl2-timeout", (0,)),
        ("nccl-stall", "watchdog", (0,)),
        ("nccl2-sizes", "nccl2-timeout", (0, 1)),
        ("nccl-sizes", "watchdog-mismatch", (0, 1)),
        ("nccl-order", "watchdog-mismatch", (0, 1)),
        ("nccl2-device", "tensor-on-other-gpu", (1,)),
        ("nccl2-remote", "nccl2-remote", (0, 1)),
    ],
)
def test_both_process_groups_of_nccl_are_understood(log: str, first: str, ranks: tuple[int, ...]) -> None:
    found = of_group(log)
    assert (found.sightings[0].card.name, found.sightings[0].ranks) == (first, ranks)
    assert found.is_explained == (first != "nccl2-remote")


@pytest.mark.parametrize("log", ["nccl2-stall", "nccl2-sizes"])
def test_a_rank_that_aborts_itself_after_a_time_out_has_not_crashed(log: str) -> None:
    aborts = [one for one in of_group(log).sightings if one.card.name == "worker-aborted"]
    assert [one.card.role for one in aborts] == [Role.ECHO]
    alone = b"  rank      : 0 (local_rank: 0)\n  exitcode  : -6 (pid: 1)  (SIGABRT)\n"
    assert explained(alone).sightings[0].card.role is Role.FAILURE


@pytest.mark.parametrize("log", ["nccl-sizes", "nccl-order"])
def test_a_mismatch_that_a_log_proves_is_shown_with_its_ranks(golden, log: str) -> None:
    golden(render(log_blocks(of_group(log)), width=100, color=False).partition("\n\nwait")[0])


def watchdog(rank: int, work: int, what: str, group: str = "0(default_pg)") -> bytes:
    return (
        f"[rank{rank}]:[E ProcessGroupNCCL.cpp:738] [PG GUID {group} Rank {rank}] Watchdog caught collective operation "
        f"timeout: WorkNCCL(SeqNum={work}, {what}, NumelOut=1, Timeout(ms)=8000) ran for 8000 milliseconds.\n"
    ).encode()


def test_the_rank_that_differs_from_most_is_named(golden) -> None:
    lines = [watchdog(rank, 7, f"OpType=ALLREDUCE, NumelIn={9 if rank == 2 else 8}") for rank in range(4)]
    found = explained(*lines)
    assert names(found) == ["watchdog-mismatch"]
    golden(render(log_blocks(found), width=100, color=False))


def test_calls_that_may_differ_are_no_mismatch() -> None:
    sums, sends = "OpType=ALLREDUCE, NumelIn=8", "OpType=SEND, NumelIn=8"
    alike = explained(watchdog(0, 7, sums), watchdog(1, 7, sums))
    behind = explained(watchdog(0, 7, sums), watchdog(1, 6, "OpType=BROADCAST, NumelIn=8"))
    of_groups = explained(watchdog(0, 7, sums), watchdog(1, 7, "OpType=BROADCAST, NumelIn=8", "3(mesh_dp)"))
    uneven = explained(*(watchdog(rank, 7, f"OpType=ALLGATHER, NumelIn={rank}") for rank in (0, 1)))
    two_sided = explained(watchdog(0, 7, sends), watchdog(1, 7, "OpType=RECV, NumelIn=8"))
    for found in (alike, behind, of_groups, uneven, two_sided):
        assert names(found) == ["watchdog"]


def test_who_lost_the_memory_of_a_rank_that_died_echoes_it() -> None:
    lost = b"[rank0]: torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n"
    killed = b"  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 17)  (SIGKILL)\n"
    assert [one.card.role for one in explained(lost).sightings] == [Role.FAILURE]
    found = explained(lost, killed)
    assert names(found) == ["worker-sigkill", "illegal-access"]
    assert found.sightings[1].card.role is Role.ECHO


def test_a_cause_outranks_echoes_that_were_printed_before() -> None:
    assert names(explained(PEER * 3, PORT)) == ["port-taken", "peer-closed"]


def test_repeats_are_one_sighting_with_all_who_printed_them() -> None:
    found = explained(*(b"[rank%d]: [x/pair.cc:553] Connection closed by peer [1]\n" % rank for rank in (5, 0, 5)))
    (one,) = found.sightings
    assert (one.count, one.first.line, one.last_line, one.ranks) == (3, 1, 3, (0, 5))


@pytest.mark.parametrize(
    ("line", "origin", "text"),
    [
        ("3: [rank7]: ValueError: x", (7, None, 3, None), "ValueError: x"),
        ("[default2]:ValueError: x", (None, 2, None, None), "ValueError: x"),
        ("[1,4]<stderr>:ValueError: x", (4, None, None, None), "ValueError: x"),
        ("(LLMRayActor pid=32499, ip=10.65.0.3) ValueError: x", (None, None, None, "10.65.0.3"), "ValueError: x"),
        ("n12: 2026-05-01 12:00:00,123 ValueError: x", (None, None, None, "n12"), "ValueError: x"),
        ("n0:71:90 [0] NCCL WARN x", (None, None, None, "n0"), "n0:71:90 [0] NCCL WARN x"),
        ("[E x.cpp:1] [PG ID 0 PG GUID 0(default_pg) Rank 3] x", (3, None, None, None), None),
        ("epoch3: CUDA out of memory", (None, None, None, None), None),
        ("gpu-1: CUDA out of memory", (None, None, None, None), None),
        ("gpu-01: CUDA out of memory", (None, None, None, "gpu-01"), "CUDA out of memory"),
        ("slurmstepd-n3: error: x", (None, None, None, "n3"), "error: x"),
        ("python3.11: can't open", (None, None, None, None), None),
        ("ValueError: x", (None, None, None, None), None),
    ],
)
def test_prefixes_tell_who_speaks(line: str, origin: tuple, text: str | None) -> None:
    read, rest = read_line(line)
    assert (tuple(read), rest) == (origin, text or line)


def test_the_rank_of_a_worker_that_was_killed_is_read_off_torchruns_table() -> None:
    found = explained(b"  host      : h1\n  rank      : 5 (local_rank: 1)\n  exitcode  : -9 (pid: 17)  (SIGKILL)\n")
    assert (found.sightings[0].ranks, found.sightings[0].hosts) == ((5,), ("h1",))


def test_who_was_waited_for_and_waited_too_is_not_missing() -> None:
    key = b"[rank1]: DistStoreError: wait timeout after 6000ms, keys: /default_pg/0//cpu//0/%d\n"
    assert explained(key % 3).sightings[0].missing_ranks == (3,)
    joined = b"DistStoreError: Timed out after 7 seconds waiting for clients. 3/4 clients joined.\n"
    found = explained(key % 0, joined)
    assert names(found) == ["clients-missing", "key-missing"]
    assert all(one.missing_ranks == () for one in found.sightings)


def test_the_rank_that_lags_behind_is_read_off_the_watchdogs_lines(golden) -> None:
    line = (
        "[rank{0}]:[E ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) Rank {0}] Exception (either an error "
        "or timeout) detected by watchdog at work: 808, last enqueued NCCL work: {1}, last completed NCCL work: 807.\n"
    )
    found = explained(*(line.format(rank, 810 if rank == 2 else 811).encode() for rank in range(4)))
    assert found.sightings[0].ranks_by_work == {810: (2,), 811: (0, 1, 3)}
    golden(render(log_blocks(found), width=80, color=False))


def test_the_watchdog_of_another_group_shows_that_the_global_rank_waited() -> None:
    line = b"Exception (either an error or timeout) detected by watchdog at work: 8, last enqueued NCCL work: 9\n"
    found = explained(b"[rank3]:[E321 02:07:08.465224069 ProcessGroupNCCL.cpp:1664] [PG 1 Rank 1] " + line)
    assert [(one.card.name, one.ranks) for one in found.sightings] == [("last-work-group", (3,))]


def test_colours_progress_bars_and_broken_utf8_hide_nothing() -> None:
    found = explained(b"\xff\xfe 10%|#   |\r 20%|##  |\r\x1b[31mTCPStore\x1b[0m: address already \x1b[1min use\xff\n")
    assert names(found) == ["port-taken"]
    assert "\x1b" not in render(log_blocks(found), width=80, color=False)


@relaxed
@given(st.lists(st.sampled_from([RAISED, PEER, PORT, b"step 1\n", b"\n"]), max_size=30), st.data())
def test_how_a_log_is_cut_into_pieces_does_not_matter(lines: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=5)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert explain_log(pieces, "x") == explain_log([whole] if whole else [], "x")


@relaxed
@given(
    st.sampled_from([card.anchor for card in all_cards()]),
    st.sampled_from(["a", " ", "1", ".", "[", "a.", "Rank ", "12, ", "x: ", ":1", "A1", "[rank1]:", "]", "-"]),
    st.booleans(),
)
def test_no_line_takes_long(anchor: str, filler: str, before: bool) -> None:
    """A hundred thousand characters of what might lead a regular expression astray."""
    noise = filler * (100_000 // len(filler))
    line = noise + anchor if before else anchor + noise
    explain_log([line.encode()], "x")


def test_a_number_of_parameters_that_did_not_arrive_is_no_fault_of_the_model() -> None:
    line = (
        b"RuntimeError: DDP expects same model across all ranks, but Rank 3 has 7 params, while rank 0 has %s params."
    )
    (missing,) = explained(line % b"inconsistent 0").sightings
    assert (missing.card.name, missing.card.role, missing.ranks) == ("model-parameters-missing", Role.FAILURE, (3,))
    assert names(explained(line % b"inconsistent 10")) == ["model-parameters"]


@pytest.mark.parametrize("source", ["job.log", ""])
def test_notes_of_a_healthy_job_are_no_failure(source: str) -> None:
    note = b"W torch/distributed/run.py:876] Setting OMP_NUM_THREADS environment variable for each process to be 1\n"
    found = explain_log([note], source)
    assert not found.is_explained
    last = render(log_blocks(found), width=80, color=False).splitlines()[-4:]
    assert any(line.startswith(f"No failure found in this {'log' if source else 'text'}.") for line in last)


@pytest.mark.parametrize(
    "lines", [[PEER, RAISED], [PEER], [b"hello\n"]], ids=["a-cause-and-an-echo", "an-echo-alone", "nothing-known"]
)
def test_the_page_begins_with_the_cause_and_ends_with_where_to_start(golden, lines: list[bytes]) -> None:
    page = render(log_blocks(explained(*lines)), width=80, color=False)
    assert max(map(len, page.splitlines())) <= 80
    golden(page)
