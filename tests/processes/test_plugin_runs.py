"""`ddpdiag check --nagios`: one line, one of four exit codes, and the files as ever."""

import pytest
from jobs import CHECK, free_port

ALONE = ("--nproc-per-node", "2")
ELSEWHERE = ("--rank", "0", "--world-size", "2", "--master-addr", "127.0.0.1")
GPUS = (*ALONE, "--select", "GPU001")
PCI = "0000:1b:00.0"


@pytest.mark.parametrize(
    ("options", "bus", "code", "state", "says", "own"),
    [
        (ALONE, "", 0, "OK", " | seconds=", 0),
        ((*GPUS, "--expect-gpus", "64"), "", 2, "CRITICAL", " bad_hosts=1;", 1),
        (GPUS, "sys", 2, "CRITICAL", " bad_hosts=1;", 1),
        (GPUS, "nowhere", 3, "UNKNOWN", " bad_hosts=0;", 3),
        (ELSEWHERE, "", 3, "UNKNOWN", "rank 1", 3),
        ((*ALONE, "--prometheus", "/nowhere/metrics.prom"), "", 3, "UNKNOWN", "/nowhere/metrics.prom", None),
    ],
    ids=["healthy", "gpus missing", "gpu without a driver", "bus not readable", "rank missing", "file not writable"],
)
def test_a_verdict_is_a_line_and_a_state_and_the_report_keeps_its_own_code(
    start, tmp_path, options, bus, code, state, says, own
):
    device = tmp_path / f"sys/bus/pci/devices/{PCI}"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x030200\n")
    host = {"DDPDIAG_SYSFS": str(tmp_path / bus)} if bus else {}
    place = ("--master-port", str(free_port()), "--join-timeout", "1")
    job = start(*CHECK, "--nagios", "--select", "LCH001", *options, *place, "--json", "{json}", **host)
    assert job.wait() == code, job.told()
    (line,) = job.stdout.splitlines()
    assert line.startswith(f"DDPDIAG {state} - "), job.told()
    assert says in line
    assert own == (job.report["exit_code"] if job.json.exists() else None)
    assert own != 1 or [(f["code"], PCI in f["message"]) for f in job.errors] == [("GPU001.fewer", bus != "")]
    job.check_left_nothing()
