"""The pure parts of the field run. No GPU is needed for this."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from anonymise import Texts
from cards import healthy, host_of
from field import NAME, FieldRun, ForkServer, Kill, Step, private_names, public, unexpected_in
from msgspec import structs
from smi import differences

RECORDING = Path(__file__).parent.parent / "recordings" / "healthy-2-ranks.jsonl"


def finding(code, severity="error", ranks=()):
    return {"code": code, "severity": severity, "message": "said", "ranks": [*ranks]}


def report(*findings, verdict="fit"):
    return {"verdict": verdict, "findings": [*findings]}


# What is unexpected ---------------------------------------------------------------------------------------------------


def test_a_fit_run_with_notes_is_as_expected():
    assert unexpected_in(report(finding("GPU011.unread", "note"))) == []


def test_every_warning_and_another_verdict_are_unexpected_but_for_what_is_known():
    rows = report(finding("LCH002.host-id", "warning"), finding("GPU005.slowdown", "warning"), verdict="unknown")
    assert unexpected_in(rows, known=("LCH002",)) == ["verdict unknown, fit expected", "warning GPU005.slowdown: said"]


def test_findings_of_one_code_are_one_line():
    rows = report(*(finding("P2P002.host-slow", "warning") for _ in range(16)))
    assert unexpected_in(rows) == ["warning P2P002.host-slow: said (and 15 more)"]


@pytest.mark.parametrize(("named", "count"), [([1], 0), ([0], 1), ([0, 1], 1), ([], 1)])
def test_with_a_fault_the_rank_must_be_blamed_and_no_other(named, count):
    rows = report(finding("RUN003.hung", ranks=named), verdict="unfit")
    assert len(unexpected_in(rows, verdict="unfit", blamed=(1,))) == count


def test_a_fork_server_that_touched_cuda_is_unexpected():
    clean = ForkServer(("python",), (), False, False, "0", 1.2)
    assert clean.unexpected == []
    touched = ForkServer(("python", "cuda-EvtHandlr"), ("/dev/nvidiactl",), True, True, "1", 1.2)
    assert len(touched.unexpected) == 5


def test_a_killed_process_that_needs_long_or_keeps_memory_is_unexpected():
    assert Kill(0.8, 4 << 20, 600 << 20, 4 << 20, ("Xid 45, pid=1, caused by a kill",)).unexpected(2.0) == []
    assert Kill(5.0, None, None, None).unexpected(2.0) == ["it was gone after 5.0 s, 2 s expected"]
    assert Kill(None, 0, 600 << 20, 600 << 20, ("Xid 119, pid=1, GSP",)).unexpected(2.0) == [
        "it was never gone, 2 s expected",
        "600 MiB stay in use",
        "the kernel log has Xid 119, pid=1, GSP",
    ]


# Beside nvidia-smi ----------------------------------------------------------------------------------------------------


def smi(**changes):
    """One GPU as `nvidia-smi -q -x` writes it (driver 580; the fields that are compared, and some that are not)."""
    own = {"ecc": "Enabled", "width": "16x", "temp": "34 C", "limit": "700.00 W"} | changes
    return f"""<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
  <driver_version>580.1</driver_version><attached_gpus>1</attached_gpus>
  <gpu id="00000000:0B:00.0">
    <product_name>NVIDIA H100</product_name><uuid>GPU-0-0</uuid><serial>1650000000001</serial>
    <vbios_version>96.1</vbios_version>
    <mig_mode><current_mig>Disabled</current_mig><pending_mig>Disabled</pending_mig></mig_mode>
    <compute_mode>Default</compute_mode>
    <ecc_mode><current_ecc>{own["ecc"]}</current_ecc></ecc_mode>
    <pci><pci_gpu_link_info>
      <pcie_gen><max_link_gen>5</max_link_gen></pcie_gen>
      <link_widths><max_link_width>16x</max_link_width><current_link_width>{own["width"]}</current_link_width></link_widths>
    </pci_gpu_link_info></pci>
    <temperature><gpu_temp>{own["temp"]}</gpu_temp></temperature>
    <gpu_power_readings>
      <current_power_limit>{own["limit"]}</current_power_limit><default_power_limit>700.00 W</default_power_limit>
    </gpu_power_readings>
  </gpu>
</nvidia_smi_log>"""


LOOK = host_of(count=1)


def test_fields_that_agree_are_silent_and_what_a_driver_lacks_is_not_compared():
    assert differences(LOOK, smi()) == []
    assert differences(LOOK, smi(temp="39 C")) == [], "it moves between two looks"


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"width": "8x"}, "pcie width 16, nvidia-smi says 8x"),
        ({"width": "N/A"}, "pcie width 16, nvidia-smi says N/A"),
        ({"temp": "90 C"}, "celsius 34"),
        ({"limit": "350.00 W"}, "power limit 700"),
    ],
)
def test_a_field_that_differs_is_named_with_both_values(changes, name):
    (text,) = differences(LOOK, smi(**changes))
    assert text.startswith(f"GPU 0: {name}")


def test_what_we_do_not_read_and_nvidia_smi_does_is_named():
    blind = structs.replace(LOOK, gpus=(healthy(0, clocks=structs.replace(healthy(0).clocks, celsius=None)),))
    assert differences(blind, smi()) == ["GPU 0: celsius None, nvidia-smi says 34 C"]


def test_other_gpus_or_no_document_are_told():
    assert differences(host_of(count=2), smi()) == ["2 GPUs (no error), nvidia-smi lists 1"]
    assert differences(LOOK, "NVIDIA-SMI has failed")[0].startswith("nvidia-smi -q -x cannot be read")


# The archive ----------------------------------------------------------------------------------------------------------


def test_a_text_says_neither_whose_machine_it_is_nor_a_secret():
    texts = Texts(private_names("gpu7.lab.example", "alice", Path("/home/alice")))
    said = public(
        "gpu7 of gpu7.lab.example, alice in /home/alice, TOKEN=abc, 172.16.3.9\n"
        "    Serial Number                         : 1650000000001\n<serial>1650000000001</serial>\n"
        "            Name                          : /home/alice/train.py\n",
        texts,
    )
    for private in ("gpu7", "lab", "alice", "abc", "172.16", "1650000000001", "train.py"):
        assert private not in said
    assert "Serial Number" in said


def test_the_archive_has_recordings_that_are_judged_logs_and_what_was_unexpected(tmp_path):
    run = FieldRun()
    run.keep_recording("check-cold", RECORDING)
    run.keep_recording("nothing", tmp_path / "not-there.jsonl")
    run.keep_text("logs/check-cold.txt", "x" * 1_000_000)
    run.steps.append(Step("1 check", 12.3, {"cold": "fit in 12.3 s"}, ["warning GPU005.slowdown: said"]))
    run.write_archive(tmp_path / "field.tar.gz", {"torch": "2.15.0"})
    subprocess.run(["tar", "xzf", tmp_path / "field.tar.gz", "-C", tmp_path], check=True)
    folder = tmp_path / NAME
    assert [path.name for path in (folder / "recordings").iterdir()] == ["check-cold.jsonl"]
    assert len((folder / "logs" / "check-cold.txt").read_text()) < 500_000
    told = json.loads((folder / "field.json").read_text())
    assert (told["versions"]["torch"], told["steps"][0]["unexpected"]) == ("2.15.0", ["warning GPU005.slowdown: said"])
    command = [sys.executable, "-m", "ddpdiag", "judge", str(folder / "recordings" / "check-cold.jsonl")]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_what_is_shown_names_each_step_and_all_that_was_unexpected():
    run = FieldRun()
    run.steps += [
        Step("1 check", 12.34, {"cold": "fit in 12.3 s"}, ["warning GPU005.slowdown: said"]),
        Step("2 fork", skipped="no time"),
        Step("3 kill", 2.0),
    ]
    first, fact, warning, second, third = run.lines
    assert first.split() == ["1", "check", "12.3", "s", "1", "unexpected"]
    assert (fact.strip(), warning.strip()) == ("cold: fit in 12.3 s", "! warning GPU005.slowdown: said")
    assert second.endswith("no time")
    assert third.endswith("nothing unexpected")


def test_the_time_that_is_left_is_that_of_the_whole_run():
    now = iter((100.0, 130.0, 700.0))
    run = FieldRun(480.0, lambda: next(now))
    assert (run.left, run.left) == (450.0, -120.0)
