"""The issue forms of NCCL and PyTorch, filled in from reports, recordings and logs, and their bundle."""

import io
import json
import tarfile
from pathlib import Path

import pytest
from benches import slow
from msgspec import structs
from reports import fit, unfit
from typer.testing import CliRunner

from ddpdiag.cli.app import app
from ddpdiag.codec import indented_json
from ddpdiag.errors import UsageError
from ddpdiag.model import Report, WorldSummary
from ddpdiag.model.report import HostKind, Matrix
from ddpdiag.render.markup import draw_pieces
from ddpdiag.ticket import Kind, TicketArgs, command
from ddpdiag.ticket.bundle import bundle
from ddpdiag.ticket.forms import impact_of, nccl_form, nccl_version, pytorch_form, unanswered, warning_of
from ddpdiag.ticket.here import machine_text, output_of
from ddpdiag.ticket.job import Job, log_files, read_job

RECORDINGS = Path(__file__).parent.parent / "recordings"
HANG, P2P = RECORDINGS / "hang-4-ranks.jsonl", RECORDINGS / "p2p-broken-2-ranks.jsonl"
CRASH = RECORDINGS / "failures" / "rank_segfaults.jsonl"
SLEEP = RECORDINGS / "process_groups" / "nccl-sleep.jsonl"
HEALTHY = RECORDINGS / "healthy-2-ranks.jsonl"
LOGS = Path(__file__).parent / "nccl_logs"
NCCL_LABELS = [
    "How is this issue impacting you?",
    "Share Your Debug Logs",
    "Steps to Reproduce the Issue",
    "NCCL Version",
    "Your platform details",
    "Error Message & Behavior",
]
SECRET = "hunter2hunter2"


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """This host is none of the recorded ones."""
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")


def form(kind: str, *words: object) -> str:
    """What the command prints on standard output."""
    done = CliRunner().invoke(app, ["ticket", kind, *map(str, words)])
    assert done.exit_code == 0, done.exception
    return done.stdout


def written(path: Path, report: Report) -> Path:
    path.write_text(indented_json(report))
    return path


def form_of(*reports: Report, fill=nccl_form, attached="", **evidence: object) -> list[str]:
    """The lines of a form about reports and other evidence."""
    pieces = draw_pieces(fill(Job(reports=reports, **evidence), attached))
    return [line for piece in pieces for line in piece.lines]


@pytest.mark.parametrize("kind", ["nccl", "pytorch"])
@pytest.mark.parametrize("run", [SLEEP, P2P, CRASH], ids=lambda path: path.stem)
def test_the_form_of_a_recording(golden, kind, run):
    golden(form(kind, run))


@pytest.mark.parametrize(
    ("kind", "labels"),
    [("nccl", NCCL_LABELS), ("pytorch", ["🐛 Describe the bug", "Versions"])],
    ids=["nccl", "pytorch"],
)
def test_the_sections_are_the_fields_of_the_form(kind, labels):
    assert [line[4:] for line in form(kind, HANG).splitlines() if line.startswith("#")] == labels


@pytest.mark.parametrize(
    ("recording", "impact"),
    [
        (HANG, "Application hang"),
        (P2P, "Application hang"),
        (CRASH, "Application crash"),
        (RECORDINGS / "failures" / "values_corrupt.jsonl", "Data corruption"),
        (RECORDINGS / "slow-host-3-ranks.jsonl", "Lower performance than expected"),
        (HEALTHY, None),
    ],
    ids=lambda value: value.stem if isinstance(value, Path) else "",
)
def test_the_impact_is_that_of_the_findings(recording, impact):
    assert impact_of(read_job([str(recording)], [])) == impact


@pytest.mark.parametrize(
    ("recording", "end"),
    [
        (SLEEP, ""),
        (HANG, "the run used gloo."),
        (RECORDINGS / "eight-gpus.jsonl", "it has HST001.oversubscribed, HST002.short."),
        (HEALTHY, "ddpdiag found no problem, so there is nothing to report."),
    ],
    ids=lambda value: value.stem if isinstance(value, Path) else "",
)
def test_a_form_of_nccl_warns_if_no_finding_involves_nccl(recording, end):
    job = read_job([str(recording)], [])
    sentence = warning_of(job, Kind.NCCL)
    assert sentence == (f"No finding of this run involves NCCL; {end}" if end else "")
    assert warning_of(job, Kind.PYTORCH) == ""
    assert warning_of(structs.replace(job, logs={"a": "n0:1:1 [0] NCCL WARN x"}), Kind.NCCL) == ""
    done = CliRunner().invoke(app, ["ticket", "nccl", str(recording)])
    assert sentence in done.stderr
    assert done.stdout.startswith(sentence or "**Title:** `[Issue]: rank 1")
    assert "required, and not answered: " in done.stderr


def test_required_fields_without_an_answer_are_listed():
    job = read_job([str(SLEEP)], [])
    assert unanswered(job, Kind.NCCL) == ["NCCL Version"]
    assert unanswered(job, Kind.PYTORCH) == ["Versions"]
    assert unanswered(Job(), Kind.NCCL) == ["Title", "How is this issue impacting you?", "NCCL Version"]


@pytest.mark.parametrize(
    ("recording", "sentences"),
    [
        (SLEEP, ["COL001: 1 of 1 trial over NCCL failed (hung on ranks 0-1); gloo passed (1 trial)."]),
        (CRASH, ["COL001: 1 of 1 trial over gloo failed (died on rank 2; raised on ranks 0-1,3)."]),
        (RECORDINGS / "failures" / "host_missing.jsonl", []),
    ],
    ids=lambda value: value.stem if isinstance(value, Path) else "",
)
def test_failed_trials_are_counted_for_each_backend(recording, sentences):
    lead = "**Intermittency:** "
    lines = [line for line in form("nccl", recording).splitlines() if line.startswith(lead)]
    assert lines == [lead + sentence for sentence in sentences]


def test_checks_of_the_run_are_not_selected():
    steps = next(
        line for line in form("nccl", RECORDINGS / "failures" / "host_missing.jsonl").splitlines() if "-m" in line
    )
    assert "--select" not in steps


@pytest.mark.parametrize(
    ("output", "source"),
    [("killed by SIGSEGV", "rank-1.txt"), ("Fatal Python error: x", "rank-3.txt")],
    ids=["of a peer", "of the blamed rank"],
)
def test_the_first_traceback_is_shown(output, source):
    logs = {"rank-1.txt": "Traceback (most recent call last):\nx", "rank-3.txt": output}
    died = structs.replace(Job(reports=(unfit(),)).findings[0], code="RUN003.died")
    lines = form_of(unfit(findings=(died,)), fill=pytorch_form, logs=logs)
    assert f"**First Traceback (in {source}):**" in lines
    assert any("PYTHONFAULTHANDLER=1" in line for line in lines) == (source == "rank-1.txt")


def test_what_is_attached_is_said():
    logs = {"ncclSystem.txt": '<system version="1">', "rank-0.txt": "x"}
    lines = form_of(fit(), attached="t.tar.gz", logs=logs, outputs={"a": None, "b": "x", "c": "y"})
    contents = "1 ddpdiag report, 1 topology file, 1 log, 2 command outputs; no NCCL log"
    assert f"**Attached:** t.tar.gz ({contents})" in lines
    assert "- ncclSystem.txt: topology (NCCL\\_TOPO\\_DUMP\\_FILE)" in lines
    assert "; no NCCL log" not in "".join(form_of(attached="t", logs={"a": "NCCL INFO x"}))


def test_a_json_report_fills_in_the_form(golden, tmp_path):
    parts = {"GPU": "2 x NVIDIA H100", "driver": "580.95.05", "torch": "2.13.0", "CUDA": "12.8", "NCCL": "2.27.7"}
    names = ("GPU 0", "GPU 1")
    cells = (("X", "NV18"), ("NV18", "X"))
    report = unfit(
        world=WorldSummary(size=4, hosts=("n0", "n1"), launcher="slurm", backend="nccl"),
        inventory=(HostKind(hosts=("n0", "n1"), parts=parts),),
        matrices=(Matrix(name="p2p.topology.n0", title="paths", rows=names, columns=names, cells=cells),),
        workarounds={"NCCL_P2P_DISABLE": "1"},
    )
    golden(form("nccl", written(tmp_path / "report.json", report)))


def test_a_benchmark_is_repeated_with_its_sizes():
    steps = next(line for line in form_of(slow()) if line.startswith("torchrun"))
    assert steps.endswith("ddpdiag allreduce-bench -b 8 -e 134217728 -f 4 --collective all_reduce -d float")


def test_the_earliest_warning_of_the_logs_is_the_first_error(tmp_path):
    (tmp_path / "a.log").write_text(
        "[2026-01-01 10:00:02] n0:1:1 [0] init.cc:1 NCCL WARN late\nNCCL version 2.27.1+cuda12.8"
    )
    (tmp_path / "b.log").write_text("x\n[2026-01-01 10:00:01] n1:1:1 [0] net.cc:1 NCCL WARN early\nNCCL WARN next\n")
    (tmp_path / "c.log").write_text("quiet\n")
    job = read_job([], log_files([str(tmp_path)]))
    assert [(name, line[-5:].strip()) for name, line in job.warnings.items()] == [("b.log", "early"), ("a.log", "late")]
    assert nccl_version(job) == "2.27.1+cuda12.8"


@pytest.mark.parametrize(
    ("nccl", "cuda", "version"),
    [("2.27.7", "12.8", "2.27.7+cuda12.8"), ("none", "12.8", ""), ("unknown", "unknown", "")],
)
def test_the_version_of_a_report_has_its_cuda(nccl, cuda, version):
    report = fit(inventory=(HostKind(hosts=("n0",), parts={"NCCL": nccl, "CUDA": cuda}),))
    assert nccl_version(Job(reports=(report,))) == version


def test_a_pattern_of_nccl_names_its_logs(tmp_path):
    for name in ("nccl.n0.1", "nccl.n1.2", "other"):
        (tmp_path / name).write_text("x")
    assert [*read_job([], log_files([str(tmp_path / "nccl.%h.%p")])).logs] == ["nccl.n0.1", "nccl.n1.2"]


def test_of_a_long_log_both_ends_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr("ddpdiag.ticket.job._MAX_END_BYTES", 4)
    (tmp_path / "log").write_text("headXXXtail")
    assert read_job([], [str(tmp_path / "log")]).logs == {"log": "head\n... 3 bytes are left out ...\ntail"}


def test_the_bundle_has_the_evidence_and_no_secret(tmp_path):
    recording = tmp_path / "run.jsonl"
    recording.write_text(HANG.read_text().replace("hrtimer_nanosleep", f"PGPASSWORD={SECRET}"))
    (tmp_path / "rank0.log").write_text(f"API_TOKEN={SECRET} n0 NCCL WARN no\n")
    target = tmp_path / "ticket.tar.gz"
    words = (recording, "--log", tmp_path / "rank0.log", "--write-bundle", target)
    assert SECRET not in form("nccl", *words)
    with tarfile.open(target) as tar:
        contents = {member.name: tar.extractfile(member).read() for member in tar.getmembers()}
        assert {(member.mtime, member.uid, member.uname) for member in tar.getmembers()} == {(0, 0, "")}
    names = ["form.md", "logs/rank0.log", "recording-0.jsonl", "report-0.json"]
    assert sorted(contents) == [f"ddpdiag-ticket/{name}" for name in names]
    assert not any(SECRET.encode() in content for content in contents.values())
    assert json.loads(contents["ddpdiag-ticket/report-0.json"])["verdict"] == "unfit"
    first = target.read_bytes()
    form("nccl", *words)
    assert target.read_bytes() == first


def test_a_variable_with_a_secret_is_hidden():
    report = structs.replace(fit(), measurements={"AWS_SECRET_ACCESS_KEY": SECRET})
    with tarfile.open(fileobj=io.BytesIO(bundle(Job(reports=(report,)), ""))) as tar:
        assert SECRET.encode() not in tar.extractfile("ddpdiag-ticket/report-0.json").read()


def other_job(path: Path) -> Path:
    world = WorldSummary(size=2, hosts=("far",), launcher="torchrun", backend="nccl")
    return written(path, fit(run_id="other", world=world))


def test_wrong_files_are_refused_in_one_sentence(golden, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(Path("report.json"), fit())
    other_job(Path("other.json"))
    Path("cut.json").write_text(indented_json(fit())[:100])
    Path("schema.json").write_text('{"schema": "ddpdiag.report/9"}')
    sentences = []
    for words in (
        "gone.json", "cut.json", "schema.json", "report.json other.json", "report.json --log gone.log",
        "report.json --write-bundle report.json", "--log . --write-bundle cut.json", "--write-bundle -",
        "--write-bundle /nowhere/x.tar.gz",
    ):  # fmt: skip
        error = CliRunner().invoke(app, ["ticket", "nccl", *words.split()]).exception
        assert isinstance(error, UsageError), error
        sentences.append(str(error))
    golden("\n".join(sentences))


def test_the_report_of_a_single_host_joins_that_of_its_job(tmp_path):
    alone = fit(run_id="alone", world=WorldSummary(size=1, hosts=("n1",), launcher="alone", backend="gloo"))
    paths = [written(tmp_path / "host.json", alone), written(tmp_path / "report.json", unfit())]
    job = read_job([*map(str, paths)], [])
    assert ([report.run_id for report in job.reports], len(job.runs)) == (["3f9c2a", "alone"], 1)


def test_a_recording_and_the_report_of_its_run_are_one_run(tmp_path):
    report = read_job([str(HANG)], []).reports[0]
    job = read_job([str(HANG), str(written(tmp_path / "report.json", report))], [])
    assert (len(job.reports), len(job.recordings)) == (1, 1)


def test_without_a_report_this_host_fills_in_the_form(golden, monkeypatch):
    here = structs.replace(fit(), world=WorldSummary(size=1, hosts=("elsewhere",), launcher="alone", backend="gloo"))
    outputs = {"nvidia-smi": "NVIDIA-SMI 580", "nvidia-smi topo -m": "GPU0 X NV18"}
    monkeypatch.setattr(command, "host_report", lambda: here)
    monkeypatch.setattr(command, "output_of", lambda words, _seconds: outputs.get(" ".join(words)))
    monkeypatch.setattr(command, "machine_text", lambda _env: "container (Docker)")
    golden(form("nccl"))


def test_a_command_that_fails_or_is_missing_says_so():
    assert output_of(["no-such-command"], 1.0) is None
    assert output_of(["sh", "-c", "echo NVIDIA-SMI has failed; exit 9"], 10.0) == "NVIDIA-SMI has failed\nexit code 9"
    assert output_of(["sleep", "60"], 0.1) == "It did not end within 0 s."


def test_a_machine_is_described(tmp_path):
    for path, text in {
        ".dockerenv": "",
        "proc/cpuinfo": "flags : fpu hypervisor\n",
        "sys/class/dmi/id/sys_vendor": "Amazon EC2\n",
        "sys/class/dmi/id/product_name": "p5.48xlarge\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    env = {"DDPDIAG_PROCFS": str(tmp_path / "proc"), "DDPDIAG_SYSFS": str(tmp_path / "sys")}
    assert machine_text(env, tmp_path) == "container (Docker); virtual machine (Amazon EC2 p5.48xlarge)"
    assert machine_text({**env, "DDPDIAG_PROCFS": "/none", "DDPDIAG_SYSFS": "/none"}, Path("/none")) == (
        "no sign of a container; no sign of a virtual machine"
    )


@pytest.mark.parametrize("words", [[], ["ncl"]], ids=["none", "typo"])
def test_the_two_kinds_are_named_if_none_is_given(words):
    done = CliRunner().invoke(app, ["ticket", *words])
    assert done.exit_code == 2
    assert "nccl" in done.output
    assert "pytorch" in done.output


def test_quiet_prints_only_the_form(capsys):
    assert command.run(Kind.PYTORCH, [str(HANG)], TicketArgs(quiet=True)) == 0
    assert capsys.readouterr().err == ""
