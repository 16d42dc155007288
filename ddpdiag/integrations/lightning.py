"""`preflight(trainer)`, for a script whose ranks Lightning itself starts.

    from ddpdiag.integrations.lightning import preflight

    class Model(LightningModule):
        def configure_callbacks(self):
            preflight(self.trainer, budget=60)
            return []

`configure_callbacks` is the only hook that Lightning calls on all ranks before it makes the process group. A callback
runs too late: with GPUs Lightning opens the NCCL communicators together with the process group, and a barrier follows
before the first callback (lightning 2.6, Trainer._run). Under torchrun, srun or mpirun `ddpdiag.preflight()` as the
first line of the script is enough, and runs before the imports.

This module imports neither Lightning nor torch. It works with `lightning` and with `pytorch_lightning`.
"""

from typing import TYPE_CHECKING

from ddpdiag import api
from ddpdiag.model import Report

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def preflight(trainer: "Trainer", **options: api.Option) -> Report:
    """Check the job with the ranks, address and port of this trainer. Return the report, or raise UnfitError.

    All ranks call it from `LightningModule.configure_callbacks`, which runs once for each fit(), validate(), test() and
    predict(). The options are those of `ddpdiag.preflight`. A trainer with one device checks this process alone.
    """
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if environment is None:
        return api.preflight(**options)  # type: ignore[arg-type, return-value]
    # As the strategy does next. Without it, every rank that Lightning forked has rank 0; launchers ignore it.
    environment.set_global_rank(trainer.node_rank * trainer.num_devices + trainer.local_rank)
    environment.set_world_size(trainer.num_nodes * trainer.num_devices)
    place: dict[str, api.Option] = {
        "rank": environment.global_rank(),
        "local_rank": environment.local_rank(),
        "world_size": environment.world_size(),
        "master_addr": environment.main_address,
        "master_port": environment.main_port,
    }
    return api.preflight(**place | options)  # type: ignore[arg-type, return-value]
