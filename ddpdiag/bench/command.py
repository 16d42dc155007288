"""`ddpdiag allreduce-bench`: a run whose only measurement is the benchmark."""

from ddpdiag.bench.options import BenchOutputs
from ddpdiag.cli import check
from ddpdiag.cli.check import check_backend, refuse_nccl_without_gpus
from ddpdiag.cli.options import CheckArgs
from ddpdiag.model.bench import BenchRequest
from ddpdiag.model.launch import LaunchArgs

# The selected checks: membership and versions (LCH), CPU cores, the benchmark, and the events of the run (RUN).
SELECTED_CHECKS = ("LCH", "HST001", "COL002", "RUN")


def run(launch: LaunchArgs, bench: BenchRequest, baseline: str | None, outputs: BenchOutputs) -> int:
    """Run the benchmark as a rank of a launched job, or start all ranks on this host. Returns the exit code."""
    bench.validate()
    for backend in bench.backend:
        check_backend(backend)
        refuse_nccl_without_gpus(backend)
    # The last backend is the one that the job would use. An earlier one, such as gloo, is measured for comparison.
    backend = bench.backend[-1] if bench.backend else "auto"
    options = CheckArgs(select=SELECTED_CHECKS, backend=backend, budget=bench.timeout, baseline=baseline)
    return check.run(launch, options, outputs, bench=bench)
