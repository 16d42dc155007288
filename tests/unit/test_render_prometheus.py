"""Metrics that Prometheus reads back as they were meant."""

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from reports import THREADS, finding_of, fit, rank_row, unfit, unknown

from ddpdiag.model import Report
from ddpdiag.render.prometheus import render

HOSTILE = 'n"0\\\n\x1b[31m\x00\udcff|{}'


def read(report: Report) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Each family's samples. Anything that is no text in UTF-8, or is there twice, fails."""
    text = render(report).decode()
    assert text.endswith("\n")
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.type == "gauge"
        assert re.fullmatch(r"ddpdiag_[a-zA-Z0-9_]*", family.name)
        assert family.name not in found
        assert all(sample.timestamp is None for sample in family.samples)  # the collector refuses them
        keys = [tuple(sorted(sample.labels.items())) for sample in family.samples]
        assert len(set(keys)) == len(keys)
        found[family.name] = [(sample.labels, sample.value) for sample in family.samples]
    return found


def test_a_run_says_when_how_long_and_how_it_ended() -> None:
    found = read(fit(created="2026-03-01T12:00:00+00:00"))
    assert found["ddpdiag_run_timestamp_seconds"] == [({}, 1772366400.0)]
    assert found["ddpdiag_run_seconds"] == [({}, 7.912)]
    assert found["ddpdiag_run_exit_code"] == [({}, 0)]
    assert found["ddpdiag_verdict"] == [({"verdict": "fit"}, 1), ({"verdict": "unfit"}, 0), ({"verdict": "unknown"}, 0)]
    assert found["ddpdiag_run_info"][0][0]["run_id"] == "3f9c2a"
    assert ({"stage": "collective"}, 3.18) in found["ddpdiag_stage_seconds"]


def test_a_degraded_job_is_fit_and_a_metric_of_its_own() -> None:
    for degraded in (False, True):
        found = read(fit(degraded=degraded))
        assert found["ddpdiag_degraded"] == [({}, float(degraded))]
        assert ({"verdict": "fit"}, 1.0) in found["ddpdiag_verdict"]


def test_ranks_are_told_by_host_and_gpu() -> None:
    found = read(fit(ranks=(rank_row(3, gpu_uuid="GPU-1234", pcie_share=0.5),)))
    who = {"rank": "3", "local_rank": "1", "host": "n1", "gpu_uuid": "GPU-1234"}
    assert found["ddpdiag_rank_busbw_bytes_per_second"] == [(who, 1.079e9)]
    assert found["ddpdiag_rank_forward_seconds"] == [(who, 0.0113)]
    assert found["ddpdiag_rank_pcie_ratio"] == [(who, 0.5)]


def test_measurements_have_base_units_and_the_backend_as_a_label() -> None:
    measured = {
        "all_reduce.gloo.busbw_bytes_per_s": 1e9,
        "all_reduce.nccl.busbw_bytes_per_s": 4e11,
        "seconds.import": 2.5,
        "step.overlap_share": 0.8,
        "coordinator.n0": "10.0.0.1",
        "broken": None,
        "sound": True,
    }
    found = read(fit(measurements=measured))
    name = "ddpdiag_all_reduce_busbw_bytes_per_second"
    assert found[name] == [({"backend": "gloo"}, 1e9), ({"backend": "nccl"}, 4e11)]
    assert found["ddpdiag_import_seconds"] == [({}, 2.5)]
    assert found["ddpdiag_step_overlap_ratio"] == [({}, 0.8)]
    assert found["ddpdiag_sound"] == [({}, 1)]
    assert not any("coordinator" in name or "broken" in name for name in found)


def test_findings_count_by_code_severity_and_host() -> None:
    found = read(unfit())["ddpdiag_findings"]
    assert ({"code": "COL001.slow", "severity": "error", "host": "n1"}, 1) in found
    assert ({"code": THREADS.code, "severity": "warning", "host": "n0"}, 1) in found
    assert ({"code": "TRN001.step", "severity": "note", "host": ""}, 1) in found


def test_checks_tell_their_outcomes_and_what_was_skipped() -> None:
    found = read(unknown())
    check = {"check": "RDZ001", "name": "env", "stage": "rendezvous"}
    assert (check | {"status": "hung"}, 2) in found["ddpdiag_check_outcomes"]
    assert ({"check": "TRN001", "name": "ddp", "stage": "training"}, 1) in found["ddpdiag_check_skipped"]


def test_hostile_names_are_labels_and_no_more() -> None:
    row = rank_row(0) | {"host": HOSTILE, 'odd "name"\n{} 1\x1b': 7, "odd__name___": 8}
    finding = finding_of(hosts=(HOSTILE,))
    found = read(fit(ranks=(row,), findings=(finding,), run_id=HOSTILE, measurements={HOSTILE: math.nan}))
    shown = r'n"0\\ \x1b[31m\x00\udcff|{}'.replace("\\\\", "\\")
    assert found["ddpdiag_findings"][0][0]["host"] == shown
    assert found["ddpdiag_rank_busbw_bytes_per_second"][0][0]["host"] == shown
    assert found["ddpdiag_rank_odd__name_____1_"][0][1] == 7


def test_numbers_that_are_none_stay_what_they_are() -> None:
    found = read(fit(measurements={"a": math.nan, "b": math.inf, "c": -math.inf}))
    assert math.isnan(found["ddpdiag_a"][0][1])
    assert (found["ddpdiag_b"][0][1], found["ddpdiag_c"][0][1]) == (math.inf, -math.inf)


@pytest.mark.parametrize("created", ["", "yesterday", "9999-99-99"])
def test_without_a_date_there_is_no_timestamp(created: str) -> None:
    assert "ddpdiag_run_timestamp_seconds" not in read(fit(created=created))


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(exclude_categories=())))
def test_any_text_makes_metrics_that_are_read_back(text: str) -> None:
    row = rank_row(0) | {"host": text, "gpu_uuid": text, text: 1.0}
    finding = finding_of(code=text, hosts=(text,))
    report = unfit(findings=(finding,), ranks=(row,), run_id=text, measurements={text: 1}, created=text)
    ((labels, count),) = read(report)["ddpdiag_findings"]
    assert count == 1
    assert labels["host"].isprintable()
