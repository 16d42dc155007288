"""The entry point of the group `torchrun.handlers`, for `torchrun --rdzv-backend ddpdiag`.

torchrun loads the entry points of all packages whatever its --rdzv-backend is, so this module imports nothing.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.api import (
        RendezvousHandler,
        RendezvousHandlerCreator,
        RendezvousParameters,
    )


def handler() -> "RendezvousHandlerCreator":
    """The function that makes the handler of a rendezvous."""
    return _create


def _create(parameters: "RendezvousParameters") -> "RendezvousHandler":
    from ddpdiag.integrations.rendezvous import create

    return create(parameters)
