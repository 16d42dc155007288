"""Steps of a real Slurm, as they were meant and as they were not."""

import json
import re
import sys
from pathlib import Path

import pytest
from jobs import accused

pytestmark = pytest.mark.slurm

TORCHRUN = f"{sys.executable} -m torch.distributed.run"
FOUR = ("-N4", "--ntasks-per-node=2")


def report_of(cluster, name="report.json"):
    return json.loads((cluster.shared / name).read_text())


def codes(report, *severities):
    return {f["code"] for f in report["findings"] if f["severity"] in (severities or ("error", "warning"))}


@pytest.mark.deep
def test_a_step_on_the_last_two_of_four_nodes_is_told_from_its_job(cluster):
    four = cluster(4)
    check = "ddpdiag check --select LCH001,LCH004,RDZ002 --json report.json"
    ended = four.wait(four.sbatch(f"srun -N2 -n4 -r2 {check}", *FOUR, "-t", "5"))
    report = report_of(four)
    assert (ended.exit_code, codes(report)) == (0, set()), ended.output
    assert [(row["rank"], row["host"]) for row in report["ranks"]] == [(0, "h2"), (1, "h2"), (2, "h3"), (3, "h3")]
    # No key file and no DDPDIAG_TOKEN: the secret came by munge.
    assert "LCH001.unauthenticated" not in codes(report, "note")
    step = {name: report["measurements"][f"slurm.{name}"] for name in ("tasks", "hosts")}
    assert step == {"tasks": 4, "hosts": 2}
    # 22.05 has no SLURM_JOB_END_TIME: slurmctld was asked.
    assert 100 < report["measurements"]["slurm.left_seconds"] <= 300


@pytest.mark.deep
def test_hosts_that_call_themselves_otherwise_have_the_names_that_slurm_takes(cluster):
    four = cluster(4)
    check = "ddpdiag check --select GPU001 --expect-gpus 1 --write-failing-hosts bad --json report.json"
    renamed = f"unshare --uts sh -c 'hostname $(hostname).cluster.example && exec {check}'"
    ended = four.wait(four.sbatch(f"srun -N2 -n2 -r2 {renamed}", *FOUR))
    assert (ended.exit_code, report_of(four)["world"]["hosts"]) == (1, ["h2", "h3"]), ended.output
    assert "srun --exclude='h[2-3]'" in ended.output
    assert (four.shared / "bad").read_text() == "h2\nh3\n"
    assert sorted(four.srun("-N2", "-x", "./bad", "hostname").stdout.split()) == ["h0", "h1"]
    assert four.srun("-x", "h2.cluster.example", "hostname").returncode != 0


# The gate of test_slurm_recipes.py trains with a torchrun on each host of a step; how it is judged: test_lch004.py.
@pytest.mark.deep
def test_torchrun_inside_srun_is_one_world_of_the_step(cluster):
    four = cluster(4)
    rendezvous = "--rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID --rdzv-endpoint=h2:29555"
    agents = f"{TORCHRUN} --nnodes=2 --nproc-per-node=2 {rendezvous}"
    check = "-m ddpdiag check --select LCH001,LCH004 --json report.json"
    ended = four.wait(four.sbatch(f"srun -N2 -n2 -r2 {agents} {check}", *FOUR))
    report = report_of(four)
    assert (ended.exit_code, codes(report)) == (0, set()), ended.output
    assert report["world"]["size"] == 4
    assert sorted(report["world"]["hosts"]) == ["h2", "h3"]
    assert (report["measurements"]["slurm.tasks"], report["measurements"]["slurm.hosts"]) == (2, 2)


@pytest.mark.deep
def test_a_torchrun_in_every_task_is_named(cluster):
    four = cluster(4)
    check = "-m ddpdiag check --select LCH001,LCH004 --json report-$SLURM_PROCID.json"
    script = f"srun -N1 -n2 bash -c '{TORCHRUN} --standalone --nproc-per-node=1 {check}'"
    ended = four.wait(four.sbatch(script, *FOUR))
    assert ended.exit_code == 1, ended.output
    for rank in range(2):
        report = report_of(four, f"report-{rank}.json")
        (finding,) = (own for own in report["findings"] if own["severity"] in ("error", "warning"))
        assert finding["code"] == "LCH004.torchruns", ended.output
        assert finding["evidence"] == {"tasks": 2, "hosts": 1, "torchruns_that_met": 1}


def test_the_jobs_first_node_is_no_master_of_a_step_elsewhere(cluster):
    four = cluster(4)
    usual = 'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
    ended = four.wait(four.sbatch(f"{usual}\nsrun -N2 -n2 -r2 ddpdiag check", *FOUR))
    assert ended.exit_code == 2, ended.output
    told = [line for line in ended.output.splitlines() if line.startswith("ddpdiag: ")]
    assert len(told) == 2, ended.output
    assert all("MASTER_ADDR=h0 " in line and " h2," in line for line in told)


def test_the_line_that_a_batch_script_is_told_tests_the_whole_job_in_the_time_that_is_left(cluster):
    four = cluster(4)
    told = four.wait(four.sbatch("ddpdiag check --select LCH004", *FOUR, "--cpus-per-task=2"))
    line = re.search(r"srun .* ddpdiag check$", told.output, re.MULTILINE)
    assert line, told.output
    check = f"{line[0]} --select LCH001,LCH004 --budget 300 --json report.json"
    ended = four.wait(four.sbatch(check, *FOUR, "--cpus-per-task=2", "-t", "2"))
    report = report_of(four)
    assert (ended.exit_code, codes(report)) == (0, {"LCH004.time-left"}), ended.output
    assert 30 < report["budget_seconds"] <= 115
    assert report["seconds"] < report["budget_seconds"]
    assert (report["world"]["size"], report["world"]["hosts"]) == (8, ["h0", "h1", "h2", "h3"])


# So do two jobs at once in test_slurm_recipes.py, one of them with a bad host.
@pytest.mark.deep
def test_two_jobs_on_the_same_hosts_do_not_meet(cluster):
    four = cluster(4)
    check = "srun ddpdiag check --select LCH001,LCH004,RDZ003 --json report-$SLURM_JOB_ID.json"
    jobs = [four.sbatch(check, "-N2", "-n4", "--ntasks-per-node=2", "-w", "h0,h1") for _ in range(2)]
    for job in jobs:
        ended = four.wait(job)
        report = report_of(four, f"report-{job}.json")
        assert (ended.exit_code, codes(report)) == (0, set()), ended.output
        assert len(report["ranks"]) == 4


@pytest.mark.deep
def test_a_cancelled_step_leaves_its_report_and_its_files(cluster, tmp_path):
    four = cluster(4)
    files = "--json report.json --record run.jsonl --prometheus run.prom"
    reached = four.shared / "reached"
    # exec: else Slurm ends the script's shell, and srun with it, before srun has passed on what the ranks print.
    srun = f"exec srun -N2 -n2 ddpdiag check --select LCH004,COL001 {files}"
    tell = f"(until test -e {reached}; do sleep 0.1; done; echo under way) &"
    # Rank 1 never enters a collective, so the run is in the middle of it for a while.
    hangs = {"DDPDIAG_TEST_FAULT": "sleep 1", "DDPDIAG_TEST_REACHED": str(reached), "TMPDIR": str(tmp_path)}
    job = four.sbatch(f"{tell}\n{srun}", "-N2", "-n2", **hangs)
    four.wait_for_output(job, "under way")
    four.call("scancel", job)  # as at the time limit: SIGTERM, and SIGKILL after KillWait, here 2 s
    ended = four.wait(job)
    assert ended.state == "CANCELLED"
    report = report_of(four)
    assert (report["verdict"], report["exit_code"]) == ("unknown", 143), four.told(job)
    assert "RUN004.told" in codes(report)
    assert '"type":"end"' in (four.shared / "run.jsonl").read_text()
    assert "ddpdiag_run_exit_code 143.0" in (four.shared / "run.prom").read_text()
    assert "UNKNOWN:" in ended.output
    assert not list(Path(tmp_path).glob("ddpdiag-*")), "no scratch folder stays"


@pytest.mark.long
@pytest.mark.parametrize("lines", range(1, 20, 2))
def test_a_step_that_is_cancelled_at_any_moment_blames_no_rank(cluster, tmp_path, lines):
    four = cluster(4)
    record = f"{tmp_path}/ddpdiag-*/rank-0.jsonl"
    tell = f"(until test $(cat {record} 2>/dev/null | wc -l) -ge {lines}; do sleep 0.02; done; echo under way) &"
    check = "exec srun -N3 -n3 ddpdiag check --stage rendezvous,fabric --json report.json"
    job = four.sbatch(f"{tell}\n{check}", "-N3", "-n3", TMPDIR=str(tmp_path))
    four.wait_for_output(job, "under way")
    four.call("scancel", job)
    assert four.wait(job).state == "CANCELLED"
    report = report_of(four)
    assert (report["exit_code"], accused(report)) == (143, set()), four.told(job)


# Whom the layout of a step names is judged in test_run_checks.py.
@pytest.mark.deep
def test_the_node_of_a_task_that_never_came_is_named(cluster, tmp_path):
    four = cluster(4)
    check = "ddpdiag check --select LCH001,LCH004 --join-timeout 3 --json report.json"
    job = four.sbatch(
        f"echo ready; until test -e {tmp_path}/go; do sleep 0.1; done; srun {check}", "-N4", "-n4", TMPDIR=str(tmp_path)
    )
    four.wait_for_output(job, "ready")
    four.kill_slurmd("h3")
    (tmp_path / "go").touch()
    four.wait_for_output(job, "RUN001.absent")  # the job itself ends once Slurm misses the node
    (finding,) = (f for f in report_of(four)["findings"] if f["code"] == "RUN001.absent")
    assert (finding["ranks"], finding["hosts"]) == ([3], ["h3"])


PREFLIGHT = """\
import os, sys
import ddpdiag

if os.environ["SLURM_PROCID"] in sys.argv:
    os.environ["GLOO_SOCKET_IFNAME"] = "nonexistent"
try:
    print("one task:", ddpdiag.preflight(budget=60, select=["LCH001", "RDZ001", "COL001"]))
except ddpdiag.UnfitError as error:
    print("one task raised", error)
"""


@pytest.mark.deep
@pytest.mark.parametrize("shape", [("-N2", "-n4"), ("-N2", "--ntasks-per-node=1")], ids=["4 tasks", "2 tasks"])
def test_a_script_under_srun_checks_its_step(cluster, shape):
    two = cluster(2)
    (two.shared / "train.py").write_text(PREFLIGHT)
    fit = two.srun(*shape, sys.executable, "train.py")
    sick = two.srun(*shape, sys.executable, "train.py", "1")
    tasks = 4 if "-n4" in shape else 2
    assert fit.stdout.count("one task: FIT: ") == tasks, fit.stdout + fit.stderr
    assert f"FIT: {tasks} ranks on 2 hosts" in fit.stdout
    assert sick.stdout.count(f"raised UNFIT: {tasks} ranks on 2 hosts cannot train: rank 1 on ") == tasks, sick.stdout
