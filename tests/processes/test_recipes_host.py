"""Recipes for one host: Prolog, TaskProlog, NHC, node-exporter, a CI service. Run as whoever starts them would."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from jobs import Start

from recipes import BASH, RECIPES, SCRIPTS, changed

TRAIN = """\
import os
import sys

print(f"rank {os.environ['RANK']} trained with {sys.argv[1:]}")
"""
LACKS_GPUS = ("(--budget 10)", "(--budget 10 --expect-gpus 8)")


def run(script: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """As slurmd runs it: no PATH, no HOME, in the root directory."""
    return subprocess.run([script], env=variables, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True)


SAYS_FIT = "#!/bin/sh\necho 'FIT: host n3 can train; 1 warning.'\nexit 1\n"


@pytest.mark.parametrize(
    ("changes", "variables"),
    [
        ((), {}),
        *(((LACKS_GPUS,), {name: "night run DDPDIAG_SKIP=1"}) for name in ("SLURM_JOB_COMMENT", "SLURM_JOB_EXTRA")),
    ],
    ids=["fit", "comment", "extra"],
)
def test_a_prolog_is_silent_on_a_fit_node_and_left_out_by_a_job(tmp_path: Path, changes, variables) -> None:
    done = run(changed("slurm-prolog.sh", tmp_path, *changes), SLURM_JOB_ID="7", **variables)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_prolog_drains_an_unfit_node_and_says_why_and_strictly_for_a_warning_too(tmp_path: Path) -> None:
    done = run(changed("slurm-prolog.sh", tmp_path, LACKS_GPUS), SLURM_JOB_ID="7", SLURMD_NODENAME="n3")
    assert done.returncode == 1
    assert {"1", "n3,", "7:"} <= {*done.stderr.splitlines()[0].split()}
    assert "--expect-gpus" in done.stderr
    said = tmp_path / "ddpdiag"
    said.write_text(SAYS_FIT)
    said.chmod(0o755)
    assert run(changed("slurm-prolog.sh", tmp_path, (str(SCRIPTS / "ddpdiag"), str(said)))).returncode == 1


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        (LACKS_GPUS[0], "(--budget)", "2"),
        (LACKS_GPUS[0], "(--json /nowhere/report.json)", "2"),
        (str(SCRIPTS / "ddpdiag"), "/nowhere/ddpdiag", "127"),
    ],
    ids=["no value", "no such directory", "no such program"],
)
def test_a_prolog_drains_nothing_for_its_own_mistakes(tmp_path: Path, old: str, new: str, code: str) -> None:
    done = run(changed("slurm-prolog.sh", tmp_path, (old, new)))
    assert done.returncode == 0
    assert code in done.stderr.splitlines()[0].split()


def broken(folder: Path) -> tuple[str, str]:
    """The change to an installation half of which is gone: Python leaves with 1, as an unfit host does."""
    program = folder / "ddpdiag"
    program.write_text(f"#!{sys.executable}\nfrom ddpdiag_that_is_gone.cli import main\n")
    program.chmod(0o755)
    return str(SCRIPTS / "ddpdiag"), str(program)


def test_a_broken_installation_drains_nothing(tmp_path: Path) -> None:
    done = run(changed("slurm-prolog.sh", tmp_path, broken(tmp_path)))
    assert done.returncode == 0
    assert "1" in done.stderr.splitlines()[0].split()
    assert "No module named 'ddpdiag_that_is_gone'" in done.stderr
    told = run(changed("slurm-task-prolog.sh", tmp_path, broken(tmp_path)))
    assert "export DDPDIAG_HOST=unknown\n" in told.stdout
    assert nhc(changed("nhc.conf", tmp_path, broken(tmp_path))) == 0
    (tmp_path / "ddpdiag.prom").write_text("of an hour ago\n")
    assert run(changed("node-exporter.sh", tmp_path, broken(tmp_path)), DIRECTORY=str(tmp_path)).returncode == 1


def test_a_task_prolog_prints_the_sentence_and_sets_a_variable(tmp_path: Path) -> None:
    done = run(changed("slurm-task-prolog.sh", tmp_path), SLURM_LOCALID="0")
    export, *lines = done.stdout.splitlines()
    assert (done.returncode, export) == (0, "export DDPDIAG_HOST=fit")
    assert lines[0].startswith("print FIT: host ")
    assert all(line.startswith("print ") for line in lines)


def test_a_task_prolog_shows_the_whole_report_of_an_unfit_node_and_lets_the_task_run(tmp_path: Path) -> None:
    done = run(changed("slurm-task-prolog.sh", tmp_path, LACKS_GPUS), PATH="/nowhere")
    assert (done.returncode, done.stderr) == (0, "")
    assert "export DDPDIAG_HOST=unfit\n" in done.stdout
    assert "print error GPU001.fewer" in done.stdout


def test_a_task_prolog_does_not_run_with_the_python_of_the_task(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise ImportError('the one of the job')\n")
    done = run(changed("slurm-task-prolog.sh", tmp_path), PYTHONPATH=str(tmp_path), PYTHONHOME="/nowhere")
    assert done.stdout.startswith("export DDPDIAG_HOST=fit\n")


@pytest.mark.parametrize("variables", [{"SLURM_LOCALID": "1"}, {"DDPDIAG_SKIP": "1"}])
def test_a_task_prolog_speaks_once_on_each_node_and_can_be_left_out(tmp_path: Path, variables: dict[str, str]) -> None:
    done = run(changed("slurm-task-prolog.sh", tmp_path), **variables)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize(("options", "code"), [("", 0), (" --expect-gpus 8", 1), (" --no-such-option", 0)])
def test_nhc_takes_only_an_unfit_node_for_a_failure(tmp_path: Path, options: str, code: int) -> None:
    conf = changed("nhc.conf", tmp_path, ("--budget 10", f"--budget 10{options}"))
    assert nhc(conf) == code


def nhc(conf: Path) -> int:
    """NHC evaluates what stands right of ||; its own function takes these options and compares exit codes."""
    (line,) = [line for line in conf.read_text().splitlines() if not line.startswith("#")]
    script = 'check_cmd_status() { shift 4; "$@"; }\n' + line.partition("||")[2]
    return subprocess.run(["bash", "-c", script], capture_output=True).returncode


def test_node_exporter_gets_metrics_that_it_may_read(tmp_path: Path) -> None:
    done = run(changed("node-exporter.sh", tmp_path), DIRECTORY=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    metrics = tmp_path / "ddpdiag.prom"
    assert metrics.stat().st_mode & 0o777 == 0o644
    assert "ddpdiag_run_timestamp_seconds " in metrics.read_text()
    missing = run(changed("node-exporter.sh", tmp_path), DIRECTORY=str(tmp_path / "nowhere"))
    assert missing.returncode == 2
    assert "nowhere" in missing.stderr


@pytest.mark.deep
def test_the_steps_of_a_ci_service_run(start: Start, tmp_path: Path) -> None:
    workflow = yaml.safe_load((RECIPES / "github-actions.yml").read_text())
    steps = {step["name"]: step["run"] for step in workflow["jobs"]["smoke"]["steps"] if "run" in step}
    assert set(steps) == {"install", "lint", "check", "train"}
    # Two stages of the check: test_recipes runs all of them.
    steps["check"] = steps["check"].replace("ddpdiag check ", "ddpdiag check --stage launch,collective ")
    script = "\n".join(f"({steps[name]}) || exit" for name in ("lint", "check", "train"))
    (tmp_path / "train.py").write_text(TRAIN)
    job = start("-c", BASH, "-c", f"cd {tmp_path}\n{script}", PATH=path())
    assert job.wait(120) == 0, job.told()
    assert {"ddpdiag.json", "train.py"} <= {entry.name for entry in tmp_path.iterdir()}
    assert "rank 1 trained with ['--epochs', '1']" in job.stdout


def path() -> str:
    """With the scripts of the tests' environment, as after an activation."""
    return f"{SCRIPTS}:/usr/local/bin:/usr/bin:/bin"


@pytest.mark.parametrize(
    ("option", "code", "begin"),
    [("", 0, "FIT"), (" --expect-gpus 8", 1, "UNFIT: "), (" --expect-gpu 8", 2, "ddpdiag: no such option")],
    ids=["fit", "unfit", "wrong option"],
)
def test_node_problem_detector_gets_a_code_and_one_line(option: str, code: int, begin: str) -> None:
    """As pkg/custompluginmonitor/plugin runs a rule; it cuts the message at max_output_length bytes."""
    config = json.loads((RECIPES / "node-problem-detector.json").read_text())
    (rule,) = config["rules"]
    words = [word.replace("/opt/ddpdiag/bin/ddpdiag host", f"{SCRIPTS}/ddpdiag host{option}") for word in rule["args"]]
    done = subprocess.run([rule["path"], *words], stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    (line,) = done.stdout.decode("ascii").splitlines()
    assert (done.returncode, done.stderr, line[: len(begin)]) == (code, b"", begin)
    assert code == 2 or len(line) <= config["pluginConfig"]["max_output_length"]
