"""LCH003: versions that differ."""

import pytest
from seen import seen_of

from ddpdiag.checks.launch.versions import CHECK, Data
from ddpdiag.model import Severity


def found(*rows, **world):
    return list(CHECK.judge(seen_of(CHECK, dict(enumerate(rows)), **world)))


def versions(**changes):
    return Data(**({"python": "3.11.7", "torch": "2.13.0+cu130", "cuda": "13.0", "nccl": "2.29.7"} | changes))


def test_versions_that_agree_are_silent():
    assert found(versions(), versions(), versions()) == []


@pytest.mark.parametrize(
    ("rows", "word", "severity", "ranks"),
    [
        pytest.param(({}, {}, {"torch": "2.12.0", "nccl": "2.28.9"}), "torch", Severity.ERROR, (2,), id="torch"),
        pytest.param(({}, {}, {"nccl": "2.28.9"}), "nccl", Severity.ERROR, (2,), id="NCCL with the same torch"),
        pytest.param(
            ({"hip": "6.4", "cuda": None}, {"hip": "6.4", "cuda": None}, {"hip": "6.2", "cuda": None}),
            "hip", Severity.ERROR, (2,), id="HIP with the same torch",
        ),
        pytest.param(({"nccl": None}, {}, {}), "nccl", Severity.ERROR, (0,), id="no NCCL"),
        pytest.param(({}, {"python": "3.11.9"}, {}), "python", Severity.WARNING, (1,), id="Python by patch"),
        pytest.param(({}, {"python": "3.12.1"}, {}), "python", Severity.ERROR, (1,), id="Python by more"),
        pytest.param(({}, {"cuda": "12.8"}), "cuda", Severity.ERROR, (), id="two ranks, of which nobody is blamed"),
        pytest.param(
            ({"driver": "580.65.06"}, {"driver": "580.65.06"}, {"driver": "570.86.15"}, {}), "driver",
            Severity.WARNING, (2,), id="drivers, of which a missing one is not compared",
        ),
    ],
)  # fmt: skip
def test_who_has_another_version_is_named(golden, rows, word, severity, ranks):
    (finding,) = found(*(versions(**row) for row in rows), ranks_per_node=1)
    assert (finding.code, finding.severity, finding.ranks) == (f"LCH003.{word}", severity, ranks)
    golden(finding)


@pytest.mark.parametrize(
    ("seconds", "core_seconds", "is_slow"),
    [(42.0, None, True), (42.0, 2.0, True), (42.0, 21.0, True), (42.0, 40.0, False), (9.0, 1.0, False)],
    ids=["cores not known", "idle cores", "half", "busy cores", "fast"],
)
def test_an_import_that_waits_for_files_is_slow(golden, seconds, core_seconds, is_slow):
    slow = versions(import_seconds=seconds, import_core_seconds=core_seconds)
    findings = found(versions(import_seconds=1.5), slow, ranks_per_node=1)
    assert [(finding.code, finding.ranks) for finding in findings] == [("LCH003.slow-import", (1,))] * is_slow
    if is_slow:
        assert findings[0].severity is Severity.WARNING
        golden(*findings)


def test_the_ranks_that_share_an_import_are_counted():
    rows = {rank: versions(import_seconds=4.0, import_pid=7 + rank // 3) for rank in range(4)}
    assert CHECK.report(seen_of(CHECK, rows, ranks_per_node=4)).figures == {"seconds.import": 4.0, "import.ranks": 3}
    alone = {rank: versions(import_seconds=4.0, import_pid=7) for rank in range(2)}
    assert CHECK.report(seen_of(CHECK, alone, ranks_per_node=1)).figures == {"seconds.import": 4.0}
