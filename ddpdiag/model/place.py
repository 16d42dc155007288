"""Who a process is, and what it said of itself when it arrived."""

from typing import Annotated

from msgspec import Meta, Struct


class Place(Struct, frozen=True, kw_only=True, gc=False):
    """A process in the world. `None` means that the launcher did not say; ranks are never guessed."""

    rank: int
    world_size: int
    node: str
    launcher: str
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None


class Arrival(Struct, frozen=True, kw_only=True, gc=False, tag="arrival"):
    """What one supervisor told rank 0 when it came.

    `host_id` is the kernel's boot id, so that two hosts with one name are told apart; `address` is the
    source address of its connection to rank 0; `seconds` counts from the start of the run at rank 0.
    `gpus` is the number of GPUs that this process may use, `pci_gpus` what the PCI bus shows (`None`: not readable).
    `coordinator` is the name under which it looked for rank 0. `agent_store` says that torchrun's
    agent serves the store which env:// uses. `lacks` names variables that scripts read and that no launcher set.
    `nonce` tells processes apart that share host and pid (containers). `leaf` is the switch above the host, as Slurm
    tells; else it is empty. `up_seconds` is how old the process that was launched was when it looked for rank 0. `cpus`
    is the mask of the processors that this process may use, in hexadecimal (as taskset(1) shows it); empty if nobody
    looked. `slurm` is the job and step of Slurm in which it runs ("12.0"), the job alone outside of its steps; empty
    elsewhere.
    """

    place: Place
    host_id: str
    pid: int
    address: str
    seconds: float = 0.0
    gpus: int = 0
    pci_gpus: int | None = None
    coordinator: str = ""
    agent_store: bool = False
    lacks: tuple[str, ...] = ()
    nonce: str = ""
    leaf: str = ""
    up_seconds: float | None = None
    cpus: Annotated[str, Meta(pattern="^[0-9a-f]{0,4096}$")] = ""
    slurm: str = ""

    @property
    def host(self) -> tuple[str, str]:
        """What tells hosts apart: two may share a name, and containers of one host its boot id."""
        return self.place.node, self.host_id
