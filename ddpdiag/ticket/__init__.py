"""Options of `ddpdiag ticket`, which fills in the issue form of NVIDIA/nccl or of PyTorch."""

from dataclasses import dataclass
from enum import StrEnum

from ddpdiag.cli.options import DISPLAY, FILES, DisplayArgs, option


class Kind(StrEnum):
    """The project whose issue form is filled in."""

    NCCL = "nccl"
    PYTORCH = "pytorch"


@dataclass(frozen=True, kw_only=True)
class TicketArgs(DisplayArgs):
    """The options of `ddpdiag ticket`."""

    log: tuple[str, ...] = option(
        (),
        "A log of the job, or the file of NCCL_TOPO_DUMP_FILE; also a folder or a pattern (*, **) (repeatable).",
        metavar="FILE",
        variable=False,
    )
    write_bundle: str | None = option(
        None,
        "Pack the form, reports, logs and outputs of commands, without secrets, to attach to the ticket.",
        metavar="FILE.tar.gz",
        panel=FILES,
        variable=False,
    )
    quiet: bool = option(False, "Print the form, nothing else.", "-q", panel=DISPLAY)
