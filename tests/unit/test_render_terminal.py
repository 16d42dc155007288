"""The report for people."""

import re

import pytest
from msgspec import structs
from reports import check, finding_of, fit, plain, rank_row, stage, unfit, unknown

from ddpdiag.model import Finding, HostLists, Report, Severity, WorldSummary
from ddpdiag.render.terminal import render, render_quiet


def large(size: int, findings: tuple[Finding, ...] = ()) -> Report:
    nodes = tuple(f"node{number:04d}" for number in range(size // 8))
    ranks = tuple(
        rank_row(r, ranks_per_node=8, host=nodes[r // 8], slow=3.0 if r == 777 else 1 + r % 7 / 100)
        for r in range(size)
    )
    world = WorldSummary(size=size, hosts=nodes, launcher="slurm", backend="nccl")
    return unfit(world=world, ranks=ranks, findings=findings)


@pytest.mark.parametrize(
    ("report", "details"),
    [
        (fit(), False),
        (unfit(), False),
        (unfit(), True),
        (unknown(), False),
        (large(16384, findings=tuple(finding_of(ranks=(r,)) for r in range(0, 16384, 8))), False),
    ],
    ids=["fit", "unfit", "unfit-details", "unknown", "large"],
)
def test_a_whole_report(golden, report, details):
    golden(plain(report, details=details))


@pytest.mark.parametrize("report", [fit(), unfit(), unknown()])
def test_plain_text_is_ascii_without_escape_codes_and_fits_80_columns(report):
    text = plain(report, details=True)
    assert text.isascii()
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_colour_adds_escape_codes_and_nothing_else():
    text = render(unfit(), color=True, width=80)
    assert "\x1b[1;31mUNFIT" in text
    assert [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()] == plain(unfit()).splitlines()


def test_a_stage_that_ran_but_was_not_done_is_not_ok():
    report = fit(stages=(stage("host", "raised"),), checks=(check("HST001", "memory", "host", done=3, raised=1),))
    assert "??    host    0.40 s  HST001: 3 done, 1 raised" in plain(report)


def test_a_stage_that_was_not_done_to_the_end_says_how_far_it_came():
    undone = structs.replace(check("HST002", "threads", "host"), statuses={})
    report = fit(stages=(stage("host", "part"),), checks=(check("HST001", "memory", "host"), undone))
    assert "??    host    0.40 s  part; 1 check, 1 not run\n" in plain(report)


def test_a_host_name_of_60_characters_is_shown_whole():
    name = "h" * 29 + "-" + "x" * 30
    report = unfit(
        world=WorldSummary(size=1, hosts=(name,), launcher="torchrun", backend="gloo"),
        ranks=(rank_row(0, host=name),),
        findings=(finding_of(hosts=(name,)),),
    )
    for text in (plain(report), plain(report, width=40)):
        head, rest = re.split("rank +state +host", text)
        assert name in head
        assert f"host {name}" in " ".join(head.split())
        table = "".join(rest.split("skip")[0].split())
        assert sum(table.count(letter) for letter in "hx") >= 59


@pytest.mark.parametrize(
    "text", ["[red]", "[/]", "[link=http://x]y[/link]", ":smile:", "\\[bold]", "[@click=app.quit]"]
)
def test_markup_is_shown_and_never_obeyed(text):
    finding = finding_of(title=text, message=text, hosts=(text,), gpus=(text,), links=(text,), evidence={text: text})
    report = unfit(
        sentence=text,
        ranks=(rank_row(0, host=text, gpu_uuid=text, **{text: text}),),
        findings=(structs.replace(finding, fix=text),),
        recording_problems=(text,),
        checks=(check("HST001", text, "host", text),),
    )
    assert plain(report).count(text) >= 10
    assert "\x1b[31m" not in render(report, color=True, width=80)
    assert "\x1b]8" not in render(report, color=True, width=80)


def test_a_strangers_escape_codes_do_not_reach_the_terminal():
    report = fit(
        sentence="\x1b[2Jgone\x9b31m", findings=(finding_of(message="a\x07b\rc\u202ed", hosts=("\x1b]0;x\x07",)),)
    )
    for text in (plain(report), render(report, color=True, width=80)):
        assert "\x1b[2J" not in text
        assert "\\x1b[2Jgone\\x9b31m" in text
        assert "a\\x07b\\rc\\u202ed" in text
        assert "\\x1b]0;x\\x07" in text


def test_of_many_reasons_those_of_most_checks_are_told():
    reasons = ("a", "b", "b", "b", "c", "d", "d", "d", "e")
    checks = tuple(check(f"X{n}", "x", "host", because) for n, because in enumerate(reasons))
    text = plain(fit(checks=checks))
    assert "not checked: 3 checks (b), 3 checks (d), X0 (a), 2 more; all with --details\n" in text


def test_a_world_of_nobody():
    world = WorldSummary(size=4, hosts=(), launcher="", backend="")
    text = plain(unknown(world=world, ranks=(), stages=(), checks=(), findings=(), recording_problems=()))
    assert text.startswith(
        "ddpdiag: UNKNOWN: 4 ranks, no host known\nrun 3f9c2a, took 34.2 s (limit 120 s)\n\nUNKNOWN: "
    )


def test_the_verdict_comes_first_and_then_when_which_run_and_by_what():
    lines = plain(unfit(created="2026-11-22T06:31:59+01:00", version="0.1.0")).splitlines()
    assert lines[:2] == [
        "ddpdiag: UNFIT: 4 ranks on 2 hosts (n[0-1]), torchrun, gloo",
        "2026-11-22 05:31 UTC, run 3f9c2a, ddpdiag 0.1.0, took 7.91 s (limit 120 s)",
    ]
    assert plain(unfit(created="some day")).splitlines()[1].startswith("some day, run ")


def without_bad(*bad: str, hosts: int = 8, scheduler: str = "slurm") -> list[str]:
    """What stands between the notes and the verdict, where these hosts are bad."""
    nodes = tuple(f"n{host}" for host in range(hosts))
    world = WorldSummary(size=hosts, hosts=nodes, launcher="torchrun", backend="gloo", scheduler=scheduler)
    text = plain(fit(world=world, hosts=HostLists(failing=bad)))
    return [line for line in text.splitlines() if "failing host" in line or "srun" in line]


def test_bad_hosts_are_folded_into_a_line_to_paste():
    assert without_bad("n7", "n3") == ["Without the failing hosts (n[3,7]):", "    srun --exclude='n[3,7]' ..."]
    assert without_bad("n3") == ["Without the failing host (n3):", "    srun --exclude=n3 ..."]


def test_without_bad_hosts_or_others_there_is_no_line_to_paste():
    assert without_bad() == []
    assert without_bad("n0", hosts=1, scheduler="") == []
    assert without_bad("n0", hosts=1) != []


def test_a_list_that_nobody_would_paste_is_a_file():
    many = [f"rack{host}-node{host}" for host in range(0, 1000, 3)]
    assert without_bad(*many) == [
        "Without the 334 failing hosts: run again with --write-failing-hosts failing,",
        "    srun --exclude=./failing ...",
    ]


def test_within_a_job_of_slurm_the_line_asks_for_the_nodes_that_are_left() -> None:
    step = {"slurm.tasks": 8, "slurm.hosts": 4}
    bad = HostLists(failing=("n1",), healthy=("n0", "n2", "n3"))
    world = structs.replace(fit().world, scheduler="slurm")
    text = render(unfit(world=world, hosts=bad, measurements=step), color=False, width=80)
    assert "    srun --nodes=3 --ntasks=6 --exclude=n1 ...\n" in text
    uneven = render(unfit(world=world, hosts=bad, measurements=step | {"slurm.tasks": 7}), color=False, width=80)
    assert "    srun --exclude=n1 ...\n" in uneven


def test_a_quiet_report_of_a_healthy_run_is_its_verdict():
    text = render_quiet(structs.replace(fit(), findings=(finding_of(Severity.NOTE),)), color=False, width=200)
    assert text == f"FIT: {fit().sentence}\n"


def test_a_quiet_report_has_errors_and_warnings_with_their_fixes_and_nothing_else(golden):
    text = render_quiet(unfit(), color=False, width=80)
    golden(text)
    words = " ".join(text.split())
    assert words.startswith(f"UNFIT: {unfit().sentence} error COL001.slow")
    assert words.index("Fix: Compare") < words.index("warning HST002.many") < words.index("Fix: Set the number")
    assert [other for other in ("TRN001.step", "launch", "took", "not checked", "rank  host") if other in text] == []


def test_the_line_of_a_stage_shows_the_failed_trial_before_the_warning():
    # Rank 1 fails in LCH003, of which RUN002 tells; LCH002 has a warning.
    report = fit(
        stages=(stage("launch", "raised"),),
        checks=(check("LCH002", "variables", "launch"), check("LCH003", "versions", "launch", done=1, raised=1)),
        findings=(finding_of(code="RUN002.raised"), finding_of(Severity.WARNING, code="LCH002.variable")),
    )
    assert "LCH003: 1 done, 1 raised; 1 warning: LCH002.variable" in plain(report, width=120)
