"""LCH003: versions that differ."""

from seen import seen_of

from ddpdiag.checks.lch003 import CHECK, Data
from ddpdiag.model import Options, Severity


def found(*rows, **world):
    return list(CHECK.judge(seen_of(CHECK, dict(enumerate(rows)), **world)))


def versions(**changes):
    return Data(**({"python": "3.11.7", "torch": "2.13.0+cu130", "cuda": "13.0", "nccl": "2.29.7"} | changes))


def test_versions_that_agree_are_silent():
    assert found(versions(), versions(), versions()) == []


def test_the_odd_torch_is_an_error_that_names_its_host():
    (finding,) = found(versions(), versions(), versions(torch="2.12.0+cu130", nccl="2.28.9"))
    assert finding.code == "LCH003.torch"
    assert finding.severity is Severity.ERROR
    assert (finding.ranks, finding.nodes) == ((2,), ("n1",))
    assert "2.12.0+cu130 on rank 2" in finding.message


def test_the_same_torch_with_another_nccl_is_an_error_of_nccl():
    (finding,) = found(versions(), versions(), versions(nccl="2.28.9"))
    assert finding.code == "LCH003.nccl"
    assert finding.ranks == (2,)


def test_a_rank_without_nccl_is_odd():
    (finding,) = found(versions(nccl=None), versions(), versions())
    assert "none on rank 0" in finding.message


def test_pythons_that_differ_by_patch_are_a_warning_and_by_more_an_error():
    (patch,) = found(versions(), versions(python="3.11.9"), versions())
    (minor,) = found(versions(), versions(python="3.12.1"), versions())
    assert (patch.severity, minor.severity) == (Severity.WARNING, Severity.ERROR)


def test_two_ranks_that_differ_blame_nobody():
    (finding,) = found(versions(), versions(cuda="12.8"))
    assert finding.ranks == ()


def test_drivers_that_differ_are_a_warning_and_a_missing_one_is_not_compared():
    (finding,) = found(versions(driver="580.1"), versions(driver="580.1"), versions(driver="570.2"), versions())
    assert finding.code == "LCH003.driver"
    assert finding.severity is Severity.WARNING
    assert finding.ranks == (2,)


def test_a_slow_import_is_a_warning_with_its_seconds():
    (finding,) = found(versions(import_seconds=1.5), versions(import_seconds=42.0))
    assert finding.code == "LCH003.slow-import"
    assert finding.ranks == (1,)
    assert "42.0 s" in finding.message


def test_a_slow_import_on_busy_cores_is_no_matter_of_the_disk():
    (finding,) = found(versions(import_seconds=42.0, import_core_seconds=40.0))
    assert "40.0 s of it on a core or waiting for one" in finding.message
    assert "cores" in finding.remedy
    (finding,) = found(versions(import_seconds=42.0, import_core_seconds=2.0))
    assert "local disk" in finding.remedy


def test_what_is_slow_can_be_set():
    options = Options(settings={"LCH003.slow_import_seconds": "60"})
    assert found(versions(import_seconds=42.0), options=options) == []
