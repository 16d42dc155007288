"""`ddpdiag check --nagios`: one line, one of four exit codes, and the files as ever."""

import pytest
from jobs import CHECK, free_port

ALONE = ("--nproc-per-node", "2")


@pytest.mark.parametrize(
    ("options", "code", "state", "says", "own"),
    [
        (ALONE, 0, "OK", " | seconds=", 0),
        ((*ALONE, "--select", "GPU001", "--expect-gpus", "64"), 2, "CRITICAL", " bad_hosts=1;", 1),
        (("--rank", "0", "--world-size", "2", "--master-addr", "127.0.0.1"), 3, "UNKNOWN", "rank 1", 3),
        ((*ALONE, "--prometheus", "/nowhere/metrics.prom"), 3, "UNKNOWN", "/nowhere/metrics.prom", None),
    ],
    ids=["healthy", "gpus missing", "rank missing", "file not writable"],
)
def test_a_verdict_is_a_line_and_a_state_and_the_report_keeps_its_own_code(start, options, code, state, says, own):
    place = ("--master-port", str(free_port()), "--board-wait", "1")
    job = start(*CHECK, "--nagios", "--select", "LCH001", *options, *place, "--json", "{json}")
    assert job.wait() == code, job.told()
    (line,) = job.stdout.splitlines()
    assert line.startswith(f"DDPDIAG {state} - "), job.told()
    assert says in line
    assert own == (job.report["exit_code"] if job.json.exists() else None)
    job.check_left_nothing()
