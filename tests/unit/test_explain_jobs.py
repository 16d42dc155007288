"""Logs of one job: the first failure in time, its rank and host, and short queries that find a card."""

import json
import tomllib
from pathlib import Path

import pytest

from ddpdiag.codec import indented_json
from ddpdiag.explain.command import run
from ddpdiag.explain.lines import Origin
from ddpdiag.explain.log_files import Log, doubt_about_job, in_order, origins_of_paths, time_near
from ddpdiag.explain.matcher import Explanation, explain_job
from ddpdiag.explain.query import find_cards
from ddpdiag.explain.render import log_blocks, render
from ddpdiag.judgement.reading import read_report

HANGS = tomllib.loads((Path(__file__).parent.parent / "data" / "hanging_jobs.toml").read_text("utf-8"))
RECORDINGS = Path(__file__).parent.parent / "recordings"
PEER = "RuntimeError: [x/pair.cc:553] Connection closed by peer [10.0.0.1]:8066. This is typically\n"
LAST = (
    "[rank{rank}]:[E1117 12:34:57.789 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Exception "
    "(either an error or timeout) detected by watchdog at work: 808, last enqueued NCCL work: {work}, last completed\n"
)


def raised(text: str, time: str = "2026-11-17 12:00:00") -> str:
    return f'{time},123 INFO step 3\nTraceback (most recent call last):\n  File "train.py", line 5, in f\n{text}\n'


def job(**logs: str) -> Explanation:
    """The explanation of logs with these names (`rank3` is rank3.log)."""
    origins = origins_of_paths([f"{name}.log" for name in logs])
    return explain_job(
        Log(path, [text.encode()], origins[path]) for path, text in zip(origins, logs.values(), strict=True)
    )


def page(explanation: Explanation) -> str:
    return render(log_blocks(explanation), width=80, color=False, details=True)


@pytest.mark.parametrize(
    ("paths", "origins"),
    [
        (["rank3.log", "x/rank_12.out", "run-rank.0.txt"], [Origin(rank=3), Origin(rank=12), Origin(rank=0)]),
        (["log.1", "stderr_7.txt", "3/stderr"], [Origin(rank=1), Origin(rank=7), Origin(rank=3)]),
        (["4711/stdout.log", "4712/stdout.log"], [Origin(), Origin()]),  # numbers of jobs
        (["train.log.3", "franking7.log", "epoch3.log", "gpu1.log"], [Origin()] * 4),
        (["none_x/attempt_0/3/stderr.log", "local_rank_2.log"], [Origin(local_rank=3), Origin(local_rank=2)]),
        (["none_x/attempt_0/3/error.json"], [Origin(local_rank=3)]),
        (["slurm-12-n17.out", "slurm-12-n18.out"], [Origin(host="n17"), Origin(host="n18")]),
        (["n1/rank0.log", "gpu-node-2/rank1.log"], [Origin(rank=0, host="n1"), Origin(rank=1, host="gpu-node-2")]),
        # Slurm names the log of a whole job after its first host.
        (["slurm-12-n17.out"], [Origin()]),
    ],
)
def test_ranks_and_hosts_are_read_from_paths(paths, origins) -> None:
    assert list(origins_of_paths(paths).values()) == origins


def test_numbers_in_names_are_in_order() -> None:
    assert in_order(["rank10.log", "rank2.log", "a/1.log"]) == ["a/1.log", "rank2.log", "rank10.log"]


@pytest.mark.parametrize(
    ("paths", "doubt"),
    [
        (["rank0.log", "rank1.log"], ""),
        (["train.out", "train.err", "train2.out"], ""),
        (["train.log", "dmesg.txt"], "their names have no common form"),
        (["stall.log", "order.log", "order2.log"], "their names have no common form"),
        (["launch.out", "rank0.log"], ""),
        (["slurm-101.out", "slurm-102.out"], "their names have 2 job numbers of Slurm"),
    ],
)
def test_logs_of_several_jobs_are_doubted(paths, doubt: str) -> None:
    assert doubt_about_job(paths) == doubt


def test_times_of_all_formats_are_comparable() -> None:
    lines = [b"2026-11-17T12:34:56.5 x", b"[rank0]:[E1117 12:34:56.500 a.cpp]", b"Nov 17 12:34:56.5 n0 kernel:", b"x"]
    times = [time_near(line, 0, len(line)) for line in lines]
    assert times == [times[0]] * 3 + [None]
    assert time_near(b"\n".join(reversed(lines)), 0, 1) == times[0]  # of the next line with a time


def test_the_first_failure_in_time_leads_and_names_its_rank_and_host(golden) -> None:
    times = ("12:00:09", "12:00:03", "12:00:05")
    late = {
        f"n{rank}_rank{rank}": raised("ValueError: bad batch", f"2026-11-17 {time}") for rank, time in enumerate(times)
    }
    found = job(**late, n3_rank3=PEER, n4_rank4=PEER * 2, n5_rank5="step 3\n")
    assert found.sightings[0].first.origin == Origin(rank=1, host="n1")
    golden(page(found))


def test_without_times_the_lowest_rank_leads() -> None:
    found = job(rank10="ValueError: a\n", rank2="ValueError: b\n")
    assert found.sightings[0].first.log == "rank10.log"  # in the order given
    assert found.sightings[0].ranks == (2, 10)


def test_echoes_of_the_failed_rank_itself_are_no_reports_of_other_ranks() -> None:
    rank_6 = "[rank6]:[E624 x ProcessGroupNCCL.cpp:684] "
    lines = (
        "n1:47:69 [0] NCCL INFO misc/socket.cc:829 -> 3",
        f"{rank_6}[Rank 6] To avoid data inconsistency, we are taking the entire process down.",
        f"{rank_6}[PG ID 1 Rank 6] Process group watchdog thread terminated with exception: CUDA error",
    )
    text = page(job(train="\n".join(lines)))
    assert "follow from it" in text
    assert "report the loss" not in text


def test_a_failure_of_one_rank_comes_before_the_waits_of_others() -> None:
    found = job(rank0=LAST.format(rank=0, work=811), rank1=raised("ValueError: x", "2026-11-17 13:00:00"))
    assert [one.card.name for one in found.sightings] == ["exception", "last-work"]


EXIT = "  rank      : 1 (local_rank: 1)\n  exitcode  : -6 (pid: 17)\n"


@pytest.mark.parametrize("time", ["2026-11-17 12:00:00", ""])
def test_an_exit_in_the_launchers_log_comes_after_the_exception_of_that_rank(time: str) -> None:
    found = job(launch=f"  time      : 2026-11-17_12:00:01\n{EXIT}", rank1=raised("ValueError: x", time))
    assert [(one.card.name, one.ranks) for one in found.sightings] == [("exception", (1,)), ("worker-aborted", (1,))]


@pytest.mark.parametrize(
    "works", [(811, 811, 810, 811), (811, 810), (810, 810, 811)], ids=["one-behind", "one-of-two", "most-behind"]
)
def test_the_lead_sentence_names_the_rank_whose_number_is_lower(works, golden) -> None:
    found = job(**{f"rank{rank}": LAST.format(rank=rank, work=work) for rank, work in enumerate(works)})
    golden(page(found).partition("\nStart with")[2])


def test_the_rank_that_reported_the_time_out_is_named_in_the_log_of_another_one() -> None:
    line = (
        "Received a dump signal due to a collective timeout from  rank 13 and we will. Last enqueued NCCL work: 1261,"
    )
    found = job(rank0=f"[rank0]:[E804 23:05:54.8 a.cpp:1914] [PG ID 0 PG GUID 0(default_pg) Rank 0] {line}\n")
    assert found.sightings[0].ranks == (0,)
    assert "\nStart with rank 13: it reported the time-out first." in page(found)


@pytest.mark.parametrize("name", HANGS)
def test_the_page_of_a_hang_names_the_rank_to_start_with_if_the_log_shows_it(name: str, golden) -> None:
    golden(page(job(job=HANGS[name])))


def lines_of(name: str, *ranks: int) -> str:
    prefixes = tuple(f"[rank{rank}]" for rank in ranks)
    return "".join(line for line in HANGS[name].splitlines(keepends=True) if line.startswith(prefixes))


@pytest.mark.parametrize(
    ("log", "silent", "places", "sentence"),
    [
        # Without torchrun's table, rank 3 shows that there is a rank 2.
        (lines_of("silent-rank", 0, 1, 3), (2,), 1, "Start with rank 2: every other rank reports that it waited"),
        (lines_of("silent-rank", 0, 3), (), 1, "no line shows for which rank it waited"),
        (lines_of("another-path", 0, 1, 2), (), 2, "Start with rank 0: most ranks waited at another line"),
        (lines_of("another-path", 0, 1), (), 2, "The ranks waited at different lines, and no line shows which took"),
        (lines_of("another-path", 1, 2), (), 1, "no line shows for which rank it waited"),
    ],
)
def test_a_rank_is_named_only_if_most_ranks_differ_from_it(log: str, silent, places: int, sentence: str) -> None:
    found = job(job=log)
    assert (found.silent_ranks, len({*found.waiting_places.values()})) == (silent, places)
    assert sentence in page(found).replace("\n", " ")


def test_logs_of_ranks_show_who_is_silent() -> None:
    logs = {f"rank{rank}": lines_of("silent-rank", rank) or "step 3\n" for rank in range(4)}
    assert job(**logs).silent_ranks == (2,)
    del logs["rank2"]
    assert job(**logs).silent_ranks == ()  # its log was not given


def test_a_failure_before_ctrl_c_leads() -> None:
    found = job(job=raised("ValueError: bad batch") + HANGS["ctrl-c"])
    assert [one.card.name for one in found.sightings][:2] == ["exception", "ended-by-sigint"]
    waited = job(job=lines_of("silent-rank", 0) + HANGS["ctrl-c"])
    assert waited.sightings[0].card.name == "gloo-operation-timeout"


def test_an_internal_check_of_torch_is_not_blamed_on_the_script() -> None:
    text = (
        'RuntimeError: x INTERNAL ASSERT FAILED at "/pytorch/a.cpp":12, please report a bug to PyTorch. x is empty.\n'
    )
    first = job(job=raised(text)).sightings[0]
    assert (first.card.name, "ddpdiag ticket pytorch" in first.card.fix) == ("internal-assert", True)


WATCHDOG = "[E a.cpp:1] {group}Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={work}, "


@pytest.mark.parametrize(
    ("groups", "works", "behind"),
    [
        (("[PG GUID 0(default_pg) ",) * 3, (88213, 88213, 88212), (2,)),
        (("[PG GUID 0(default_pg) ", "[PG GUID 0(default_pg) ", "[PG GUID 1(tp) "), (7, 7, 3), ()),
        (("[",) * 3, (88213, 88213, 88212), (2,)),
        (("[",) * 3, (88213, 88213, 136), ()),  # perhaps numbers of two groups
    ],
)
def test_numbers_of_different_groups_are_not_compared(groups, works, behind) -> None:
    lines = (
        WATCHDOG.format(group=group, rank=n, work=work)
        for n, (group, work) in enumerate(zip(groups, works, strict=True))
    )
    assert job(job="\n".join(lines)).sightings[0].ranks_behind == behind


def test_torchruns_folder_is_one_job(tmp_path: Path, monkeypatch, capsys, golden) -> None:
    attempt = tmp_path / "logs" / "none_x" / "attempt_0"
    for rank, second in ((0, 9), (1, 3)):
        (attempt / str(rank)).mkdir(parents=True)
        (attempt / str(rank) / "stderr.log").write_text(
            f"[rank{rank + 8}]:[W1117 11:00:00.1 a.cpp:1] hello\n" + PEER * rank
        )
        details = {"py_callstack": raised("ValueError: bad").partition("\n")[2], "timestamp": f"170000000{second}"}
        error = json.dumps({"message": {"message": "ValueError: bad", "extraInfo": details}})
        (attempt / str(rank) / "error.json").write_text(error)
    monkeypatch.chdir(tmp_path)
    assert run(["logs"]) == 0
    golden(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("Xid 79", "xid-off-bus"),
        ("exitcode: -11", "worker-signal"),
        ("exitcode -9", "worker-sigkill"),
        ("SIGKILL", "worker-sigkill"),
        ("exit code 137", "pod-exit-137"),
        ("NCCL timeout", "watchdog"),
        ("connection refused", "gloo-refused"),
        ("OOM", "cuda-memory"),
        ("CUDA oom", "cuda-memory"),
        ("duplicate-gpu", "duplicate-gpu"),
        ("permission denied", "file-store-denied"),
        ("KV cache", "engine-cache-length"),
        ("vLLM engine dead", "engine-failed"),
    ],
)
def test_a_short_query_finds_its_card(query: str, name: str) -> None:
    cards, is_found = find_cards(query)
    assert (cards[0].name, is_found) == (name, True)


@pytest.mark.parametrize(("query", "code"), [("Xid 79", 0), ("Xid 4711", 3), ("my cat is ill", 3), ("nonsense", 3)])
def test_an_unknown_query_offers_the_nearest_cards(query: str, code: int, capsys, golden) -> None:
    assert run([query]) == code
    golden(capsys.readouterr().out)


@pytest.mark.parametrize("name", ["hang-4-ranks.jsonl", "report.json"])
def test_a_run_of_ddpdiag_is_shown_with_its_verdict_and_first_finding(name: str, tmp_path, monkeypatch, capsys) -> None:
    report = read_report(str(RECORDINGS / "hang-4-ranks.jsonl"))
    (tmp_path / "report.json").write_text(indented_json(report))
    (tmp_path / "hang-4-ranks.jsonl").write_bytes((RECORDINGS / "hang-4-ranks.jsonl").read_bytes())
    monkeypatch.chdir(tmp_path)
    assert run([name]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"ddpdiag: {name}: UNFIT: 4 ranks on 2 hosts cannot train")
    assert "error: RUN003.hung: rank 3 on h1 hung" in out


def test_an_unreadable_run_is_named_and_the_logs_beside_it_are_read(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "old.json").write_text('{"schema": "ddpdiag.report/0"}')
    (tmp_path / "rank0.log").write_text("ValueError: x\n")
    monkeypatch.chdir(tmp_path)
    assert run(["."]) == 0
    out, err = capsys.readouterr()
    assert "old.json is neither a recording (--record) nor a report (--json) of ddpdiag" in err
    assert "failure: exception" in out


def test_what_check_and_watch_print_is_found_in_a_log() -> None:
    report = "ddpdiag: UNFIT: 4 ranks on 2 hosts (h[0-1]), torchrun, gloo\n{}\n"
    sentence = "UNFIT: 4 ranks on 2 hosts cannot train: rank 3 on h1 hung in COL001 (gloo)."
    first = job(job=report.format(sentence)).sightings[0]
    assert (first.card.name, first.ranks, first.hosts) == ("ddpdiag-unfit-reason", (3,), ("h1",))
    watched = job(job="ddpdiag watch: n0 12:33:01, nothing new for 60 s: rank 1 is stopped\n")
    assert watched.sightings[0].card.name == "ddpdiag-watch"


OOM = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of {total} GiB of which 1.19 GiB is "
    "free. {others}Including non-PyTorch memory, this process has {own} GiB memory in use. Of the allocated memory "
    "10.1 GiB is allocated by PyTorch, and {unused} is reserved by PyTorch but unallocated."
)
OTHER = "Process 4711 has {} GiB memory in use. "


@pytest.mark.parametrize(
    ("total", "own", "others", "unused", "name"),
    [
        ("79.15", "77.95", "", "512.00 MiB", "cuda-memory-own"),
        ("139.80", "137.20", OTHER.format("1.12"), "1.00 GiB", "cuda-memory-own"),
        ("15.89", "14.70", "", "512.00 MiB", "cuda-memory-own"),
        ("79.15", "37.95", OTHER.format("40.01"), "512.00 MiB", "cuda-memory-others"),
        ("79.15", "37.95", OTHER.format("40.01"), "12.00 GiB", "cuda-memory-others"),
        ("79.15", "77.95", "", "22.45 GiB", "cuda-memory-fragmented"),
        ("23.69", "11.00", "", "512.00 MiB", "cuda-memory"),
    ],
)
def test_the_memory_in_the_text_decides_on_the_advice(total, own, others, unused, name) -> None:
    text = OOM.format(total=total, own=own, others=others, unused=unused)
    assert job(job=text).sightings[0].card.name == name


IN_COMM = "in comm 0x5fa31c27a9e0d1b4"


@pytest.mark.parametrize(
    ("line", "name", "ranks"),
    [
        ("=== RAS Diagnostics ===", "nccl-diag", ()),
        ("[OK]   GPU inventory: 8x NVIDIA H100 per node consistent across 16 ranks", "nccl-diag", ()),
        ("[INFO] net bw: required external tool missing", "nccl-diag", ()),
        ("[INFO] Xid 63 detected 3 s ago on host n7. No user action or further investigation", "nccl-diag", ()),
        ("[INFO] Xid 79 detected 3 s ago on host n7.x.org. For the recommended response, see", "nccl-diag-xid", ()),
        ("[INFO] ECC: uncorrected volatile errors on rank(s) {3} (worst=2) across 16 ranks", "nccl-diag-ecc", (3,)),
        ("[INFO] NVLink: inactive link(s) on rank(s) {3,4} across 16 ranks", "nccl-diag-nvlink", ()),
        ("[INFO] GPU inventory: model mismatch across 16 ranks @, rank(s) {9} differ", "nccl-diag-versions", (9,)),
        ("[INFO] NCCL environment: mismatch across 16 ranks @ for NCCL_ALGO", "nccl-diag-environment", ()),
        ("[INFO] NCCL environment: NCCL_ALGO=Ring on rank(s) {0,1}", "nccl-diag", ()),
        ("[INFO] p2p: setup failed on rank 3 result=1", "nccl-diag-p2p", ()),
        ("[INFO] p2p: temporarily enabled context-wide CUDA peer access rank=3 cudaDev=3", "nccl-diag", ()),
        ("[INFO] p2p: read mismatch srcRank=2 srcCudaDev=2 dstRank=5 dstCudaDev=5 path=NVL", "nccl-diag-data", (2, 5)),
        ("[INFO] net bw: same-nic rank 9 (n2): 1.4 Gbit/s, >30% off median 3.6 Gbit/s", "nccl-diag-slow-network", (9,)),
    ],
)
def test_the_lines_of_nccls_diagnostics_are_known(line: str, name: str, ranks: tuple[int, ...]) -> None:
    found = job(job=f"n0:4242 NCCL DIAG {line.replace('@', IN_COMM)}\n")
    assert [(one.card.name, one.ranks) for one in found.sightings] == [(name, ranks)]
