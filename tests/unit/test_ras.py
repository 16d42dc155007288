"""NCCL's RAS: the answers of its versions, what two of them say of a job, and answers that are none."""

import time
from pathlib import Path

import pytest
from ras_stand_in import Server, answers, communicator, rank, status

from ddpdiag.evidence.ras import MemberState, Snapshot, parse_answer, read_snapshot
from ddpdiag.evidence.ras_faults import find_faults

RECORDED = Path(__file__).parents[1] / "data" / "nccl_ras"
HANDSHAKE = b"SERVER PROTOCOL 2\nOK\nERROR: Unknown command SET FORMAT json\n"


def snapshot(status_bytes: bytes) -> Snapshot:
    parsed = parse_answer(HANDSHAKE + status_bytes)
    assert parsed is not None
    return parsed


# By file: the ranks in another state than RUNNING, what ranks launched (in texts: with the rest that is not listed).
PARSED = {
    "ahead-2.26.2.txt": ({}, {640: [*range(12), *range(14, 32)], 641: [12, 13]}, "AllGather"),
    "behind-2.27.3.txt": ({}, {0: [5], 12: [*range(5), *range(6, 32)]}, "AllGather"),
    "mismatch-2.24.3.txt": ({}, {6649: [0, 2, 3, 4, 5, 7], 6650: [1, 6, *range(8, 32)]}, "collective"),
    "stopped-2.27.3.txt": ({MemberState.UNREACHABLE: [21]}, {}, ""),
    "dead-2.27.3.txt": ({MemberState.DEAD: [21]}, {}, ""),
    "missing-2.24.3.txt": ({MemberState.UNREACHABLE: [21]}, {}, ""),
    "leaving-2.27.3.txt": ({}, {}, ""),
    "normal-2.26.2.txt": ({}, {}, ""),
    "missing-2.29.1.json": ({MemberState.UNREACHABLE: [1]}, {0: [0]}, "AllReduce"),
    "missing-2.28.9.json": ({MemberState.UNREACHABLE: [1]}, {0: [0]}, "AllReduce"),
}


@pytest.mark.parametrize(("file", "states", "launched", "collective"), [(name, *row) for name, row in PARSED.items()])
def test_each_version_is_read(file, states, launched, collective):
    members = [member for each in snapshot((RECORDED / file).read_bytes()).communicators for member in each.members]
    found: dict = {}
    counts: dict = {}
    for member in sorted(members, key=lambda member: member.rank):
        if member.state is not MemberState.RUNNING:
            found.setdefault(member.state, []).append(member.rank)
        if collective in member.launched:
            counts.setdefault(member.launched[collective], []).append(member.rank)
    assert (found, counts) == (states, launched)


def test_a_text_names_processes_and_their_number():
    parsed = snapshot((RECORDED / "behind-2.27.3.txt").read_bytes())
    assert parsed.process_count == 32
    (found,) = parsed.communicators
    by_rank = {member.rank: member for member in found.members}
    assert (by_rank[5].host, by_rank[5].pid, by_rank[5].gpu) == ("172.16.64.210", 483077, 7)
    assert by_rank[5].launched == {"AllGather": 0, "AllReduce": 6648}
    assert by_rank[6].launched == {"AllGather": 12, "AllReduce": 6650}


def world(*counts: int, **more) -> dict:
    """A communicator of all ranks, which have launched so many all-reduces."""
    return communicator(*(rank(number, AllReduce=count, **more) for number, count in enumerate(counts)))


def pair(behind: int, ahead: int) -> dict:
    """A communicator of two ranks of the world, the second of which waits for the first."""
    places = ({"pid": 100 + number, "gpu": number} for number in (behind, ahead))
    return communicator(*(rank(n, **place, AllReduce=n) for n, place in enumerate(places)), hash=FIRST)


FIRST, SECOND = "0x1", "0x2"
DEAD, SILENT, LEFT = {"considered_dead": True}, {"unresponsive": True}, {"unresponsive": False}
# Communicators of a job with four ranks, at two moments (one: nothing changed); then the findings and their ranks.
JOBS = {
    "behind": ([[world(9, 9, 8, 9)]], {"behind": (2,)}),
    "the lowest of three counts": ([[world(9, 7, 8, 9)]], {"behind": (1,)}),
    "two behind": ([[world(8, 9, 8, 9)]], {"behind": (0, 2)}),
    "counts move": ([[world(9, 9, 8, 9)], [world(9, 9, 9, 9)]], {}),
    "counts of another communicator move": (
        [
            [world(9, 8), communicator(rank(0), hash=SECOND)],
            [world(9, 8), communicator(rank(0, Reduce=1), hash=SECOND)],
        ],
        {},
    ),
    "equal counts": ([[world(9, 9, 9, 9)]], {}),
    "dead": ([[communicator(rank(0), rank(1, **DEAD), rank(2), rank(3))]], {"dead": (1,)}),
    "unreachable": ([[communicator(rank(0), rank(1, **SILENT), rank(2), rank(3))]], {"unreachable": (1,)}),
    "dead, after it was unreachable": (
        [[communicator(rank(0), rank(1, **SILENT))], [communicator(rank(0), rank(1, **DEAD))]],
        {"dead": (1,)},
    ),
    "unreachable once": ([[communicator(rank(0), rank(1))], [communicator(rank(0), rank(1, **SILENT))]], {}),
    "a dead and an unreachable rank": (
        [[communicator(rank(0), rank(1, **SILENT), rank(2, **DEAD), rank(3, AllReduce=1))]],
        {"dead": (2,), "unreachable": (1,)},
    ),
    "dead, but the others make progress": (
        [[communicator(rank(0, AllReduce=n), rank(1, **DEAD))] for n in range(2)],
        {},
    ),
    "left": ([[communicator(rank(0), rank(1), rank(2), rank(3, **LEFT))]], {"missing": (3,)}),
    "closed": ([[communicator(rank(0), rank(1, finalize_called=True, destroy_flag=True))]], {"missing": (1,)}),
    "aborted": ([[communicator(rank(0), rank(1, abort_flag=True, destroy_flag=True))]], {"missing": (1,)}),
    "all close": ([[communicator(rank(0, destroy_flag=True), rank(1, **LEFT))]], {}),
    "initialising": ([[communicator(rank(0), rank(1, init_state=7))]], {"init": (1,)}),
    "an error, and its echo": ([[communicator(rank(0, async_error=6), rank(1, async_error=2))]], {"error": (1,)}),
    "only echoes of an error": ([[communicator(rank(0, async_error=6), rank(1, async_error=6))]], {}),
    "other collective": (
        [[communicator(rank(0, AllReduce=9), rank(1, AllReduce=9), rank(2, AllReduce=8, Broadcast=1))]],
        {"mismatch": (2,)},
    ),
    "one of each": ([[communicator(rank(0, AllReduce=1), rank(1, Reduce=1))]], {"mismatch": ()}),
    "behind because of another communicator": ([[world(5, 5, 4, 4), pair(2, 3)]], {"behind": (2,)}),
    "in a circle": ([[world(5, 5, 5, 4), pair(2, 3)]], {"frozen": ()}),
    "ranks that no communicator of the whole job names": (
        [[communicator(rank(0, AllReduce=1), rank(1), hash=FIRST), communicator(rank(0, pid=7), hash=SECOND)]],
        {"behind": ()},
    ),
}


@pytest.mark.parametrize(("moments", "expected"), JOBS.values(), ids=JOBS)
def test_each_fault_names_its_ranks(moments, expected):
    before, now = (snapshot(status(*moment)) for moment in (moments[0], moments[-1]))
    faults = find_faults(before, now, 2.0, world_size=None)
    assert {fault.code.removeprefix("ras."): fault.ranks for fault in faults} == expected


def test_a_rank_that_waits_for_its_gpu_is_not_named_and_equal_counts_in_a_collective_are_a_hang():
    behind, equal = snapshot(status(world(9, 9, 8, 9))), snapshot(status(world(9, 9, 9, 9)))
    (fault,) = find_faults(behind, behind, 2.0, world_size=4, waiting=[2])
    assert (fault.code, fault.ranks) == ("ras.frozen", ())
    (fault,) = find_faults(equal, equal, 2.0, world_size=4, in_collective=True)
    assert (fault.code, fault.ranks) == ("ras.frozen", ())
    # RAS does not take back that it considers a process dead.
    dead = snapshot(status(communicator(rank(0), rank(1, **DEAD))))
    assert find_faults(dead, dead, 2.0, world_size=2, waiting=[1]) == []


def test_texts_of_old_versions_name_the_ranks_that_are_behind_and_not_those_that_they_list():
    ahead = snapshot((RECORDED / "ahead-2.26.2.txt").read_bytes())
    (fault,) = find_faults(ahead, ahead, 2.0, world_size=32)
    assert (fault.code, fault.ranks) == ("ras.behind", (*range(12), *range(14, 32)))
    mixed = snapshot((RECORDED / "behind-2.27.3.txt").read_bytes())
    (fault,) = find_faults(mixed, mixed, 2.0, world_size=32)
    assert fault.ranks == (5,)
    normal = snapshot((RECORDED / "normal-2.26.2.txt").read_bytes())
    assert find_faults(normal, normal, 2.0, world_size=256, in_collective=True) == []


def test_the_words_of_a_finding(golden):
    lines = []
    for name, (moments, _) in JOBS.items():
        before, now = (snapshot(status(*moment)) for moment in (moments[0], moments[-1]))
        faults = find_faults(before, now, 2.0, world_size=None)
        lines += [f"{name}: {fault.title}. {fault.message}" for fault in faults]
    golden("\n".join(lines) + "\n")


def ask(port: int, pids=(101,), world_size: int | None = 4, seconds: float = 5.0) -> Snapshot | str:
    return read_snapshot(f"localhost:{port}", pids, world_size, time.monotonic() + seconds)


@pytest.mark.parametrize("version", ["2.28.9", "2.30.7"])
def test_the_client_reads_a_job(version):
    with Server(answers(status(world(1, 1, 1, 1), version=version))) as server:
        found = ask(server.port)
    assert isinstance(found, Snapshot)
    assert found.is_complete


def test_the_client_reads_texts():
    with Server(answers((RECORDED / "ahead-2.26.2.txt").read_bytes())) as server:
        assert isinstance(ask(server.port, world_size=32), Snapshot)
        assert "another job" in ask(server.port, world_size=4)


def test_the_answer_of_another_job_is_refused_and_the_next_process_asked():
    jobs = [status(world(1, 1, pid=7)), status(world(1, 1, pid=7)), status(world(1, 1))]
    with Server(lambda question: answers(jobs.pop(0) if len(jobs) > 1 else jobs[0])(question)) as server:
        assert isinstance(ask(server.port), Snapshot)
    with Server(answers(status(world(1, 1, pid=7)))) as server:
        assert "another job" in ask(server.port)


@pytest.mark.parametrize(
    "address", ["", "localhost", ":28028", "localhost:99999", "[::1]", f"{'a' * 200}..b:1", "no\0host:1"]
)
def test_an_address_that_is_none_is_named(address):
    assert isinstance(read_snapshot(address, (), None, time.monotonic() + 2), str)


def test_where_nothing_listens_the_reason_is_told():
    with Server(answers(b"")) as server:
        port = server.port
    assert "Connection refused" in ask(port)


ENDLESS = [b"1" * (1 << 16)] * 64
WHOLE = status(world(1, 1, 1, 1))


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([HANDSHAKE, b"{", *ENDLESS * 5], id="too large"),
        pytest.param([*ENDLESS], id="no handshake"),
        pytest.param([HANDSHAKE, WHOLE[: len(WHOLE) // 2]], id="cut"),
        pytest.param([HANDSHAKE, b"NCCL version 2.27.3 compiled with CUDA 12\n\nCommunicators..."], id="cut text"),
        pytest.param([HANDSHAKE, b"\0" * 1000], id="NUL bytes"),
        pytest.param([HANDSHAKE, WHOLE.replace(b"AllReduce", b"All\\u001b[31m")], id="control characters"),
        pytest.param([HANDSHAKE, WHOLE.replace(b'"size": 4', b'"size": 4000000000')], id="an impossible size"),
        pytest.param([HANDSHAKE, b"[" * 100_000], id="deep"),
        pytest.param([HANDSHAKE, b'{"communicators": ' + b"[" * 100_000], id="deep inside"),
        pytest.param([], id="nothing"),
    ],
)
def test_an_answer_that_is_none_is_refused_in_time(pieces):
    with Server(lambda _question: pieces) as server:
        begin = time.monotonic()
        assert "none of NCCL's" in ask(server.port)
        assert time.monotonic() - begin < 5


def test_a_process_that_does_not_respond_is_left_in_time():
    with Server(lambda _question: iter(lambda: time.sleep(0.05) or b"OK\n", None)) as server:
        begin = time.monotonic()
        assert "did not respond in time" in ask(server.port, seconds=0.5)
        assert time.monotonic() - begin < 2


def test_a_text_that_implies_too_many_ranks_is_refused():
    text = (RECORDED / "ahead-2.26.2.txt").read_text()
    counts = text[text.index("#0-0") :]
    many = text.replace("      32   RUNNING", "  999999   RUNNING").replace("        32    ", "    999999    ")
    assert parse_answer(HANDSHAKE + text.encode() + counts.encode() * 3) is not None
    assert parse_answer(HANDSHAKE + many.encode() + counts.encode() * 3) is None


@pytest.mark.parametrize("line", ["  Rank " + "1" * 100_000, "  1 ranks have " + "x " * 100_000, "#" * 100_000])
def test_long_lines_take_no_time(line):
    text = (RECORDED / "ahead-2.26.2.txt").read_text().replace("\nWarnings\n", f"\n{line}\n\nWarnings\n")
    begin = time.monotonic()
    assert parse_answer(HANDSHAKE + text.encode()) is not None
    assert time.monotonic() - begin < 1
