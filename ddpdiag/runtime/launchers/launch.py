"""What launchers tell a process, as a table of variable names, and what we make of it: a `Launch`.

Launchers that set a rank for each process are rows of `LAUNCHERS`; Slurm needs more (slurm.py).
"""

from msgspec import Struct, field

from ddpdiag.errors import UsageError
from ddpdiag.model import Place
from ddpdiag.runtime.launchers import values
from ddpdiag.runtime.launchers.values import Given, check_positive, option

# More processes than that on one host is a slip of the keyboard.
MOST_RANKS_HERE = 1024
# Eight times the ranks of the largest world that was tried (judged from a simulated recording).
MOST_RANKS = 1 << 20


class Names(Struct, frozen=True, kw_only=True):
    """The variables of one launcher; of several names for one thing, the first that is set counts."""

    launcher: str
    rank: str
    world_size: tuple[str, ...] = ()
    local_rank: tuple[str, ...] = ()
    local_world_size: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()


TORCHRUN = Names(
    launcher="torchrun",
    rank="RANK",
    world_size=("WORLD_SIZE",),
    local_rank=("LOCAL_RANK",),
    local_world_size=("LOCAL_WORLD_SIZE",),
    node_rank=("GROUP_RANK",),
)
# OMPI_COMM_WORLD_NODE_RANK is no node's number: it counts the processes of all jobs on a node, so it is not read.
OPEN_MPI = Names(
    launcher="openmpi",
    rank="OMPI_COMM_WORLD_RANK",
    world_size=("OMPI_COMM_WORLD_SIZE",),
    local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
    local_world_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
)
# PMIx hands its job size out through its library only; without OMPI_* it must come from --world-size.
PMIX = Names(launcher="pmix", rank="PMIX_RANK")
# MPICH's and Intel's hydra, then Cray's PALS.
PMI = Names(
    launcher="pmi",
    rank="PMI_RANK",
    world_size=("PMI_SIZE",),
    local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
    local_world_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
)
# In order of trust: mpirun may start its daemons with srun, and torchrun may run under either.
LAUNCHERS = (TORCHRUN, OPEN_MPI, PMIX, PMI)


class Asked(Struct, frozen=True, kw_only=True):
    """What the command line says; `None` means not given."""

    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    nproc_per_node: int | None = None
    nnodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    run_id: str | None = None


class Launch(Struct, frozen=True, kw_only=True):
    """How this process was launched.

    `place` is that of the first rank that it stands for. `coordinator` is rank 0's host (MASTER_ADDR). `port` is
    MASTER_PORT, `None` only in a world that is started here whole. `ranks` are those that this process must start
    itself, none when it is the rank. `note` is a sentence for the user. `agent_store` says that torchrun's agent serves
    the store of env://. `nodes` is the number of hosts, where known. `given` holds torchrun's variables beyond `place`.
    `layout` is the host of each rank, empty where the launcher does not tell.
    `lacks` names variables that scripts read beside those of env://, and that are not set.
    """

    place: Place
    coordinator: str
    port: int | None
    run_id: str
    ranks: tuple[int, ...] = ()
    note: str = ""
    agent_store: bool = False
    lacks: tuple[str, ...] = ()
    nodes: int | None = None
    given: dict[str, str] = field(default_factory=dict)
    layout: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Is the whole world on this host, started by this process?"""
        return len(self.ranks) == self.place.world_size

    @property
    def on_loopback(self) -> bool:
        """Do all ranks meet over an address that never leaves this host?"""
        return self.whole or self.coordinator == "localhost" or self.coordinator.startswith("127.")

    @property
    def is_local(self) -> bool:
        """Are all ranks known to be on this host?"""
        return self.on_loopback or self.place.local_world_size == self.place.world_size


class Here(Struct, frozen=True, kw_only=True):
    """This host, as the caller sees it."""

    host: str
    gpus: int
    cores: int
    fresh: str


def place(
    here: Here,
    launcher: str,
    rank: int,
    world: Given,
    *,
    local_rank: Given | None = None,
    local_size: Given | None = None,
    node: Given | None = None,
) -> Place:
    """The place of a process that is one rank."""
    return Place(
        rank=rank,
        world_size=world.value,
        node=here.host,
        launcher=launcher,
        local_rank=local_rank.value if local_rank else None,
        local_world_size=local_size.value if local_size else None,
        node_rank=node.value if node else None,
    )


def block_place(here: Here, launcher: str, ranks: tuple[int, ...], world: Given, node: int | None) -> Place:
    """The place of the first of the ranks that are started on this host."""
    return Place(
        rank=ranks[0],
        world_size=world.value,
        node=here.host,
        launcher=launcher,
        local_rank=0,
        local_world_size=len(ranks),
        node_rank=node,
    )


def ranks_here(asked: Asked) -> int | None:
    """--nproc-per-node, within reason."""
    wanted = option("--nproc-per-node", asked.nproc_per_node)
    check_positive(wanted)
    if wanted is not None and wanted.value > MOST_RANKS_HERE:
        raise UsageError(f"{wanted}: expected at most {MOST_RANKS_HERE}.")
    return None if wanted is None else wanted.value


def check_world(world: Given) -> None:
    """Refuse a world that no cluster holds: lists of its ranks would fill the memory."""
    if world.value > MOST_RANKS:
        raise UsageError(f"{world}: expected at most {MOST_RANKS:,} ranks.")


def refuse_block(asked: Asked, rank: Given) -> None:
    """A process that is a rank starts none."""
    blocks = {"--nproc-per-node": asked.nproc_per_node, "--nnodes": asked.nnodes, "--node-rank": asked.node_rank}
    for name, value in blocks.items():
        if value is not None:
            raise UsageError(f"{name} {value} contradicts {rank}: this process is that rank, and starts no others.")


def refuse_single(asked: Asked, because: str) -> None:
    """A process that starts several ranks is none of them."""
    for name, value in {"--rank": asked.rank, "--local-rank": asked.local_rank}.items():
        if value is not None:
            raise UsageError(f"{name} {value} has no meaning here: {because}.")


def run_id(asked: Asked, own: str | None, *shared: object) -> str:
    """The same in all processes of this launch: asked for, the launcher's own, or from what all `shared`.

    Where people start ranks by hand that is the port alone: they spell the coordinator in many ways (a name, an
    address, localhost), all of which reach it, and a wrong world size is to be told, not to be missed.
    torchrun's run id is "none" unless somebody chose one, so that it tells nobody apart.
    """
    if asked.run_id is not None:
        return asked.run_id
    return values.plain_name(own) if own and own != "none" else values.digest(*shared)
