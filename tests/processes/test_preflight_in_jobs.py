"""ddpdiag.preflight() in a training: real ranks under torchrun, by hand and under multiprocessing."""

import os
import re
import shutil
import signal

import pytest
from jobs import free_port, processes, torchrun

TRAIN = """\
import os, sys
import ddpdiag

if "--preflight" in sys.argv:
    before = dict(os.environ)
    try:
        print("rank", os.environ["RANK"], ddpdiag.preflight(budget=90, select=["LCH", "RDZ", "COL"]))
    except ddpdiag.UnfitError as error:
        sys.exit(f"rank {os.environ['RANK']} raised {error}")
    assert dict(os.environ) == before
    assert "torch" not in sys.modules
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(10):
    images = torch.randn(32, 64)
    loss = (model(images) - images).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {dist.get_rank()} {loss.item().hex()}\\n", end="", flush=True)
if "--again" in sys.argv:
    print(ddpdiag.preflight(budget=90, select=["LCH", "RDZ", "COL"]))
    dist.barrier()
dist.destroy_process_group()
"""
SPAWN = """\
import os, sys
import ddpdiag, torch.multiprocessing

def work(rank, port):
    options = dict(world_size=2, master_addr="localhost", master_port=port, select=["RDZ001", "COL001"])
    print(ddpdiag.preflight(rank=rank, **options))

if __name__ == "__main__":
    torch.multiprocessing.spawn(work, args=(int(sys.argv[1]),), nprocs=2)
"""
CALL = "import ddpdiag; print(ddpdiag.preflight(select='RDZ001,COL001'))"
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2")
LOSS = re.compile(r"loss \d 0x\S+")


@pytest.fixture
def script(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    return str(tmp_path / "train.py")


@pytest.mark.deep
def test_a_fit_world_trains_to_the_same_loss_and_may_be_checked_again(start, script):
    plain = start(*torchrun(2), script)
    assert plain.wait(120) == 0, plain.told()
    checked = start(*torchrun(2), script, "--preflight", "--again")
    assert checked.wait(300) == 0, checked.told()
    assert len(LOSS.findall(plain.stdout)) == 2
    assert sorted(LOSS.findall(checked.stdout)) == sorted(LOSS.findall(plain.stdout))
    assert "rank 0 FIT: 2 ranks on 1 host" in checked.stdout
    assert "rank 1 FIT: rank 0 has the report" in checked.stdout
    assert checked.stdout.count("FIT: ") == 4
    checked.check_left_nothing()


@pytest.mark.deep
def test_a_sick_rank_raises_on_every_rank(start, script, tmp_path):
    (tmp_path / "sick.py").write_text(
        f'import os\nif os.environ["RANK"] == "1":\n    os.environ["GLOO_SOCKET_IFNAME"] = "nonexistent"\n{TRAIN}'
    )
    port = str(free_port())
    jobs = [
        start(
            str(tmp_path / "sick.py"),
            "--preflight",
            RANK=str(rank),
            WORLD_SIZE="2",
            MASTER_ADDR="localhost",
            MASTER_PORT=port,
        )
        for rank in (0, 1)
    ]
    for rank, job in enumerate(jobs):
        assert job.wait(120) == 1
        assert f"rank {rank} raised UNFIT: 2 ranks on 1 host cannot train: rank 1 on " in job.stderr, job.told()
        job.check_left_nothing()


@pytest.mark.deep
def test_ranks_of_multiprocessing_pass_their_place(start, tmp_path):
    (tmp_path / "spawn.py").write_text(SPAWN)
    job = start(str(tmp_path / "spawn.py"), str(free_port()))
    assert job.wait(120) == 0, job.told()
    assert job.stdout.count("FIT: ") == 2
    job.check_left_nothing()


@pytest.mark.deep
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun")
def test_ranks_of_open_mpi_are_one_world(start):
    job = start("-c", CALL, prefix=MPIRUN)
    assert job.wait(120) == 0, job.told()
    assert job.stdout.count("FIT: ") == 2
    assert "FIT: 2 ranks on 1 host" in job.stdout


@pytest.mark.deep
def test_the_port_of_a_job_that_has_met_is_not_called_taken(start, script):
    port = str(free_port())
    jobs = [
        start(script, "--again", RANK=rank, WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=port) for rank in "01"
    ]
    for job in jobs:
        assert job.wait(120) == 0, job.told()
        assert "FIT: " in job.stdout


# The last one as Ray does with a worker.
ENDS = [
    *((os.kill, signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)),
    (os.killpg, signal.SIGKILL),
]


@pytest.mark.deep
@pytest.mark.parametrize(("send", "signum"), ENDS, ids=["SIGINT", "SIGTERM", "SIGKILL", "of its group"])
def test_the_check_ends_with_the_training(start, send, signum):
    job = start("-c", "import ddpdiag; ddpdiag.preflight(nproc_per_node=2)")
    job.wait_until(lambda: any(process.is_fork_server for process in processes(job.mark)))
    send(job.process.pid, signum)
    job.wait(60)
    job.check_left_nothing()
