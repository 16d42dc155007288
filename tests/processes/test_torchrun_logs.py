"""torchrun's entry points on one host: logs that are explained, errors without a traceback, and torch's error file."""

import json
import os
import signal

import pytest
from jobs import processes, torchrun

pytestmark = pytest.mark.deep

FAILS = "import os\nif os.environ['RANK'] == '1':\n    raise RuntimeError('CUDA out of memory. Tried')\n"
RECORDS = """
import os
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    if os.environ["RANK"] == "1":
        raise RuntimeError("CUDA out of memory. Tried")
main()
"""


@pytest.mark.parametrize(
    ("script", "code", "error"),
    [(FAILS, 1, ""), (RECORDS, 1, "RuntimeError: CUDA out of memory. Tried"), ("print('well')\n", 0, "")],
    ids=["fails", "records", "well"],
)
def test_logs_of_a_failed_job_are_explained(start, tmp_path, script, code, error):
    path, error_file = tmp_path / "train.py", tmp_path / "error.json"
    path.write_text(script)
    job = start(*torchrun(2, "--logs-specs", "ddpdiag"), str(path), TORCHELASTIC_ERROR_FILE=str(error_file))
    assert job.wait(120) == code, job.told()
    assert ("Start with cuda-memory" in job.stderr) == bool(code), job.told()
    assert bool([*job.temporary.glob("torchelastic_*/*/attempt_0/1/stderr.log")]) == bool(code)
    assert error_file.exists() == bool(code)
    if code:
        message = json.loads(error_file.read_text())["message"]
        sentence, _, recorded = message["message"].partition("\n")
        assert "Start with cuda-memory" in sentence
        assert recorded == error
        assert ("Traceback" in message["extraInfo"].get("py_callstack", "")) == bool(error)
    else:
        assert [*job.temporary.iterdir()] == []


@pytest.mark.parametrize(
    ("conf", "sentence"),
    [
        ("check=host", "cannot train: no usable GPU"),
        ("chek=host", "--rdzv-conf chek: expected check, budget, on_unfit, on_unknown, on_warning, or a setting of"),
    ],
    ids=["sick", "wrong"],
)
def test_torchrun_ends_with_the_sentence_alone(start, tmp_path, conf, sentence):
    error_file = tmp_path / "error.json"
    options = ("--rdzv-backend", "ddpdiag", "--rdzv-endpoint", "localhost:0", "--rdzv-conf", conf)
    variables = {"TORCHELASTIC_ERROR_FILE": str(error_file), "DDPDIAG_EXPECT_GPUS": "1"}
    job = start(*torchrun(2, *options), "no_script.py", **variables)
    assert job.wait(120) == 1, job.told()
    assert sentence in job.stderr.splitlines()[-1]
    assert "Traceback" not in job.stderr
    assert sentence in json.loads(error_file.read_text())["message"]["message"]
    assert job.left_files() == []


@pytest.mark.parametrize("command", ["host", "check"])
def test_ctrl_c_during_a_check_is_one_sentence(start, command):
    options = ("--rdzv-backend", "ddpdiag", "--rdzv-endpoint", "localhost:0", "--rdzv-conf", "budget=60")
    job = start(*torchrun(2, *options), "no_script.py")
    job.wait_until(lambda: any(f" {command} --quiet" in process.command for process in processes(job.mark)))
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.wait() == -signal.SIGINT, job.told()  # for a shell: 130
    assert job.stderr.splitlines()[-1].startswith("ddpdiag: SIGINT ended torchrun on ")
    assert "Traceback" not in job.stderr
    job.check_left_nothing()
