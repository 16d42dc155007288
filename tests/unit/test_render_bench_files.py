"""A benchmark for scripts: JSON after nccl-tests, CSV, and pictures."""

import csv
import json
import math
import re
import sys
from io import StringIO

import pytest
from benches import SIZES, bench, bench_rank, healthy, mode, row, slow, unmeasured
from msgspec import structs
from reports import SLOW, THREADS

from ddpdiag.bench import files, plot
from ddpdiag.errors import UsageError
from ddpdiag.model import Report, Verdict
from ddpdiag.model.bench import Bench, Blocking


def as_json(report: Report) -> dict:
    return json.loads(files.to_json(report), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def as_csv(report: Report) -> list[dict[str, str]]:
    return list(csv.DictReader(StringIO(files.to_csv(report))))


def test_the_keys_of_version_3_are_there():
    data = as_json(healthy())
    keys = "version start_time args env nccl_version config results out_of_bounds average_bus_bandwidth errors end_time"
    assert set(keys.split()) <= data.keys()
    assert (data["version"], data["schema"], data["exit_code"]) == (3, "ddpdiag.bench/1", 0)
    assert (data["start_time"], data["end_time"]) == ("2026-03-01T12:00:00+00:00", "2026-03-01T12:00:07.912000+00:00")
    assert data["args"] == ["allreduce-bench", "-f", "4"]
    assert data["env"] == ["GLOO_SOCKET_IFNAME=eth0"]
    assert data["out_of_bounds"] == {"count": 0, "okay": True}
    assert data["average_bus_bandwidth"] == {"bandwidth": pytest.approx(0.447663, rel=1e-5), "okay": None}
    assert data["errors"] == []


def test_a_result_has_microseconds_and_gb_per_second():
    (result, *_) = as_json(healthy(bench(rows=(row(1 << 20),))))["results"]
    assert (result["size"], result["count"], result["type"]) == (1 << 20, 1 << 18, "float")
    assert (result["redop"], result["root"], result["backend"], result["cycle"]) == ("sum", -1, "gloo", 0)
    assert (result["actual_iterations"], result["experiment_name"]) == (20, "")
    inside = result["in_place"]
    assert inside["time"] == pytest.approx(1656.88, rel=1e-4)
    assert inside["alg_bw"] == pytest.approx((1 << 20) / 1656.88e-6 / 1e9, rel=1e-4)
    assert inside["bus_bw"] == pytest.approx(1.5 * inside["alg_bw"])
    assert inside["nwrong"] == 0
    last = inside["per_rank"][3]
    assert (last["rank"], last["host"], last["gpu_uuid"]) == (3, "n1", None)
    assert last["median_seconds"] == pytest.approx(0.99 * last["mean_seconds"])
    assert "in_place_per_iter" not in result


def test_what_was_not_measured_or_checked_is_null():
    report = healthy(bench(rows=(structs.replace(row(64, wrong=None), out_of_place=None),), wrong=None))
    data = as_json(report)
    assert data["results"][0]["out_of_place"] is None
    assert data["results"][0]["in_place"]["nwrong"] is None
    assert data["out_of_bounds"] == {"count": None, "okay": None}


def test_the_configuration_has_numbers_and_truth_values():
    asked = Bench(step_bytes=64, blocking=Blocking.WAIT, min_busbw_bytes_per_s=9e9)
    config = as_json(healthy(bench(asked=asked)))["config"]
    assert (config["step_bytes"], config["blocking_collectives"], config["blocking"]) == (64, True, "wait")
    assert "step_factor" not in config
    assert as_json(healthy())["config"]["step_factor"] == 4.0
    assert as_json(healthy())["config"]["blocking_collectives"] is None
    assert as_json(healthy(bench(asked=asked)))["average_bus_bandwidth"]["okay"] is False


def test_devices_are_those_of_version_3_and_more():
    devices = as_json(healthy(bench("gloo", "nccl")))["config"]["devices"]
    assert [device["rank"] for device in devices] == [0, 1, 2, 3]
    assert devices[3] == {
        "rank": 3,
        "group": 0,
        "pid": 4714,
        "hostname": "n1",
        "device": 1,
        "device_hex": "0000:1A:00",
        "device_info": "NVIDIA H100 80GB HBM3",
        "gpu_uuid": "GPU-00000003-0000-0000-0000-000000000000",
        "pci_bus_id": "00000000:1A:00.0",
        "local_rank": 1,
    }


@pytest.mark.parametrize(("version", "code"), [("2.27.5", 22705), ("2.18.3+cuda", None), ("", None), (None, None)])
def test_nccl_version_is_its_number(version, code):
    assert as_json(healthy(bench(nccl_version=version)))["nccl_version"] == code


def test_single_times_are_there_as_version_3_has_them():
    report = healthy(bench("nccl", rows=(row(1 << 20, "nccl", calls=20),), asked=Bench(per_iteration=True)))
    of = as_json(report)["results"][0]["in_place_per_iter"]
    assert len(of["per_process_max_times_us"]) == 4
    assert of["times_us"] == [max(times) for times in zip(*of["per_process_max_times_us"], strict=True)]
    assert of["min_us"] <= of["p50_us"] <= of["p95_us"] <= of["p99_us"] == of["max_us"]
    assert of["cv_pct"] == pytest.approx(of["stdev_us"] / of["avg_us"] * 100)


def test_a_non_finite_number_is_spelled():
    broken = structs.replace(mode(1e-3, 64), busbw_bytes_per_s=math.inf, seconds=math.nan)
    report = healthy(bench(rows=(structs.replace(row(64), in_place=broken),)))
    inside = as_json(report)["results"][0]["in_place"]
    assert (inside["bus_bw"], inside["time"]) == ("inf", "nan")


def test_the_verdict_names_culprits_cause_action_and_evidence():
    data = as_json(slow())
    verdict = data["verdict"]
    assert verdict["status"] == "unfit"
    assert verdict["culprits"] == [
        {"code": "COL001.slow", "ranks": [3], "nodes": ["n1"], "gpus": [], "links": ["n0 -> n1"]}
    ]
    assert (verdict["cause"], verdict["action"]) == (SLOW.message, SLOW.fix)
    assert verdict["evidence"][0]["busbw_bytes_per_s"] == 2.1e8
    assert data["errors"] == [f"COL001.slow: {SLOW.title}"]
    assert data["per_rank"][3]["slow"] == slow().bench.ranks[3].slow


def test_a_warning_is_the_cause_only_where_the_verdict_is_bad():
    assert as_json(healthy(findings=(THREADS,)))["verdict"]["culprits"] == []
    assert as_json(healthy(findings=(THREADS,)))["findings"][0]["code"] == "HST002.many"
    strict = as_json(healthy(findings=(THREADS,), verdict=Verdict.UNFIT))
    assert strict["verdict"]["culprits"][0]["nodes"] == ["n0", "n1"]


def test_series_are_whole():
    (series,) = as_json(healthy())["series"]
    assert series["fit"]["latency_seconds"] == 180e-6
    assert (series["bottleneck"], series["expectation"]["busbw_bytes_per_s"]) == ("cpu copies", 1.3e9)


@pytest.mark.parametrize("report", [unmeasured(), unmeasured(bench=None)])
def test_nothing_measured_is_valid(report):
    data = as_json(report)
    assert (data["results"], data["verdict"]["status"]) == ([], "unknown")
    assert as_csv(report) == []
    assert files.to_csv(report).startswith("backend,collective,")


def test_csv_has_a_line_for_each_row_and_mode():
    report = healthy(bench(rows=(*map(row, SIZES[:-1]), structs.replace(row(SIZES[-1]), out_of_place=None))))
    lines = as_csv(report)
    assert len(lines) == 2 * len(SIZES) - 1
    first, last = lines[0], lines[-1]
    assert (first["mode"], last["mode"]) == ("out_of_place", "in_place")
    assert (last["backend"], last["size_bytes"], last["dtype"]) == ("gloo", str(SIZES[-1]), "float")
    inside = report.bench.rows[-1].in_place
    assert float(last["busbw_bytes_per_s"]) == inside.busbw_bytes_per_s
    assert (last["slowest_rank"], last["slowest_host"]) == ("3", "n1")
    assert float(last["slowest_p99_seconds"]) == inside.ranks[3].seconds.p99
    assert float(last["slowest_cv"]) == pytest.approx(0.1)


def test_csv_leaves_empty_what_is_not_known():
    bare = structs.replace(mode(1e-3, 64, wrong=None), ranks=(), transfer_seconds=None)
    (line,) = as_csv(healthy(bench(rows=(structs.replace(row(64), in_place=bare, out_of_place=None),))))
    assert {line[name] for name in ("wrong", "transfer_seconds", "slowest_rank", "slowest_cv")} == {""}


def test_csv_keeps_texts_of_strangers_within_their_cell():
    evil = 'n,"0"\n1'
    ranks = tuple(bench_rank(rank, node=evil) for rank in range(4))
    (line,) = as_csv(healthy(bench(rows=(structs.replace(row(64), in_place=None),), ranks=ranks)))
    assert line["slowest_host"] == 'n,"0" 1'
    assert None not in line


def svg(report: Report) -> str:
    return plot.render(report.bench, "svg").decode()


def legend(picture: str) -> str:
    """Its words, but for those of the axes: letters are drawn as paths, and each text stands above its own."""
    return "\n".join(re.findall("<!-- (.*?) -->", picture.rpartition("<!-- Latency")[2]))


def test_pictures_are_what_they_are_called():
    assert plot.render(bench("nccl", "gloo"), "png").startswith(b"\x89PNG\r\n\x1a\n")
    assert svg(healthy()).startswith("<?xml")


def test_a_picture_is_the_same_each_time():
    small = healthy(bench(rows=(row(64), row(128))))
    assert svg(small) == svg(small)
    assert "<dc:date>" not in svg(small)


def test_a_picture_says_who_what_and_what_was_expected(golden):
    golden(legend(svg(healthy(bench("nccl", "gloo")))))


@pytest.mark.parametrize(
    "report",
    [
        bench(rows=(), series=(), ranks=()),
        bench(rows=(row(64),)),
        bench(rows=(row(64), row(64, op="max"), structs.replace(row(128), in_place=None))),
        bench(rows=(structs.replace(row(64), dtype="$\\frac$\x1b\u4e2d"), row(64))),
    ],
    ids=["nothing", "one size", "several series", "strange names"],
)
def test_a_picture_needs_little(report):
    assert plot.render(report, "svg").startswith(b"<?xml")


def test_without_matplotlib_a_sentence_says_how_to_get_it(golden, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError) as raised:
        plot.render(bench(), "png")
    golden(str(raised.value))


def test_many_series_have_lines_that_can_be_told_apart(golden):
    many = tuple(
        row(size, collective=name, dtype=dtype)
        for name in ("all_reduce", "broadcast", "reduce")
        for dtype in ("float", "half", "double", "int8", "int32", "int64", "uint8", "bfloat16")
        for size in (8, 1024)
    )
    golden(legend(svg(healthy(bench(rows=many, series=())))))


def test_a_matplotlib_that_does_not_work_is_a_sentence(golden, monkeypatch):
    def broken(*_args, **_options):
        raise RuntimeError("font cache")

    monkeypatch.setattr("ddpdiag.bench.plot._figure", broken)
    with pytest.raises(UsageError) as raised:
        plot.render(bench(), "svg")
    golden(str(raised.value))
