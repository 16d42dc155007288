"""Reports made by hand: four ranks on two hosts, as `check` would leave them."""

from collections.abc import Sequence

from msgspec import structs
from seen import made_check

from ddpdiag.checks.api import Stage
from ddpdiag.checks.findings import COMMON, FindingSpec
from ddpdiag.checks.registry import check_by_code
from ddpdiag.judgement.check_judgements import CheckJudgement
from ddpdiag.model import CheckSummary, Finding, Report, Scalar, Severity, StageSummary, Verdict, WorldSummary
from ddpdiag.render.terminal import render

NO_GPU = "no NVIDIA GPU on any host"


def rank_row(rank: int, *, slow: float = 1.0, ranks_per_node: int = 2, **columns: Scalar) -> dict[str, Scalar]:
    """A rank's row; `slow` times slower than usual."""
    node, local_rank = divmod(rank, ranks_per_node)
    return {
        "rank": rank,
        "local_rank": local_rank,
        "host": f"n{node}",
        "gpu_uuid": None,
        "busbw_bytes_per_s": (1.07e9 + rank * 3e6) / slow,
        "latency_seconds": (181e-6 + rank * 2e-6) * slow,
        "samples_per_second": 2140.0 / slow,
        "data_seconds": 0.0021,
        "forward_seconds": 0.0113 * slow,
        "backward_seconds": 0.0249,
        "optimizer_seconds": 0.0013,
        **columns,
    }


def plain(report: Report, *, width: int = 80, details: bool = False) -> str:
    """The report for people, without colours."""
    return render(report, color=False, width=width, details=details)


def finding_of(severity: Severity = Severity.ERROR, **fields: object) -> Finding:
    """A finding with little in it."""
    plain = Finding(code="COL001.slow", severity=severity, title="a title", message="a message")
    return structs.replace(plain, **fields)


def judged_of(findings: Sequence[Finding]) -> list[CheckJudgement]:
    """All of these as if COL001 had made them; what their own check does not declare ("COL001.slow") is made up."""
    words = {finding.code.partition(".")[2]: check_by_code(finding.code) for finding in findings}
    declared = {word: {**COMMON, **check.findings}.get(word, FindingSpec("")) for word, check in words.items()}
    check = made_check("COL001", stage=Stage.COLLECTIVE, FINDINGS=declared)
    return [CheckJudgement(check=check, findings=tuple(findings))]


def stage(name: str, status: str = "done", seconds: float = 0.4) -> StageSummary:
    """A stage that ran well."""
    return StageSummary(name=name, status=status, seconds=seconds)


def check(code: str, name: str, stage: str, skipped_because: str | None = None, **statuses: int) -> CheckSummary:
    """A check that was done on four ranks, unless said otherwise."""
    done = {} if skipped_because else {"done": 4}
    return CheckSummary(code=code, name=name, stage=stage, statuses=statuses or done, skipped_because=skipped_because)


def fit(**fields: object) -> Report:
    """A run in which all went well, on hosts without GPUs."""
    report = Report(
        verdict=Verdict.FIT,
        sentence="4 ranks on 2 hosts can train with DistributedDataParallel over gloo, at 8,560 samples a second.",
        exit_code=0,
        seconds=7.912,
        budget_seconds=120.0,
        run_id="3f9c2a",
        world=WorldSummary(size=4, hosts=("n0", "n1"), launcher="torchrun", backend="gloo"),
        ranks=tuple(rank_row(rank) for rank in range(4)),
        stages=(
            stage("launch", seconds=0.05),
            stage("host", seconds=0.31),
            stage("gpu", "skipped", 0.0),
            stage("rendezvous", seconds=0.42),
            stage("collective", seconds=3.18),
            stage("training", seconds=3.46),
        ),
        checks=(
            check("LCH001", "world", "launch"),
            check("HST001", "memory", "host"),
            check("HST002", "threads", "host"),
            check("GPU001", "visible", "gpu", NO_GPU),
            check("GPU004", "pcie-link", "gpu", NO_GPU),
            check("RDZ001", "env", "rendezvous"),
            check("COL001", "all-reduce", "collective"),
            check("COL003", "nccl-against-gloo", "collective", NO_GPU),
            check("TRN001", "ddp", "training"),
        ),
        findings=(),
        measurements={"allreduce_bytes": 67108864, "import_seconds": 2.31},
    )
    return structs.replace(report, **fields)


SLOW = Finding(
    code="COL001.slow",
    severity=Severity.ERROR,
    title="Rank 3 slows every all-reduce",
    message="Rank 3 on n1 reaches 0.21 GB/s at 64 MiB; the median of its peers is 1.07 GB/s (same run, same size).",
    ranks=(3,),
    hosts=("n1",),
    links=("n0 -> n1",),
    evidence={
        "busbw_bytes_per_s": 2.1e8,
        "expected_bytes_per_s": 1.07e9,
        "size_bytes": 67108864,
        "source": "median of ranks 0-2",
    },
    fix="Compare `ethtool eth0` on n0 and n1, then exclude n1: srun --exclude=n1 ...",
    env={"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "eth1,ib0"},
)

THREADS = Finding(
    code="HST002.many",
    severity=Severity.WARNING,
    title="More threads than cores",
    message="OMP_NUM_THREADS is not set: 2 ranks with 64 threads each share 64 cores on n0 and n1.",
    hosts=("n0", "n1"),
    evidence={"threads": 128, "cores": 64},
    fix="Set the number of threads to the number of cores by rank.",
    env={"OMP_NUM_THREADS": "32"},
)

IMPORT = Finding(
    code="TRN001.step",
    severity=Severity.NOTE,
    title="Where a step goes",
    message="63 % of a step is backward, of which all-reduce hides 80 %.",
    evidence={"backward_share": 0.63, "hidden_share": 0.8},
)


def unfit(**fields: object) -> Report:
    """A run in which rank 3 is slow."""
    report = fit(
        verdict=Verdict.UNFIT,
        exit_code=1,
        sentence="Rank 3 on n1 slows all 4 ranks to a fifth; leave n1 out, or mend the link n0 -> n1.",
        ranks=(*(rank_row(rank) for rank in range(3)), rank_row(3, slow=5.1)),
        findings=(IMPORT, THREADS, SLOW),
    )
    return structs.replace(report, **fields)


HUNG = Finding(
    code="RUN003.hung",
    severity=Severity.ERROR,
    title="The rendezvous hung",
    message="2 of 4 ranks came to the store at n0:29500 and waited 30 s for the others; two hosts cannot say who.",
    evidence={"came": [0, 1], "waited_seconds": 30.0, "first_seconds": None},
    fix="Try with a third host, or open port 29500 between n0 and n1.",
)


def unknown(**fields: object) -> Report:
    """A run that could not see enough."""
    because = "RDZ001 did not go well"
    report = fit(
        verdict=Verdict.UNKNOWN,
        exit_code=3,
        seconds=34.2,
        sentence="The ranks never met, so nothing is known about collectives and training.",
        ranks=tuple({"rank": rank, "local_rank": rank % 2, "host": f"n{rank // 2}"} for rank in range(4)),
        stages=(
            stage("launch", seconds=0.05),
            stage("host", seconds=0.31),
            stage("rendezvous", "hung", 30.02),
            stage("collective", "skipped", 0.0),
            stage("training", "skipped", 0.0),
        ),
        checks=(
            check("LCH001", "world", "launch"),
            check("HST001", "memory", "host"),
            check("RDZ001", "env", "rendezvous", done=1, hung=2, unheard=1),
            check("COL001", "all-reduce", "collective", because),
            check("TRN001", "ddp", "training", because),
        ),
        findings=(HUNG,),
        measurements={},
        recording_problems=("rank-2.jsonl is cut off in line 17; what comes before it was judged",),
    )
    return structs.replace(report, **fields)
