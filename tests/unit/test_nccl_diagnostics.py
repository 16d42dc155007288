"""Lines of NCCL's own diagnostics: read, sorted into faults and harmless lines, and compared with our findings."""

import pytest
from msgspec import structs
from seen import seen_of, skip_text, together, world_of

from ddpdiag.checks.collective import all_reduce
from ddpdiag.checks.collective.nccl_diagnostics import CHECK
from ddpdiag.checks.launch import versions
from ddpdiag.evidence.nccl_diagnostics import parse_diagnostics
from ddpdiag.model import Finding, Severity
from ddpdiag.model.report import KNOWN_ERROR
from ddpdiag.stats import samples

# The words are those of nvidia-nccl-cu13 2.32.3 and, for p2p and NVLink, also of 2.31.2.
HEALTHY = """\
n0:71 NCCL DIAG === NCCL Diagnostics ===
n0:71 NCCL DIAG [OK] net bw: skipped (single host or no network transport)
n0:71 NCCL DIAG [INFO] p2p: temporarily enabled context-wide CUDA peer access rank=0 cudaDev=0; avoid use
n0:71 NCCL DIAG [OK]   p2p: verified P2P access in both directions between every GPU pair (56 peer accesses)
n0:71 NCCL DIAG [OK]   p2p: all 56 directed GPU P2P edges verified
n0:71 NCCL DIAG NCCL diagnostics completed in 245.3 ms across 8 ranks
n0:71 NCCL DIAG === RAS Diagnostics ===
n0:71 NCCL DIAG [OK]   GPU inventory: 8x NVIDIA H100 80GB HBM3 per node consistent across 8 ranks in comm 0x1234
n0:71 NCCL DIAG [INFO] ECC: unavailable via NVML across 8 ranks in comm 0x1234
n0:71 NCCL DIAG [OK]   NVLink: 18 links per GPU, all active at consistent speed across 8 ranks in comm 0x1234
n0:71 NCCL DIAG [INFO] Xid/SXid: no kernel-log source was available on host n0
n0:71 NCCL DIAG [INFO] Xid 94 detected 1 time(s) on host n0. No user action or further investigation is required.
n0:71 NCCL DIAG [INFO] NCCL environment: mismatch across 8 ranks in comm 0x1234 for NCCL_DEBUG_FILE
n0:71 NCCL DIAG [INFO] net bw: required external tool missing in comm 0x1234
n0:71 NCCL DIAG [INFO] net bw: same-nic rank 3 (n1): 800.0 Gbit/s, >30% off median 391.5 Gbit/s in comm 0x7a3f
n0:71 NCCL DIAG RAS diagnostics completed in 12.3 ms across 8 ranks
n0:71:80 [0] NCCL INFO NET/IB: WQE latency summary [n1 peer=10.0.0.2<41> dev=mlx5_0 qpn=7 port=1]: n=9 slow=0
"""
P2P = (
    "n0:71 NCCL DIAG [INFO] p2p: {what} srcRank={a} srcCudaDev={a} srcNvmlDev={a} dstRank={b} dstCudaDev={b} "
    "dstNvmlDev={b} path=PHB handle=CUMEM_POSIX_FD {rest}; check the affected pair with 'nvidia-smi topo -p2p p', then "
    "check Linux bare-metal IOMMU mode and PCIe ACS settings"
)
MISMATCH = "expected=0x00000000000000a1 got=0x0000000000000000"


def p2p(a: int, b: int, what: str = "read mismatch", rest: str = MISMATCH) -> str:
    return P2P.format(what=what, a=a, b=b, rest=rest)


STALL = (
    "n0:71:80 [3] NCCL INFO NET/IB: WQE stall (no CQE): peer=10.0.0.2<50321> | local: qpn=120 dev=mlx5_3 port=1 lid=0 "
    "localGid=fe80::1 | remote: qpn=88 port=1 lid=0 remoteGid=fe80::2 | stall_thr=100000ns age=5000000000ns inflight=4"
)
ECC = "n0:71 NCCL DIAG [INFO] ECC: uncorrected volatile errors on rank(s) {5} (worst=12) across 8 ranks in comm 0x1234"
MISMATCHED = "h:1 NCCL DIAG [INFO] {} mismatch across 8 ranks in comm 0x1, rank(s) {{{}}} differ from rank 0 (H100)"
BANDWIDTH = (
    "n0:71 NCCL DIAG [INFO] net bw: cross-nic rank 6 (n1): 265.1 Gbit/s, >30% off median 391.5 Gbit/s in comm 0x7a3f"
)
XID = (
    "n0:71 NCCL DIAG [INFO] Xid 79 detected 2 time(s) on host n1. For the recommended response, see the NVIDIA Xid "
    "documentation: https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html"
)
ATTENTION = (
    "n0:71:80 [0] init.cc:1200 NCCL ATTN MNNVL busId 0x1000 NVLink fabric health reports DEGRADED_BANDWIDTH "
    "(healthMask 0x1)"
)


def seen(output: str, *, size: int = 8, backend: str = "nccl"):
    """A run of `size` ranks, four on a host, whose first rank has this output of NCCL."""
    timing = samples([0.001])
    row = all_reduce.Data(backend, size, 4, timing, 4 << 20, timing, 0)
    diagnostics = parse_diagnostics(output, range(size))
    rows = {rank: structs.replace(row, diagnostics=diagnostics if rank == 0 else ()) for rank in range(size)}
    params = {"backend": backend}
    return seen_of(all_reduce.CHECK, rows, params=params, ranks_per_node=4, gpus=4).of(CHECK)


def found(output: str, size: int = 8, own: tuple[Finding, ...] = ()) -> list[Finding]:
    run = seen(output, size=size)
    codes = ("GPU003", "GPU006", "GPU007", "GPU011", "LCH003", "P2P001", "P2P002", "FAB001")
    run.findings_by_code.update(dict.fromkeys(codes, ()))
    for finding in own:
        run.findings_by_code[finding.code.partition(".")[0]] = (finding,)
    return list(CHECK.judge(run))


def test_a_healthy_report_has_no_finding():
    assert found(HEALTHY) == []
    assert found("") == []


@pytest.mark.parametrize(
    "line", ["NCCL ATTN ", "n0:1 NCCL INFO NET/IB: WQE stall", "NCCL DIAG [INFO]", "NCCL ATTN \x1b[31m"]
)
def test_a_line_that_is_cut_off_or_damaged_is_left_out(line):
    assert found(line) == []


@pytest.mark.parametrize(
    ("output", "card", "ranks", "hosts", "links"),
    [
        (p2p(2, 3), "diag-data", (), (), ("rank 2 -> rank 3",)),
        ("\n".join(p2p(2, b) + "\n" + p2p(b, 2) for b in (0, 1, 3)), "diag-data", (2,), ("n0",), None),
        (p2p(1, 6, "peer-memory import failed", "reason=import"), "diag-p2p", (), (), ("rank 1 -> rank 6",)),
        ("h:1 NCCL DIAG [INFO] p2p: setup failed on rank 3 result=1", "diag-p2p", (3,), ("n0",), ()),
        (ECC, "diag-ecc", (5,), ("n1",), ()),
        (ECC.replace("ECC: uncorrected volatile errors", "NVLink: inactive link(s)"), "diag-nvlink", (5,), ("n1",), ()),
        (MISMATCHED.format("GPU inventory: model", "6,7"), "diag-versions", (6, 7), ("n1",), ()),
        (MISMATCHED.format("CUDA driver version:", "4,5,6,7"), "diag-versions", (), (), ()),
        (BANDWIDTH, "diag-slow-network", (6,), ("n1",), ()),
        (XID, "diag-xid", (), ("n1",), ()),
        (XID.replace("on host n1.", "on host n1.cluster.example."), "diag-xid", (), ("n1",), ()),
        (XID.replace("on host n1.", "on host elsewhere."), "diag-xid", (), (), ()),
        (STALL, "wqe-stall", (), (), ()),
        (ATTENTION, "fabric-degraded", (), (), ()),
    ],
)
def test_a_fault_names_what_the_line_shows(golden, output, card, ranks, hosts, links):
    (finding,) = found(output)
    assert (finding.code, finding.severity) == ("COL003.reported", Severity.WARNING)
    assert finding.evidence[KNOWN_ERROR] == f"nccl-{card}"
    assert (finding.ranks, finding.hosts) == (ranks, hosts)
    assert links is None or finding.links == links
    golden(finding)


def test_a_finding_of_our_own_on_the_same_host_makes_it_a_note(golden):
    own = Finding(code="GPU003.uncorrected", severity=Severity.ERROR, title="", message="", hosts=("n1",))
    (finding,) = found(ECC, own=(own,))
    assert (finding.severity, finding.evidence["findings"]) == (Severity.NOTE, ["GPU003.uncorrected"])
    golden(finding)
    (finding,) = found(ECC, own=(structs.replace(own, hosts=("n0",)),))
    assert finding.severity is Severity.WARNING, "another host"


def test_a_check_that_ran_and_found_nothing_is_named(golden):
    row = versions.Data(python="3.11.9", torch="2.15.0", nccl="2.32.3")
    run = together(
        seen(MISMATCHED.format("CUDA driver version:", "1"), size=4), seen_of(versions.CHECK, {0: row, 1: row})
    )
    (finding,) = CHECK.judge(run.of(CHECK))
    assert (finding.severity, finding.ranks) == (Severity.WARNING, (1,))
    golden(finding)


def test_a_note_that_a_log_cannot_be_read_is_mentioned(golden):
    unread = Finding(code="GPU011.unread", severity=Severity.NOTE, title="", message="")
    (finding,) = found(XID, own=(unread,))
    assert finding.severity is Severity.WARNING
    golden(finding)


def test_several_faults_are_several_findings():
    cards = [finding.evidence[KNOWN_ERROR] for finding in found("\n".join((HEALTHY, ECC, p2p(0, 1), STALL)))]
    assert cards == ["nccl-diag-ecc", "nccl-diag-data", "nccl-wqe-stall"]


def test_settings_are_a_note_and_unknown_attention_a_warning():
    settings = "h:1 NCCL DIAG [INFO] IOMMU groups: GPU and NIC groups differ on 4 pair(s) in comm 0x1; first rank 0"
    assert [finding.severity for finding in found(settings)] == [Severity.NOTE]
    assert [finding.severity for finding in found("h:1:2 [0] x.cc:1 NCCL ATTN something new")] == [Severity.WARNING]


def test_ranks_of_a_part_of_the_job_are_its_own():
    (line,) = parse_diagnostics(ECC.replace("{5}", "{0,1,...} (N=9)"), (4, 6))
    assert (line.level, line.ranks) == ("INFO", (4, 6))
    assert parse_diagnostics(ECC, (4, 6))[0].ranks == ()


@pytest.mark.parametrize(("text", "count"), [("NCCL DIAG", 0), ("NCCL DIAG [OK] x\n" * 9, 1), ("x NCCL ATTN " * 9, 1)])
def test_odd_texts_are_read_in_bounds(text, count):
    assert len(parse_diagnostics(text, range(4))) == count


def test_many_and_long_lines_are_cut():
    lines = parse_diagnostics("\n".join(f"NCCL DIAG [INFO] {number} {'x' * 9999}" for number in range(999)), range(4))
    assert (len(lines), max(len(line.text) for line in lines)) == (64, 500)


def test_without_lines_it_is_skipped():
    reason = "NCCL did not run, or is older than 2.31 and has no diagnostics"
    assert skip_text(CHECK, world_of(2)) == skip_text(CHECK, seen("")) == reason
    assert skip_text(CHECK, seen(ECC)) is None
