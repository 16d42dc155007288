"""Findings that quote a known text: the card's title, meaning and fix, and the same code and ranks as without it."""

import pytest
from seen import seen_of
from test_run_checks import judge_as, only, outcome, run_of

from ddpdiag.checks.blame import find_blame, is_echo
from ddpdiag.checks.gpu import devices
from ddpdiag.checks.known_errors import explained_text, known_error
from ddpdiag.checks.run import trials as run003
from ddpdiag.explain.card import Role, all_cards
from ddpdiag.model import Finding, Outcome, Severity, Status

BUILD = "/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp"
NO_INTERFACE = f"RuntimeError: [enforce fail at {BUILD}/device.cc:84] ifa != nullptr. Unable to find address for: ib0"
REFUSED = (
    f"RuntimeError: Gloo connectFullMesh failed with [{BUILD}/pair.cc:152] timed out connecting: SO_ERROR: "
    "Connection refused, remote=[10.0.0.1]:10149$2"
)
CLOSED = f"RuntimeError: [{BUILD}/pair.cc:553] Connection closed by peer [10.0.0.2]:56463"
NCCL = "DistBackendError: NCCL error in: NCCLUtils.cpp:77, unhandled system error\nncclSystemError: A call failed\n"

# What a rank raises, and the page to which the card of it leads.
CAUSES = {
    "interface-unknown-to-gloo": (NO_INTERFACE, "RDZ003.missing"),
    "interface-unknown-to-nccl": (f"{NCCL}Last error:\nBootstrap : no socket interface found", "RDZ003.missing"),
    "port-taken": (
        "DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: "
        "false, code: -98, name: EADDRINUSE, message: address already in use",
        "RDZ005.taken",
    ),
    "dev-shm-full": (f"{NCCL}NCCL WARN Error: failed to extend /dev/shm/nccl-03v824 to 4194660 bytes", "HST003.small"),
    "cuda-memory": ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "GPU008.in-use"),
    "open-files": ("OSError: [Errno 24] Too many open files", "HST004.open-files"),
    "pids-limit": ("RuntimeError: can't start new thread", "HST004.processes"),
    "device-ordinal": ("AcceleratorError: CUDA error: invalid device ordinal", "GPU002.count"),
    "driver-too-old": ("RuntimeError: The NVIDIA driver on your system is too old (found 11060)", "GPU002.cuda-start"),
    "no-nccl": ("RuntimeError: Distributed package doesn't have NCCL built in", "GPU002.cpu-build"),
    "nccl-versions": (
        f"{NCCL}NCCL WARN Mismatched NCCL version detected : rank 0 version 22907 rank 1 version 22605",
        "LCH003.nccl",
    ),
    "store-is-full": ("DistStoreError: No space left on device", "RDZ006.unwritable"),
    "disk-full": ("OSError: [Errno 28] No space left on device: '/tmp/ddpdiag-1/store'", "HST003.unusable"),
}


def is_by_card(finding: Finding, error: str, page: str) -> bool:
    """Has it title, meaning and fix of the card of this text, which leads to this page?"""
    known = known_error(error)
    pages = {card.code for card in all_cards() if card.name == finding.evidence["known_error"]}
    shown = (finding.title.endswith(known.title), known.meaning_tail in finding.message, finding.fix == known.fix)
    return all(shown) and known.name == finding.evidence["known_error"] and page in pages


@pytest.mark.parametrize("cause", CAUSES)
def test_a_rank_that_fails_for_a_known_cause_has_the_title_and_fix_of_its_card(cause) -> None:
    error, page = CAUSES[cause]
    others = [outcome(rank, Status.RAISED, error=CLOSED) for rank in (0, 2, 3)]
    finding = only(judge_as(run003.CHECK, run_of(*others, outcome(1, Status.RAISED, error=error))))
    assert (finding.code, finding.severity) == ("RUN003.raised", Severity.ERROR)
    assert (finding.ranks, finding.hosts) == ((1,), ("n0",))
    assert is_by_card(finding, error, page)
    assert {"last_step", "ranks", "text"} <= finding.evidence.keys(), "JSON keeps what people need not read"


@pytest.mark.parametrize(
    ("errors", "ranks", "page"),
    [
        pytest.param([CLOSED, NO_INTERFACE, CLOSED, CLOSED], (1,), "RDZ003.missing", id="one rank"),
        pytest.param([NO_INTERFACE] * 4, (), "RDZ003.missing", id="all ranks"),
        pytest.param([REFUSED] * 4, (), "RDZ004.refused", id="all ranks, of their peers"),
        pytest.param([CLOSED, NO_INTERFACE, "ValueError: mine", CLOSED], (1, 2), None, id="different causes"),
        pytest.param([CLOSED, "ValueError: mine"], (1,), None, id="an unknown cause"),
    ],
)
def test_the_message_names_the_blamed_ranks_the_check_and_the_text(golden, errors, ranks, page) -> None:
    outcomes = [outcome(rank, Status.RAISED, error=error) for rank, error in enumerate(errors)]
    finding = only(judge_as(run003.CHECK, run_of(*outcomes, size=len(errors))))
    assert (finding.code, finding.ranks) == ("RUN003.raised", ranks)
    if page is None:
        assert "known_error" not in finding.evidence
    else:
        assert is_by_card(finding, errors[1], page)
    golden(finding)


def test_a_cause_in_the_last_output_of_a_process_that_died_explains_it(golden) -> None:
    died = outcome(2, Status.DIED, error="killed by SIGABRT", detail="terminate called\nwhat(): can't start new thread")
    others = [outcome(rank, Status.RAISED, error=CLOSED) for rank in (0, 1, 3)]
    finding = only(judge_as(run003.CHECK, run_of(*others, died)))
    assert (finding.code, finding.ranks) == ("RUN003.died", (2,))
    assert is_by_card(finding, died.detail, "HST004.processes")
    assert finding.evidence["output"] == "what(): can't start new thread"
    golden(finding)


def test_of_a_traceback_only_the_exception_that_was_raised_counts() -> None:
    handled = "OSError: [Errno 28] No space left on device\n\nDuring handling of the above exception, another one:\n\n"
    name = "gaierror: [Errno -2] Name or service not known"
    mine = outcome(1, Status.RAISED, error="ValueError: mine", detail=f"{handled}ValueError: mine\n")
    unknown_name = outcome(1, Status.RAISED, error=name, detail=f"Traceback\n  x\nsocket.{name}\n")
    found = [only(judge_as(run003.CHECK, run_of(one, size=2))) for one in (mine, unknown_name)]
    assert ["known_error" in finding.evidence for finding in found] == [False, True]


@pytest.mark.parametrize("card", [card for card in all_cards() if card.role is Role.ECHO], ids=lambda card: card.name)
def test_every_known_echo_blames_no_rank(card) -> None:
    echo = outcome(0, Status.RAISED, error=card.example)
    assert is_echo(echo)
    assert find_blame([echo, outcome(1, Status.DIED, error="killed by SIGSEGV")]).ranks == (1,)


def test_ranks_that_only_cannot_connect_are_not_blamed() -> None:
    no_error = f"RuntimeError: Gloo connectFullMesh failed with [{BUILD}/pair.cc:144] no error"
    others = [outcome(rank, Status.RAISED, error=error) for rank, error in ((1, no_error), (2, REFUSED))]
    assert find_blame([outcome(0, Status.RAISED, error=NO_INTERFACE), *others]).ranks == (0,)
    assert find_blame([outcome(0, Status.DONE), *others]).ranks == ()


def waiting(rank: int, missing: int, step: int) -> Outcome:
    said = f"DistStoreError: wait timeout after 9000ms, keys: /default_pg/0//cpu//0/{missing}"
    return outcome(rank, Status.RAISED, error=said, step_count=step)


def test_a_rank_for_which_others_waited_is_blamed_if_it_is_behind_them() -> None:
    behind, with_them = (outcome(2, Status.HUNG, step_count=step, interrupted=True) for step in (2, 5))
    told = outcome(3, Status.HUNG, step_count=5, interrupted=True)
    others = [outcome(1, Status.RAISED, error=CLOSED, step_count=5), told]
    assert find_blame([waiting(0, 2, 5), others[0], behind, told]).ranks == (2,)
    assert find_blame([waiting(0, 2, 5), others[0], with_them, told]).ranks == ()


def test_ranks_that_a_text_counts_within_a_smaller_group_are_not_blamed() -> None:
    group = [
        waiting(4, 2, 5),
        outcome(5, Status.HUNG, step_count=5, interrupted=True),
        outcome(6, Status.HUNG, step_count=5, interrupted=True),
    ]
    assert find_blame(group).ranks == ()


def test_why_cuda_does_not_start_comes_from_the_card() -> None:
    row = devices.Data(torch="2.13", cuda="13.0", error="CUDA error: invalid device ordinal")
    (finding,) = devices.CHECK.judge(seen_of(devices.CHECK, {0: row}, gpus=1))
    assert finding.code == "GPU002.cuda-start"
    assert is_by_card(finding, row.error, "GPU002.count")


def test_a_text_of_another_program_is_shown_with_its_meaning() -> None:
    assert explained_text("ValueError: mine\nmore") == "ValueError: mine"
    assert explained_text(NO_INTERFACE).endswith('("RuntimeError: Unable to find address for: ib0")')


@pytest.mark.parametrize("card", [card for card in all_cards() if card.role is Role.CAUSE], ids=lambda card: card.name)
def test_every_title_is_a_clause_that_begins_the_meaning(card) -> None:
    if (known := known_error(card.example)) is None or known.name != card.name:
        pytest.skip("other lines of a log make it a cause")
    assert not known.title.endswith((".", ":", ","))
    assert known.title.count("(") == known.title.count(")")
    assert len(known.title) <= 160
    assert known.meaning_tail
