"""What is read at 2 a.m.: the first screen of ten recorded failures says who, how bad, against what, and the way out.

The recordings are of real runs (tests/tools/record_failures.py).
"""

from pathlib import Path

import pytest

from ddpdiag.checks.registry import all_checks
from ddpdiag.codec import read_recording
from ddpdiag.judgement import judge
from ddpdiag.render.terminal import SCREEN_LINES, render

FAILURES = Path(__file__).parents[1] / "recordings" / "failures"
# The culprit, the number, what was expected, the remedy.
SAID = {
    "host_is_slow": ("host n1", "2.38 MB/s", "1.35 GB/s is what most of the other hosts reach", "Run `ethtool"),
    "host_missing": ("blamed: ranks 2-3", "4 of 6 ranks joined", "expected = 6", "read their output"),
    "large_packets_vanish": ("host n2", "2 of 6 tested TCP connections", "has a smaller MTU", "`ping -M do -s"),
    "link_between_two_is_slow": ("n0 -> n1", "11.9 MB/s", "30 MB/s is the least that a job should", "on both hosts"),
    "loss_is_not_a_number": ("rank 1; host n1", "step 3 of 56", "NaN or infinite", "--exclude=n1"),
    "ports_refused_by_one_host": (
        "host n1",
        "2 of 6 tested TCP connections",
        "The other hosts reach each other",
        "open TCP ports 32768",
    ),
    "rank_segfaults": ("rank 2; host n1", "SIGSEGV", "Ranks 0-1,3 waited for it", "dmesg -T"),
    "rank_sleeps": (
        "rank 3; host n1",
        "all_reduce #1",
        "that of the other ranks is 'connect all ranks: wait'",
        "Find what rank 3",
    ),
    "rank_stopped": ("rank 1; host n1", "(pid 110) is stopped", "Ranks 0,2 wait for it", "kill -CONT 110"),
    "values_corrupt": ("rank 1; host n1", "up to 2 elements per rank differ", "from the exact sum", "--exclude=n1"),
}


@pytest.mark.parametrize("path", sorted(FAILURES.parent.rglob("*.jsonl")), ids=lambda path: path.stem)
def test_80_columns_are_enough_and_the_ranks_have_one_table(path):
    lines = render(judge(read_recording([path]), all_checks()), color=False, width=80).splitlines()
    long = [line for line in lines if len(line) > 80]
    assert [line for line in long if " " in line.strip() and not line.startswith("    ")] == []
    assert sum(line.split()[:2] == ["rank", "host"] for line in lines) <= 1


def test_every_recording_is_read():
    assert {path.stem for path in FAILURES.glob("*.jsonl")} == set(SAID)


@pytest.mark.parametrize("name", SAID)
def test_the_first_screen(name):
    report = judge(read_recording([FAILURES / f"{name}.jsonl"]), all_checks())
    text = " ".join(" ".join(render(report, color=False, width=80).splitlines()[:SCREEN_LINES]).split())
    assert [words for words in SAID[name] if words not in text] == []
