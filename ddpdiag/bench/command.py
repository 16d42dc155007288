"""`ddpdiag allreduce-bench`: a run whose only measurement is the benchmark."""

from ddpdiag.bench.options import BenchOutputs
from ddpdiag.cli import check
from ddpdiag.cli.check import check_backend, refuse_nccl_without_gpus
from ddpdiag.cli.options import CheckOptions
from ddpdiag.model.bench import Bench
from ddpdiag.model.launch import LaunchArgs

# Membership, versions, cores, the benchmark, and what happened to the run.
CODES = ("LCH", "HST001", "COL002", "RUN")


def run(launch: LaunchArgs, bench: Bench, baseline: str | None, outputs: BenchOutputs) -> int:
    """Take part in a benchmark, or start one on this host; the exit code."""
    bench.validate()
    for backend in bench.backend:
        check_backend(backend)
        refuse_nccl_without_gpus(backend)
    # The run's backend is the last one, which a job would use; gloo is there for comparison.
    backend = bench.backend[-1] if bench.backend else "auto"
    options = CheckOptions(select=CODES, backend=backend, budget=bench.timeout, baseline=baseline)
    return check.run(launch, options, outputs, bench=bench)
