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
    watch = "ddpdiag watch -- python3 train.py"
    # Of the script itself, watch takes its place; a step has processes of its own.
    job = four.sbatch(f"export RANK=0 WORLD_SIZE=1; {'exec' if whom else 'srun -n1'} {watch}", "-N1", "-n1")
    four.wait_for_output(job, "begun")
    four.call("scancel", *whom, "--signal=TERM", str(job))
    ended = four.wait(job)
    own = [line for line in ended.output.splitlines() if not line.startswith(("slurmstepd", "srun"))]
    assert (ended.exit_code, own) == (0, ["begun", "told 1"]), ended.output
