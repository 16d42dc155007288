"""ddpdiag.preflight(groups=...) in a training of four ranks, with groups dp and tp: real ranks under torchrun."""

import re

import pytest
from jobs import torchrun

pytestmark = pytest.mark.deep

TRAIN = """\
import os, signal, sys, threading, time
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store
import ddpdiag

case = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
torch.manual_seed(rank)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    if case != "plain":
        state = torch.get_rng_state(), threading.active_count(), dict(os.environ)
        monitor = ddpdiag.preflight(groups=mesh, every=4, sizes=1 << 20, join_timeout=20, budget=10)
        assert torch.equal(state[0], torch.get_rng_state())
        assert state[1:] == (threading.active_count(), dict(os.environ))
    for step in range(8):
        images = torch.randn(32, 64)
        loss = (model(images) - images).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 7 and (rank, case) in ((3, "absent"), (0, "rank 0")):
            time.sleep(1000)
        if step == 5 and (rank, case) == (3, "slow"):
            multiply = torch.mm
            torch.mm = lambda *each: [multiply(*each) for _ in range(5)][0]
        if step == 5 and (rank, case) == (3, "stopped"):
            torch.mm = lambda *each: os.kill(os.getpid(), signal.SIGSTOP)
        if case != "plain" and (report := monitor.step()):
            print(f"{rank} step {step + 1} {report}\\n", end="", flush=True)
except ddpdiag.UnfitError as error:
    print(f"{rank} step {step + 1} raised {error}\\n", end="", flush=True)
    time.sleep(5)  # torchrun ends the others when one ends
    os._exit(1)
print(f"loss {rank} {loss.item().hex()}\\n", end="", flush=True)
dist.barrier()
store = _get_default_store()
while isinstance(store, dist.PrefixStore):
    store = store.underlying_store
if rank == 0 and hasattr(store, "list_keys"):
    print("keys", [key for key in store.list_keys() if "ddpdiag" in key], flush=True)
dist.barrier()
dist.destroy_process_group()
"""
LOSS = re.compile(r"loss \d 0x\S+")


@pytest.fixture
def script(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    return str(tmp_path / "train.py")


def test_a_healthy_job_trains_to_the_same_loss_and_nothing_is_left(start, script):
    plain, checked = start(*torchrun(4), script, "plain"), start(*torchrun(4), script, "healthy")
    for job in (plain, checked):
        assert job.wait(300) == 0, job.told()
    assert len(LOSS.findall(plain.stdout)) == 4
    assert sorted(LOSS.findall(checked.stdout)) == sorted(LOSS.findall(plain.stdout))
    for rank in range(4):
        assert re.findall(rf"{rank} step (\d) FIT", checked.stdout) == ["4", "8"]
    assert "keys []" in checked.stdout or "keys" not in checked.stdout
    checked.check_left_nothing()


def test_a_rank_that_turns_slow_is_named_at_the_next_check(start, script):
    job = start(*torchrun(4), script, "slow")
    assert job.wait(300) == 0, job.told()
    for rank in range(4):
        assert re.search(rf"{rank} step 8 FIT, degraded: 4 ranks on 1 host.*rank 3 on \S+ computes", job.stdout)
    assert "computes" not in "".join(re.findall(r". step 4 .*", job.stdout))
    assert "warning GRP001.slow-rank: rank 3" in job.stderr


@pytest.mark.parametrize(
    ("case", "others", "text"),
    [
        ("absent", "012", r"rank 3 on \S+ did not reach the check of the groups"),
        ("stopped", "012", r"rank 3 on \S+ stopped during the check of the groups"),
        ("rank 0", "123", r"rank 0 on \S+ did not reach the check of the groups"),
    ],
)
def test_a_rank_that_hangs_is_named_on_all_others(start, script, case, others, text):
    job = start(*torchrun(4), script, case)
    assert job.wait(300) == 1, job.told()
    for rank in others:
        assert re.search(rf"{rank} step 8 raised UNFIT: 4 ranks on 1 host cannot train: {text}", job.stdout), job.told()
