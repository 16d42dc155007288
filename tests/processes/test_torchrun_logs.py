"""torchrun --logs-specs ddpdiag: the logs of ranks that failed are explained, and those of a good job are removed."""

import pytest
from jobs import torchrun

FAILS = "import os\nif os.environ['RANK'] == '1':\n    raise RuntimeError('CUDA out of memory. Tried')\n"


@pytest.mark.deep
@pytest.mark.parametrize(("script", "code", "explained"), [(FAILS, 1, True), ("print('well')\n", 0, False)])
def test_logs_of_a_failed_job_are_explained(start, tmp_path, script, code, explained):
    path = tmp_path / "train.py"
    path.write_text(script)
    job = start(*torchrun(2, "--logs-specs", "ddpdiag"), str(path))
    assert job.wait(60) == code, job.told()
    assert ("Start with cuda-memory" in job.stderr) == explained, job.told()
    assert bool([*job.temporary.glob("torchelastic_*/*/attempt_0/1/stderr.log")]) == explained
    assert explained or [*job.temporary.iterdir()] == []
