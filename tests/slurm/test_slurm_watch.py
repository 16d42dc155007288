"""Slurm's signals reach a training that is watched, and each reaches it once."""

import pytest

pytestmark = pytest.mark.slurm

# Blocked, two that come one after the other are seen as two.
TRAINER = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print("begun", flush=True)
count = 0
while signal.sigtimedwait([signal.SIGTERM], 1.0 if count else 60.0):
    count += 1
print("told", count, flush=True)
"""


# The script's own signal takes watch's other way: test_watch_signalled.py sends it without a Slurm.
@pytest.mark.parametrize("whom", [(), pytest.param(("--batch",), marks=pytest.mark.deep)], ids=["steps", "script"])
def test_a_signal_of_scancel_reaches_the_training_once(cluster, whom):
    four = cluster(4)
    (four.shared / "train.py").write_text(TRAINER)
    watch = "ddpdiag watch -q -- python3 train.py"
    # Of the script itself, watch takes its place; a step has processes of its own.
    job = four.sbatch(f"export RANK=0 WORLD_SIZE=1; {'exec' if whom else 'srun -n1'} {watch}", "-N1", "-n1")
    four.wait_for_output(job, "begun")
    four.call("scancel", *whom, "--signal=TERM", str(job))
    ended = four.wait(job)
    own = [line for line in ended.output.splitlines() if not line.startswith(("slurmstepd", "srun"))]
    assert (ended.exit_code, own) == (0, ["begun", "told 1"]), ended.output


# Ranks of two nodes over gloo; rank 1, of the second node, stops in the way of all others.
HANGS = """
import os, time
import torch, torch.distributed as dist
os.environ |= {"RANK": os.environ["SLURM_PROCID"], "WORLD_SIZE": os.environ["SLURM_NTASKS"]}
dist.init_process_group("gloo")
dist.barrier()
print("begun", flush=True)
if dist.get_rank() == 1:
    time.sleep(600)
dist.all_reduce(torch.ones(4))
"""


@pytest.mark.deep
def test_a_step_that_attaches_to_a_job_names_the_rank_of_another_node(cluster):
    four = cluster(4)
    (four.shared / "train.py").write_text(HANGS)
    master = "export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1) MASTER_PORT=29512"
    job = four.sbatch(f"{master}; srun --overlap python3 train.py", "-N2", "-n2", "--overcommit")
    four.wait_for_output(job, "begun")
    done = four.srun("--overlap", f"--jobid={job}", "-N2", "-n2", "ddpdiag", "watch", "--attach")
    four.call("scancel", str(job))
    told = " ".join(done.stdout.split())
    assert [
        word for word in ("rank 0 waits for rank 1", "train.py:10", ": rank 0.", ": rank 1.") if word not in told
    ] == [], done.stdout + done.stderr
    assert done.returncode == 1
