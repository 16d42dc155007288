"""The recipes, run."""

import os
import re
import sys
from pathlib import Path

from jobs import REPORT_HEAD, Start, torchrun

RECIPES = Path(__file__).parents[2] / "recipes"
BASH = "import os, sys; os.execvp('bash', ['bash', *sys.argv[1:]])"


def test_torchrun_trains_after_a_check_that_found_the_host_fit(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os; os.write(1, b'trained as rank %s\\n' % os.environb[b'RANK'])\n")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    job = start("-c", BASH, str(RECIPES / "torchrun.sh"), str(script), PATH=path)
    assert job.wait() == 0, job.told()
    assert len(REPORT_HEAD.findall(job.stdout)) == 1
    assert "trained as rank 0" in job.stdout
    assert "trained as rank 1" in job.stdout


def test_torchrun_does_not_train_on_an_unfit_host(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('trained')\n")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    job = start("-c", BASH, str(RECIPES / "torchrun.sh"), str(script), PATH=path, TORCH_DISTRIBUTED_DEBUG="LOUD")
    assert job.wait() != 0
    assert "trained" not in job.stdout


def test_the_training_script_learns_the_digits(start: Start, tmp_path: Path) -> None:
    weights = tmp_path / "weights.pt"
    job = start(*torchrun(2), str(RECIPES / "train_ddp.py"), "--save", str(weights))
    assert job.wait(90) == 0, job.told()
    share = re.search(r"epoch 1: loss [\d.]+, ([\d.]+)% of the test images recognised", job.stdout)
    assert share is not None, job.told()
    assert float(share[1]) > 90
    assert weights.stat().st_size > 100_000
