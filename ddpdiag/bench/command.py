"""`ddpdiag allreduce-bench`: a run whose only measurement is the benchmark."""

from ddpdiag.bench.options import BenchOutputs
from ddpdiag.cli import check
from ddpdiag.cli.check import check_backend, refuse_nccl_without_gpus
from ddpdiag.cli.options import CheckOptions
from ddpdiag.model.bench import Bench
from ddpdiag.model.launch import LaunchArgs

# The checks of a run: membership and versions (LCH), cores, the benchmark, and the events of the run (RUN).
CODES = ("LCH", "HST001", "COL002", "RUN")


def run(launch: LaunchArgs, bench: Bench, baseline: str | None, outputs: BenchOutputs) -> int:
    """Run as a rank of a launched job, or start all ranks on this host; the exit code."""
    bench.validate()
    for backend in bench.backend:
        check_backend(backend)
        refuse_nccl_without_gpus(backend)
    # The run's backend is the last one named, which a job would use; gloo before it is for comparison.
    backend = bench.backend[-1] if bench.backend else "auto"
    options = CheckOptions(select=CODES, backend=backend, budget=bench.timeout, baseline=baseline)
    return check.run(launch, options, outputs, bench=bench)
