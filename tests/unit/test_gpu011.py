"""GPU011: what the kernel's log says of GPUs."""

from dataclasses import replace

import pytest
from cards import host_of, seen, uuid_of
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from seen import seen_of, together

from ddpdiag.checks.collective import all_reduce
from ddpdiag.checks.gpu import devices, memory_errors
from ddpdiag.checks.gpu.driver_log import CHECK
from ddpdiag.model import RunOptions, Severity, Status
from ddpdiag.probes.gpu.health import Health
from ddpdiag.probes.gpu.kernel_log import KernelLog, Xid

NOW, START = 50_000.0, 1000
RESET = "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"
REBOOT = "GPU recovery action changed from 0x0 (None) to 0x2 (OS Reboot)"
NONE = "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"


def xid(code, index=5, *, text="", ago=600.0, line=START - 10, switch=False):
    """A line about that GPU of host_of(), so many seconds ago; a line above START came during the run."""
    return Xid(pci=f"0000:{index}b:00", code=code, text=text, line=line, seconds=NOW - ago, switch=switch)


def log_of(*xids):
    return KernelLog(xids=xids, last=START + 100, now_seconds=NOW)


def judged(log, look=None, *, start=START, options=None, more=()):
    world = {"size": 8, "ranks_per_node": 8, "gpus": 8, "options": options}
    look = structs.replace(host_of() if look is None else look, kernel_line=start)
    met = together(seen_of(CHECK, {0: log}, **world), seen_of(memory_errors.CHECK, {0: look}, **world))
    for other in more:
        met = together(met, other)
    return list(CHECK.judge(met))


@pytest.mark.parametrize(
    ("code", "text", "before", "during", "action"),
    [
        (79, "pid=1234, name=python, GPU has fallen off the bus.", Severity.ERROR, Severity.ERROR, "reboot"),
        (54, "", Severity.ERROR, Severity.ERROR, "isolate"),
        (151, "", Severity.ERROR, Severity.ERROR, "reboot"),
        (48, "", Severity.WARNING, Severity.ERROR, "reset"),
        (119, "", Severity.WARNING, Severity.ERROR, "reset"),
        (74, "", Severity.WARNING, Severity.ERROR, "reset"),
        (168, "", Severity.ERROR, Severity.ERROR, "reboot"),
        (31, "", Severity.NOTE, Severity.ERROR, "none"),
        (94, "", Severity.NOTE, Severity.ERROR, "none"),
        (43, "", Severity.NOTE, Severity.NOTE, "none"),
        (45, "", Severity.NOTE, Severity.NOTE, "none"),
        (63, "", Severity.NOTE, Severity.NOTE, "none"),
        (154, RESET, Severity.WARNING, Severity.ERROR, "reset"),
        (154, REBOOT, Severity.ERROR, Severity.ERROR, "reboot"),
        (154, NONE, Severity.NOTE, Severity.NOTE, "none"),
        (154, "garbled", Severity.WARNING, Severity.ERROR, "reset"),
        (999, "something new", Severity.WARNING, Severity.WARNING, "monitor"),
    ],
)
def test_each_number_has_its_severity_before_and_during_the_run(golden, code, text, before, during, action):
    (old,) = judged(log_of(xid(code, text=text)))
    (new,) = judged(log_of(xid(code, text=text, line=START + 1, ago=1)))
    assert (old.severity, new.severity, old.evidence["action"]) == (before, during, action)
    assert (old.evidence["count_during_run"], new.evidence["count_during_run"]) == (0, 1)
    assert old.gpus == new.gpus == (uuid_of(5),)
    golden(old, new)


@pytest.mark.parametrize("status", [Status.DIED, Status.HUNG])
def test_what_the_end_of_a_process_may_have_caused_is_no_proof_against_a_gpu(golden, status):
    during = log_of(xid(31, line=START + 1), xid(145, 6, line=START + 2), xid(79, 7, line=START + 3))
    ended = seen_of(all_reduce.CHECK, {}, statuses={1: status}, size=8, ranks_per_node=8, gpus=8)
    *after, fallen = judged(during, more=[ended])
    assert (fallen.severity, fallen.gpus) == (Severity.ERROR, (uuid_of(7),))
    assert [(one.severity, one.ranks, one.hosts, one.gpus) for one in after] == [(Severity.WARNING, (), (), ())] * 2
    golden(after[0])
    assert [one.severity for one in judged(during)] == [Severity.ERROR] * 3
    before = log_of(xid(31), xid(145, 6))
    assert {one.severity for one in judged(before, more=[ended])} == {Severity.NOTE, Severity.WARNING}


@pytest.mark.parametrize(
    ("ago", "settings", "number"),
    [
        (2 * 3600 + 1, {}, 0),
        (2 * 3600 - 1, {}, 1),
        (10 * 3600, {"GPU011.window_hours": "24"}, 1),
        pytest.param(-5, {}, 1, id="its clock is ahead"),
    ],
)
def test_lines_beyond_the_window_are_old(ago, settings, number):
    assert len(judged(log_of(xid(79, ago=ago)), options=RunOptions(settings=settings))) == number


def test_repeated_lines_are_counted(golden):
    (finding,) = judged(log_of(*(xid(31, ago=100 - n, line=START - 10 + n) for n in range(14))))
    assert (finding.evidence["count"], finding.evidence["count_during_run"]) == (14, 3)
    golden(finding)


def test_without_a_first_look_nothing_is_known_to_be_of_this_run():
    (finding,) = judged(log_of(xid(48, line=START + 5)), start=None)
    assert finding.severity is Severity.WARNING


def test_a_switch_is_named_by_its_address_and_no_gpu_is(golden):
    fatal = Xid(pci="0000:c1:00", code=20034, text="Fatal, Link 30", line=1, seconds=NOW - 60, switch=True)
    (finding,) = judged(log_of(fatal))
    assert (finding.code, finding.severity, finding.gpus) == ("GPU011.sxid", Severity.WARNING, ())
    golden(finding)
    (recent,) = judged(log_of(structs.replace(fatal, line=START + 1)))
    assert (recent.severity, recent.evidence["action"]) == (Severity.ERROR, "reset")


NONFATAL = "RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x0409a0c2 0x00000008 0x00000001 0x00000000 0x00100000 0x00000004)"
FATAL = "RLW_SRC_TRACK Fatal XC0 i0 Link 13 (0x00000007 0x00000001 0x00000000 0x00000000)"


@pytest.mark.parametrize("code", range(144, 151))
@pytest.mark.parametrize(
    ("text", "severity"),
    [
        (NONFATAL, Severity.NOTE),
        (f"pid=876767, name=ray::Worker, {NONFATAL}", Severity.NOTE),
        ("name=Nonfatal, RLW_SRC_TRACK Fatal XC0", Severity.ERROR),
        ("RLW_SRC_TRACK Fatal, not Nonfatal", Severity.ERROR),
        ("", Severity.ERROR),
    ],
)
def test_blackwells_nvlink_lines_are_harmless_by_their_own_word_alone(code, text, severity):
    (finding,) = judged(log_of(xid(code, text=text, line=START + 1, ago=1)))
    assert finding.severity is severity


def test_what_they_call_fatal_is_an_error_during_the_run_beside_any_number_of_lines_that_are_not(golden):
    harmless = [xid(145, text=NONFATAL, line=START + n, ago=1) for n in (1, 3)]
    minor, fatal = judged(log_of(harmless[0], xid(145, text=FATAL, line=START + 2, ago=1), harmless[1]))
    assert (fatal.severity, fatal.evidence["count"]) == (Severity.ERROR, 1)
    assert (minor.severity, minor.evidence["count"]) == (Severity.NOTE, 2)
    golden(minor, fatal)


def test_a_gpu_of_another_job_is_silent():
    world = {"size": 2, "ranks_per_node": 2, "gpus": 2}
    gpus = tuple(devices.TorchGpu("NVIDIA H100", uuid_of(index)) for index in (0, 1))
    rows = {rank: devices.Data(torch="2", gpus=gpus, chosen=rank) for rank in (0, 1)}
    met = together(seen_of(CHECK, {0: log_of(xid(79))}, **world), seen_of(memory_errors.CHECK, {0: host_of()}, **world))
    assert list(CHECK.judge(together(met, seen_of(devices.CHECK, rows, **world)))) == []


def test_an_unknown_address_is_silent_where_all_gpus_of_the_job_are_known():
    assert judged(log_of(xid(79, index=9))) == []


def test_a_gpu_that_cannot_be_opened_may_be_the_one_that_the_log_names(golden):
    look = host_of()
    lost = structs.replace(look, gpus=(*look.gpus[:5], Health(index=5, error="GPU is lost"), *look.gpus[6:]))
    (finding,) = judged(log_of(xid(79)), lost)
    assert (finding.code, finding.severity, finding.gpus) == ("GPU011.xid", Severity.ERROR, ())
    assert "INDEX" not in finding.fix
    golden(finding)


@pytest.mark.parametrize(
    ("options", "word", "severity"),
    [
        pytest.param(RunOptions(), "unread", Severity.NOTE, id="not requested"),
        pytest.param(RunOptions(select=("GPU003", "GPU011")), "unreadable", Severity.WARNING, id="requested"),
    ],
)
def test_a_closed_log_is_unknown_where_it_was_requested(golden, options, word, severity):
    (finding,) = judged(KernelLog(error="/dev/kmsg: Operation not permitted"), options=options)
    assert (finding.code, finding.severity, finding.hosts) == (f"GPU011.{word}", severity, ("n0",))
    golden(finding)


def test_hosts_with_closed_logs_are_one_finding():
    rows = {8 * host: KernelLog(error="closed") for host in range(3)}
    (finding,) = CHECK.judge(seen_of(CHECK, rows, size=24, ranks_per_node=8, gpus=8))
    assert finding.hosts == ("n0", "n1", "n2")


def test_one_rank_of_each_host_with_gpus_reads_once():
    known = seen(host_of(), host_of(host=1)).of(CHECK)
    assert CHECK.plan(known) == ()
    assert [trial.groups for trial in CHECK.plan(replace(known, is_last=True))] == [((0,), (8,))]
    assert CHECK.plan(replace(seen(gpus=0, size=8).of(CHECK), is_last=True)) == ()
    assert CHECK.last_seconds


@given(
    st.lists(
        st.tuples(st.integers(0, 200), st.integers(0, 7), st.integers(0, 2 * START), st.floats(0, 20_000)), max_size=30
    )
)
def test_only_gpus_with_lines_within_the_window_are_named(lines):
    found = judged(log_of(*(xid(code, index, line=line, ago=ago) for code, index, line, ago in lines)))
    expected = {uuid_of(index) for _, index, _, ago in lines if ago <= 7200}
    assert {uuid for finding in found for uuid in finding.gpus} == expected
