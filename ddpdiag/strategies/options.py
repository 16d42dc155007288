"""Options of `ddpdiag train`."""

from dataclasses import dataclass

from ddpdiag.cli.options import backends, option

_WHAT = "What is trained"
_STRATEGIES = ("single", "dp", "ddp", "fsdp", "tensor-parallel", "pipeline", "model-parallel", "all")
_DTYPES = ("float32", "float64", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """The options of `ddpdiag train`, as they were typed."""

    strategy: tuple[str, ...] = option(
        ("single,ddp,fsdp",),
        f"{', '.join(_STRATEGIES)} (a,b; default: single,ddp,fsdp). single always runs, for the comparison.",
        metavar="NAME",
        panel=_WHAT,
        words=lambda: _STRATEGIES,
    )
    steps: int = option(30, "Steps of each training; the first 3 are not timed.", metavar="N", panel=_WHAT)
    batch_size: int = option(64, "Images of a step, over all ranks.", metavar="N", panel=_WHAT)
    dtype: str = option(
        "float32", f"{', '.join(_DTYPES[:-1])} or {_DTYPES[-1]}.", metavar="TYPE", panel=_WHAT, words=lambda: _DTYPES
    )
    group_size: int = option(
        2, "Devices over which each rank of model-parallel cuts its network.", metavar="N", panel=_WHAT
    )
    scaling: bool = option(False, "Train ddp on 1, 2, 4 ... ranks as well, to measure scaling.", panel=_WHAT)
    compare_launchers: bool = option(
        False,
        "Train ddp on this host, started by mp.spawn, torchrun, torch.distributed.run, torch.distributed.launch "
        "(with --use-env, too) and by hand: which of them work, and how long a start and a step take.",
        panel=_WHAT,
    )
    rounds: int = option(
        2, "With --compare-launchers: trainings with each launcher; the best one counts.", metavar="N", panel=_WHAT
    )
    backend: str = option(
        "auto", "auto, nccl, gloo or any other backend of torch.", metavar="NAME", panel=_WHAT, words=backends
    )
    budget: float = option(120.0, "Time limit of the run.", metavar="SECONDS", panel=_WHAT, min=5.0)
    data_dir: str | None = option(
        None, "MNIST files of your own (IDX, plain or .gz) instead of those shipped.", metavar="DIR", panel=_WHAT
    )
    set_: tuple[str, ...] = option(
        (), "Such as TRN002.tolerance=0.01 (repeatable).", metavar="CODE.NAME=VALUE", panel=_WHAT
    )
