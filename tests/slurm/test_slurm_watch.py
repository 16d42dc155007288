"""Slurm's signals reach a training that is watched, and each reaches it once."""

import pytest

pytestmark = pytest.mark.slurm

TRAINER = """
import signal, time
signal.signal(signal.SIGTERM, lambda *_: print("told", flush=True))
print("begun", flush=True)
end = time.monotonic() + 3
while time.monotonic() < end:
    time.sleep(0.05)
print("over", flush=True)
"""


@pytest.mark.parametrize("whom", [(), ("--batch",)], ids=["steps", "script"])
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
    assert (ended.exit_code, own) == (0, ["begun", "told", "over"]), ended.output
