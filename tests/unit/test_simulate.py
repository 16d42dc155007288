"""`ddpdiag simulate`: every kind of fault and its finding, by the command as it is typed."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec import convert, structs
from typer.testing import CliRunner

from ddpdiag.checks.registry import all_checks
from ddpdiag.cli.app import app
from ddpdiag.cli.edge import guarded
from ddpdiag.judgement import judge
from ddpdiag.model import Finding, Status
from ddpdiag.render.findings import SAME_SHOWN
from ddpdiag.simulate.fleet import SLOW_LOCAL_RANK, Fault, Faults, Fleet, Noise, simulate

QUIET = ("--transients", "0")


class Ran(NamedTuple):
    """What a command left behind."""

    exit_code: int
    text: str
    report: dict

    @property
    def codes(self) -> dict[str, set[str]]:
        """Each finding's hosts, by its code."""
        found: dict[str, set[str]] = {}
        for finding in self.report["findings"]:
            found.setdefault(finding["code"], set()).update(finding["hosts"])
        return found

    def finding(self, code: str) -> Finding:
        """The only one of that code."""
        (only,) = (finding for finding in self.report["findings"] if finding["code"] == code)
        return convert(only, Finding)


def ran(folder: Path, *words: str) -> Ran:
    path = folder / "report.json"
    done = CliRunner().invoke(app, [*words, "--json", str(path)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return Ran(done.exit_code, done.stdout, json.loads(path.read_text()))


def simulated(folder: Path, *words: str) -> Ran:
    return ran(folder, "simulate", *words)


def names(hosts: Sequence[int] | frozenset[int] | set[int]) -> set[str]:
    return {f"n{host:04d}" for host in hosts}


def fleet(hosts: int, *kinds: tuple[Fault, int], seed: int = 0) -> Fleet:
    """The one that the command makes: the same seed has the same bad hosts."""
    return Fleet(hosts, Faults(kinds), Noise(), seed=seed)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.deep) for seed in (1, 2))])
@pytest.mark.parametrize(
    ("fault", "ranks", "code", "exit_code"),
    [
        (Fault.SLOW_HOST, 8, "FAB001.host", 0),
        (Fault.SLOW_HOST, 1, "FAB001.host", 0),
        (Fault.SLOW_INSIDE, 8, "FAB001.alone", 0),
        (Fault.SLOW_INSIDE, 1, "FAB001.host", 0),
        (Fault.DEAD_HOST, 8, "FAB001.alone", 1),
        (Fault.DEAD_HOST, 1, "FAB001.host", 1),
        (Fault.HANG, 8, "FAB001.alone", 1),
        (Fault.HANG, 1, "FAB001.host", 1),
    ],
)
def test_bad_hosts_are_named_and_no_others(tmp_path, fault, ranks, code, exit_code, seed):
    words = ("--hosts", "64", "--ranks-per-host", str(ranks), "--fault", f"{fault.value}:3", "--seed", str(seed))
    done = simulated(tmp_path, *words)
    assert done.codes[code] == names(fleet(64, (fault, 3), seed=seed).failing)
    # Of the others it is told from which slowdown on they would have been found.
    assert {word for word in done.codes if word.startswith("FAB001")} == {code, "FAB001.clear"}
    assert done.exit_code == exit_code


def test_a_slow_way_is_named_and_no_host(tmp_path):
    for seed in range(3):
        done = simulated(tmp_path, "--hosts", "8", "--fault", "slow-link", *QUIET, "--seed", str(seed))
        (link,) = fleet(8, (Fault.SLOW_LINK, 1), seed=seed).slow_links
        one, other = sorted(names(link))
        assert done.finding("FAB001.path").links == (f"{one} -> {other}", f"{other} -> {one}")
        assert not any(done.codes.values())


def test_a_bad_leaf_is_named_with_its_hosts(golden, tmp_path):
    done = simulated(tmp_path, "--hosts", "128", "--fault", "leaf")
    failing = fleet(128, (Fault.LEAF, 1)).failing
    finding = done.finding("FAB001.congested")
    assert {*finding.evidence["hosts"]} == names(failing)
    assert "FAB001.host" not in done.codes
    golden(finding)


def test_a_fleet_without_faults_is_fit(golden, tmp_path):
    done = simulated(tmp_path, "--hosts", "64", *QUIET, "--fault", "none")
    assert done.codes == {"FAB001.clear": set()}
    assert done.exit_code == 0
    golden(done.finding("FAB001.clear"))


def test_of_two_hosts_none_is_said_to_be_good_beside_the_other(golden, tmp_path):
    done = simulated(tmp_path, "--hosts", "2", *QUIET, "--fault", "slow-host")
    golden(done.finding("FAB001.clear"))
    assert done.report["measurements"]["fabric.found_from_share"] == 1


def test_one_transient_makes_no_error_of_a_slow_host(tmp_path):
    done = simulated(tmp_path, "--hosts", "600", "--fault", "slow-host:60", "--transients", "0.1")
    blamed = [finding for finding in done.report["findings"] if finding["code"] == "FAB001.host"]
    assert any(min(finding["evidence"]["rates_bytes_per_s"]) < 45e9 for finding in blamed)
    assert {finding["severity"] for finding in blamed} == {"warning"}


def test_a_host_that_is_far_below_is_an_error(tmp_path):
    done = simulated(tmp_path, "--hosts", "64", "--fault", "slow-host", "--slower", "0.7", *QUIET)
    assert done.exit_code == 1


@pytest.mark.parametrize(("limit", "exit_code"), [("10%", 1), ("30%", 0)])
def test_a_host_slower_than_the_limit_is_an_error(tmp_path, limit, exit_code):
    slow, record = tmp_path / "slow", tmp_path / "run.jsonl"
    fault = ("--hosts", "64", "--fault", "slow-host", *QUIET)
    done = simulated(
        tmp_path, *fault, "--max-slowdown", limit, "--write-slow-hosts", str(slow), "--record", str(record)
    )
    (name,) = names(fleet(64, (Fault.SLOW_HOST, 1)).failing)
    assert (done.exit_code, done.report["hosts"]["failing"]) == (exit_code, [name] * exit_code)
    assert slow.read_text().split() == [name] * (1 - exit_code)
    assert ran(tmp_path, "judge", str(record)) == done
    assert ran(tmp_path, "judge", str(record), "--max-slowdown", "20%").exit_code == 1


def test_slow_pairs_across_one_uplink_are_one_finding(tmp_path):
    for seed in (1, 2, 3, 5):
        done = simulated(tmp_path, "--hosts", "64", "--fault", "uplink", "--seed", str(seed))
        assert done.codes == {"FAB001.congested": set(), "FAB001.clear": set()}


MIXED = ("--hosts", "200", "--fault", "slow-host:4", "--fault", "hang:2", "--congestion", "0.01")


def test_the_same_seed_is_the_same_report(tmp_path):
    def bytes_of(seed: int) -> tuple[bytes, str]:
        text = simulated(tmp_path, *MIXED, "--seed", str(seed)).text
        return (tmp_path / "report.json").read_bytes(), text

    assert bytes_of(5) == bytes_of(5)
    assert bytes_of(5) != bytes_of(6)


def test_judging_the_recording_gives_the_same_report(tmp_path):
    record = tmp_path / "run.jsonl"
    done = simulated(tmp_path, *MIXED, "--record", str(record))
    assert ran(tmp_path, "judge", str(record)) == done


def test_the_run_lasts_as_long_as_its_trials(tmp_path):
    done = simulated(tmp_path, "--hosts", "64", "--fault", "hang")
    assert done.report["seconds"] == sum(stage["seconds"] for stage in done.report["stages"])
    # Nothing ended it early, so no budget was less.
    assert 60 < done.report["seconds"] <= done.report["budget_seconds"]


@pytest.mark.parametrize(
    "words",
    [
        ("--fault", "slow"),
        ("--fault", "slow-host:0"),
        ("--max-slowdown", "10"),
        ("--hosts", "4", "--fault", "slow-host:3", "--fault", "hang:2"),
        ("--hosts", "40", "--fault", "leaf:3"),
        ("--hosts", "3", "--fault", "slow-link:4"),
        ("--record", "no/such/folder/run.jsonl"),
    ],
    ids=" ".join,
)
def test_bad_input_is_one_sentence(golden, capfd, words):
    assert guarded(lambda: app(["simulate", *words])) == 2
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    golden(said.err)


@pytest.mark.parametrize("words", [("--hosts", "1"), ("--hosts", "200000"), ("--slower", "1"), ("--seed", "x")])
def test_numbers_out_of_range_are_refused(words):
    done = CliRunner().invoke(app, ["simulate", *words])
    assert done.exit_code == 2
    assert words[0] in done.output


@pytest.mark.parametrize(
    "words",
    [
        ("--fault", "slow-host:20", "--fault", "slow-inside:20", "--fault", "leaf:3"),
        *(
            pytest.param(words.split(), marks=pytest.mark.deep)
            for words in (
                "--fault slow-host:40",
                "--fault hang:40",
                "--fault leaf:10",
                "--fault hang:30 --fault slow-host:30",
                "--fault hang:30 --fault slow-host:30 --ranks-per-host 1",
                "--congestion 0.01 --transients 0.05",
            )
        ),
    ],
    ids=" ".join,
)
def test_a_report_of_two_thousand_hosts_is_a_page(tmp_path, words):
    lines = simulated(tmp_path, "--hosts", "2048", *words).text.splitlines()
    assert len(lines) < 120
    # A line to paste is not folded.
    assert max(len(line) for line in lines if not line.startswith(("    srun ", "    grep ", "    awk "))) <= 80


def test_many_findings_of_several_codes_are_one_of_each(golden, tmp_path):
    words = ("--hosts", "300", *QUIET, "--fault", "slow-host:9")
    text = simulated(tmp_path, *words).text
    # And how many there are more.
    assert text.count("\nwarning FAB001.host: ") == SAME_SHOWN + 1
    text = simulated(tmp_path, *words, "--fault", "slow-inside:9", "--fault", "hang:9").text
    # The first three kinds with how many there are more, the others in short, and what is good to know.
    golden("\n".join(re.findall(r"^\w+ FAB\S+: .*(?:\n {8}.*)*", text, re.MULTILINE)))


def test_a_run_that_was_cut_short_blames_nobody():
    whole = simulate(Fleet(64, Faults(((Fault.SLOW_HOST, 2),), 0.5), seed=1))
    last = whole.trials[-2]
    kept = tuple(outcome for outcome in whole.outcomes if outcome.trial <= last.number)
    cut = tuple(
        structs.replace(outcome, status=Status.SKIPPED, interrupted=True) if outcome.trial == last.number else outcome
        for outcome in kept
    )
    for outcomes in (cut, kept[:-5]):
        trials = tuple(trial for trial in whole.trials if trial.number <= last.number)
        report = judge(structs.replace(whole, trials=trials, outcomes=outcomes), all_checks())
        assert [finding.code for finding in report.findings] == ["FAB001.unmeasured"]
        assert report.hosts.failing == ()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_of_a_host_that_is_slow_inside_the_rank_is_named(tmp_path, seed):
    words = ("--hosts", "32", "--fault", "slow-inside:2", *QUIET, "--seed", str(seed))
    done = simulated(tmp_path, *words)
    failing = fleet(32, (Fault.SLOW_INSIDE, 2), seed=seed).failing
    told = [finding for finding in done.report["findings"] if finding["code"] == "FAB002.rank"]
    assert sorted(finding["ranks"] for finding in told) == [[8 * host + SLOW_LOCAL_RANK] for host in sorted(failing)]
    assert {node for finding in told for node in finding["hosts"]} == names(failing)


def test_of_a_host_whose_every_pair_fails_no_rank_is_named(tmp_path):
    done = simulated(tmp_path, "--hosts", "32", "--fault", "hang", *QUIET)
    (told,) = (finding for finding in done.report["findings"] if finding["code"].startswith("FAB002"))
    assert (told["code"], told["severity"], told["ranks"]) == ("FAB002.systemic", "note", [])


def test_where_no_host_is_bad_by_itself_no_rank_is_tried(golden, tmp_path):
    done = simulated(tmp_path, "--hosts", "32", "--fault", "slow-host", *QUIET)
    (line,) = (check for check in done.report["checks"] if check["code"] == "FAB002")
    golden(line["skipped_because"])
