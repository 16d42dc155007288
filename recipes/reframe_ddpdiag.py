"""ReFrame: measure collectives with `ddpdiag allreduce-bench`, and hold the result against the site's own reference.

    reframe -C SETTINGS.py -c recipes/reframe_ddpdiag.py -r -S num_tasks=16 -S num_tasks_per_node=8

The launcher of ReFrame's partition (srun, mpirun) starts one process for each rank. With one task and the launcher
`local`, or with srun on a host with several GPUs, ddpdiag starts the ranks of that host itself. Change: `ddpdiag`, if
it is not on the PATH of the job; the sizes; `reference`, once the first runs have shown what is usual on the partition.
"""

import reframe as rfm
import reframe.utility.sanity as sn
from reframe.core.builtins import performance_function, run_before, sanity_function, variable


@rfm.simple_test
class DdpdiagAllReduce(rfm.RunOnlyRegressionTest):
    descr = "Bus bandwidth of all_reduce, with every value checked"
    valid_systems = ["*"]
    valid_prog_environs = ["*"]
    executable = "ddpdiag allreduce-bench"
    sizes = variable(str, value="-b 8 -e 128M -f 2")
    # The value, and the fractions below and above it that are accepted: {"mysystem:gpu": {"avg_bus_bandwidth": (180,
    # -0.1, None, "GB/s")}} fails below 162 GB/s.
    reference = {"*": {"avg_bus_bandwidth": (None, None, None, "GB/s")}}
    time_limit = "10m"

    @run_before("run")
    def set_sizes(self):
        self.executable_opts = [self.sizes]

    @sanity_function
    def is_fit(self):
        """The run is FIT, and no element of a result is wrong. UNKNOWN, such as for lack of time, is a failure."""
        return sn.all(
            [
                sn.assert_eq(self.job.exitcode, 0, "exit code {0} of ddpdiag: see the last lines of its output"),
                sn.assert_found(r"^# Out of bounds values : 0 OK", self.stdout),
                sn.assert_found(r"^FIT", self.stdout),
            ]
        )

    @performance_function("GB/s")
    def avg_bus_bandwidth(self):
        return sn.extractsingle(r"^# Avg bus bandwidth\s*:\s*([\d.]+)", self.stdout, 1, float)
