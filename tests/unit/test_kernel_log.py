"""The kernel's log: which lines are read, and how."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpdiag.probes.gpu.kernel_log import MAX_LINES, kernel_log, kmsg_path, newest_line_number, parse_xid


def record(line, seconds, text):
    return f"4,{line},{int(seconds * 1e6)},-;{text}\n SUBSYSTEM=pci\n DEVICE=+pci:0000:65:00.0\n"


def log_of(tmp_path, *records):
    path = tmp_path / "kmsg"
    path.write_text("".join(records))
    return kernel_log(path)


@pytest.mark.parametrize(
    ("text", "pci", "code", "said"),
    [
        (
            "NVRM: Xid (PCI:0000:65:00): 79, pid=1234, name=python, GPU has fallen off the bus.",
            "0000:65:00",
            79,
            "pid=1234, name=python, GPU has fallen off the bus.",
        ),
        ("NVRM: Xid (PCI:0000:65:00.0): 48, pid='<unknown>', name=<unknown>, DBE", "0000:65:00", 48, None),
        ("NVRM: Xid (PCI:00010000:C3:00): 31, Ch 0000000b", "10000:c3:00", 31, "Ch 0000000b"),
        ("NVRM: Xid (PCI:0000:01:00 GPU-I:05): 45, pid=7, name=x, Ch 3", "0000:01:00", 45, None),
        ("NVRM: Xid (0000:03:00): 13, 0005 00000000 0000502d", "0000:03:00", 13, "0005 00000000 0000502d"),
        ("NVRM: Xid (PCI:0000:65:00): 62", "0000:65:00", 62, ""),
        ("[ 12.3] NVRM: Xid (PCI:0000:65:00): 43,Ch 2", "0000:65:00", 43, "Ch 2"),
    ],
)
def test_a_line_of_a_gpu_is_read_in_all_its_forms(text, pci, code, said):
    xid = parse_xid(text)
    assert (xid.pci, xid.code, xid.switch) == (pci, code, False)
    assert said is None or xid.text == said


def test_a_line_of_a_switch_is_read():
    xid = parse_xid("nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up")
    assert (xid.pci, xid.code, xid.switch, xid.text) == ("0000:c1:00", 20034, True, "Fatal, Link 30 LTSSM Fault Up")


@pytest.mark.parametrize(
    "text",
    [
        "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, Severity 1 Engine instance 30 Sub-engine instance 00",
        "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, Data {0x0000001e, 0x0000001e}",
        "NVRM: GPU at PCI:0000:65:00: GPU-1234",
        "NVRM: Xid : 32, pid=2280636",
        "NVRM: Xid (PCI:0000:66:00): abc, pid=2280636",
        "NVRM: Xid (43, pid: 5678): ROBUST",
        "password=secret",
    ],
)
def test_other_lines_are_none(text):
    assert parse_xid(text) is None


@given(st.text())
def test_no_text_breaks_the_parser(text):
    assert parse_xid(text) is None or "Xid" in text


def test_only_matching_lines_are_kept_and_long_ones_are_cut(tmp_path):
    secret = record(7, 1.5, "login: password=secret")
    long = record(9, 2.5, "NVRM: Xid (PCI:0000:65:00): 31, " + "x" * 1000)
    log = log_of(tmp_path, secret, long, record(11, 3.0, "usb 1-1: new device"))
    (xid,) = log.xids
    assert (xid.line, xid.seconds, len(xid.text), log.last) == (9, 2.5, 300, 11)


def test_a_program_that_fails_in_a_loop_does_not_hide_another_line(tmp_path):
    flood = [record(n, n, "NVRM: Xid (PCI:0000:65:00): 31, Ch 1") for n in range(2, 500)]
    log = log_of(tmp_path, record(1, 1, "NVRM: Xid (PCI:0000:65:00): 79, gone"), *flood)
    assert [xid.code for xid in log.xids] == [79] + [31] * MAX_LINES
    assert log.xids[-1].line == 499


def test_a_marginal_link_does_not_hide_its_fatal_line(tmp_path):
    flood = [record(n, n, "NVRM: Xid (PCI:0000:65:00): 145, RLW_RXPIPE Nonfatal XC0") for n in range(2, 500)]
    log = log_of(tmp_path, record(1, 1, "NVRM: Xid (PCI:0000:65:00): 145, RLW_RXPIPE Fatal XC0"), *flood)
    assert [xid.is_nonfatal for xid in log.xids] == [False] + [True] * MAX_LINES


def test_a_log_that_is_not_there_or_closed_says_so(golden, tmp_path):
    golden(kernel_log(tmp_path / "missing").error.replace(str(tmp_path), "TMP"))
    assert newest_line_number(tmp_path / "missing") is None


def test_where_it_lies():
    assert str(kmsg_path({})) == "/dev/kmsg"
    assert str(kmsg_path({"DDPDIAG_KMSG": "/host/kmsg"})) == "/host/kmsg"


@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK), reason="the kernel's log is closed here")
def test_the_real_log_is_read_to_its_end_and_no_further():
    log = kernel_log(kmsg_path({}))
    assert log.error is not None or (log.last or 0) > 0
    assert log.error is not None or log.now_seconds > 0
