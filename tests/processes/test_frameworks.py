"""ddpdiag.preflight() as docs/python.md shows it, in real trainings of Ray Train, Lightning, accelerate and others.

The frameworks come from the package index into an environment of their own, which uses the torch of this one.
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from pathlib import Path

import pytest
from jobs import INJECT, free_port, torchrun

ROOT = Path(__file__).parents[2]
SECONDS = 300.0
# The frameworks write no file outside of the test's folder, and use no GPU.
VARIABLES = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "DS_ACCELERATOR": "cpu"}
# What the scripts share. Each rank leaves the last loss, the report and the error in a file; Ray merges equal lines.
SHARED = """\
import os
from pathlib import Path
import ddpdiag, torch

OUT, MODE = Path(os.environ["OUT"]), os.environ["MODE"]

def check(rank, preflight=ddpdiag.preflight, **options):
    if MODE == "plain":
        return
    if MODE == "sick" and rank == 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "nonexistent"
    try:
        report = preflight(budget=90, select=["LCH", "RDZ", "COL"], **options)
    except ddpdiag.UnfitError as error:
        (OUT / f"raised-{rank}").write_text(str(error))
        raise
    (OUT / f"report-{rank}").write_text(str(report))

def losses(rank, model):
    random = torch.Generator().manual_seed(rank)
    for _ in range(10):
        images = torch.randn(32, 64, generator=random)
        yield (loss := (model(images) - images).square().mean())
    (OUT / f"loss-{rank}").write_text(loss.item().hex())

def train(rank, wrap):
    torch.manual_seed(rank)
    model = wrap(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for loss in losses(rank, model):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

def train_ddp(rank):
    torch.distributed.init_process_group("gloo")
    train(rank, torch.nn.parallel.DistributedDataParallel)
    torch.distributed.destroy_process_group()
"""
# DeepSpeed's launcher and submitit set CUDA_VISIBLE_DEVICES even where there is no GPU, so the checks would take NCCL.
SCRIPT = """\
import os
from shared import check, train_ddp

check(int(os.environ["RANK"]), backend="gloo")
train_ddp(int(os.environ["RANK"]))
"""
ACCELERATE = """\
import os
from shared import check, train

check(int(os.environ["RANK"]))
from accelerate import Accelerator

train(int(os.environ["RANK"]), Accelerator(cpu=True).prepare)
"""
RAY = """\
import ray
from ray.train import RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchTrainer, prepare_model
from shared import OUT, check, train

def loop():
    rank = get_context().get_world_rank()
    check(rank)
    train(rank, prepare_model)

ray.init(num_cpus=2, include_dashboard=False)
TorchTrainer(loop, scaling_config=ScalingConfig(num_workers=2), run_config=RunConfig(storage_path=str(OUT))).fit()
"""
LIGHTNING = """\
import functools, os, sys
import lightning, torch
from ddpdiag.integrations.lightning import preflight
from shared import check, losses

class Model(lightning.LightningModule):
    def configure_callbacks(self):
        check(int(os.environ["LOCAL_RANK"]), functools.partial(preflight, self.trainer))
        return []

    def configure_model(self):
        torch.manual_seed(self.global_rank)
        self.layer = torch.nn.Linear(64, 64)
        self.losses = losses(self.global_rank, self.layer)

    def training_step(self, batch):
        return next(self.losses)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_end(self):
        next(self.losses, None)

quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy=sys.argv[1], max_epochs=1, **quiet)
trainer.fit(Model(), torch.utils.data.DataLoader(range(20)))
"""
SUBMITIT = """\
import submitit
from shared import OUT, check, train_ddp

def task():
    rank = submitit.helpers.TorchDistributedEnvironment().export().rank
    check(rank, backend="gloo")
    train_ddp(rank)

executor = submitit.AutoExecutor(folder=OUT / "submitit", cluster="local")
executor.update_parameters(tasks_per_node=2, timeout_min=5)
executor.submit(task).results()
"""
NOTEBOOK = """\
import sys
from jupyter_client.manager import start_new_kernel

CELLS = '''
from shared import check
check(1, nproc_per_node=2)
=====
import os
from shared import train_ddp

def work(rank):
    os.environ |= dict(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ["PORT"])
    train_ddp(rank)

from torch.multiprocessing import start_processes
start_processes(work, nprocs=2, start_method="fork")
'''.split("=====")
manager, client = start_new_kernel()
try:
    for cell in CELLS:
        content = client.execute_interactive(cell, timeout=120)["content"]
        if content["status"] == "error":
            sys.exit(f"{content['ename']}: {content['evalue']}")
finally:
    client.stop_channels()
    manager.shutdown_kernel()
"""
# By framework: the script, the words before and after it, and the beginning of the error that a sick rank ends it with.
ACCELERATE_LAUNCH = "-m accelerate.commands.launch --multi_gpu --num_processes=2 --main_process_port={port}"
DEEPSPEED_LAUNCH = "-m deepspeed.launcher.runner --num_gpus=2 --master_port={port}"
FRAMEWORKS = {
    "ray": (RAY, "", "", "ray.train.WorkerGroupError: "),
    "lightning": (LIGHTNING, "", "ddp", "ddpdiag.errors.UnfitError: "),
    "accelerate": (ACCELERATE, ACCELERATE_LAUNCH, "", "ChildFailedError: "),
    "submitit": (SUBMITIT, "", "", "submitit.core.utils.FailedJobError: "),
    "notebook": (NOTEBOOK, "", "", "UnfitError: "),
    "lightning-fork": (LIGHTNING, "", "ddp_fork", "ProcessRaisedException: "),
    "deepspeed": (SCRIPT, DEEPSPEED_LAUNCH, "", "exits with return code = 1"),
}
# The last two end as others do.
MOST = list(FRAMEWORKS)[:-2]


@pytest.fixture(scope="module")
def short_folder():
    """A folder with a short name, because Ray makes sockets in it. Hundreds of MB are not left to pytest."""
    with tempfile.TemporaryDirectory(prefix="r") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def python(short_folder):
    """The interpreter with the frameworks. DDPDIAG_FRAMEWORKS names that of an environment which has them already."""
    if kept := os.environ.get("DDPDIAG_FRAMEWORKS"):
        return kept
    subprocess.run([sys.executable, "-m", "venv", short_folder], check=True)
    python = short_folder / "bin" / "python"
    (packages,) = short_folder.glob("lib/python3*/site-packages")
    # pip then finds this environment's torch, and does not install the index's build of some 3 GB.
    (packages / "base.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = [*extras["ray"], *extras["lightning"], *extras["frameworks"]]
    install = [python, "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), *wanted]
    made = subprocess.run(install, capture_output=True, check=False, text=True)
    if made.returncode:
        errors = [line for line in made.stderr.splitlines() if line.startswith("ERROR")]
        pytest.skip(f"the frameworks cannot be installed: {errors[0] if errors else made.stderr}")
    return str(python)


def begin(start, python, short_folder, folder, mode, script, before, after=""):
    """Start a script in `folder`, where its ranks leave their results."""
    (folder / "shared.py").write_text(SHARED)
    (folder / "job.py").write_text(script)
    port = str(free_port())
    paths = {"OUT": str(folder), "IPYTHONDIR": str(folder / "ipython"), "PYTHONPATH": f"{INJECT}:{folder}"}
    variables = VARIABLES | paths | {"MODE": mode, "PORT": port, "RAY_TMPDIR": str(short_folder)}
    return start(*before.format(port=port).split(), str(folder / "job.py"), *after.split(), python=python, **variables)


def check_left_nothing(job):
    """No process, and no file of ddpdiag. Lightning leaves a folder of its own."""
    assert job.left_processes() == []
    assert [path for path in job.left_files() if path.startswith("ddpdiag")] == []


def results(folder, kind):
    return {path.name.removeprefix(f"{kind}-"): path.read_text() for path in folder.glob(f"{kind}-?")}


@pytest.fixture(scope="module")
def plain_losses(start_shared, python, short_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    job = begin(start_shared, python, short_folder, folder, "plain", SCRIPT, " ".join(torchrun(2)))
    assert job.wait(SECONDS) == 0, job.told()
    return results(folder, "loss")


@pytest.mark.deep
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_checked_training_has_the_loss_of_a_plain_one(start, python, short_folder, tmp_path, plain_losses, name):
    script, before, after, _error = FRAMEWORKS[name]
    job = begin(start, python, short_folder, tmp_path, "fit", script, before, after)
    assert job.wait(SECONDS) == 0, job.told()
    assert any(report.startswith("FIT: 2 ranks on 1 host") for report in results(tmp_path, "report").values())
    assert results(tmp_path, "loss") == plain_losses
    check_left_nothing(job)


@pytest.mark.deep
@pytest.mark.parametrize("name", MOST)
def test_a_sick_rank_is_in_the_error_of_the_framework(start, python, short_folder, tmp_path, name):
    script, before, after, error = FRAMEWORKS[name]
    job = begin(start, python, short_folder, tmp_path, "sick", script, before, after)
    assert job.wait(SECONDS) != 0, job.told()
    assert error in job.told()
    assert "UnfitError: UNFIT: 2 ranks on 1 host cannot train: " in job.told()
    # A launcher may end rank 1 before it raises.
    assert all(text.startswith("UNFIT: 2 ranks on 1 host ") for text in results(tmp_path, "raised").values())
    assert results(tmp_path, "loss") == {}
    check_left_nothing(job)
