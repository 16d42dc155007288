"""The variables that launchers set, as a table of names, and the result: a `Launch`.

Each value goes with its source, so that a message can name what to change. Launchers that set a rank for each process
are rows of `LAUNCHERS`; Slurm needs more (slurm.py).
"""

import hashlib
import re
from collections.abc import Mapping

from msgspec import Struct, field, structs

from ddpdiag.errors import UsageError
from ddpdiag.model import Place
from ddpdiag.model.launch import LaunchArgs

TORCH_PORT = 29500  # the default of torchrun and of torch.distributed.launch

# Below the ephemeral ports (32768 on Linux), above what services use, and without TORCH_PORT.
DERIVED_PORTS = range(20000, 29000)

Environ = Mapping[str, str]


class Given(Struct, frozen=True):
    """A number and its source; prints as the user would write it."""

    source: str
    value: int

    def __str__(self) -> str:
        return f"{self.source} {self.value}" if self.source.startswith("-") else f"{self.source}={self.value}"


def number(env: Environ, *names: str) -> Given | None:
    """The whole number in the first of these variables that is set."""
    name = next((name for name in names if name in env), None)
    if name is None:
        return None
    text = env[name].strip()
    # At most what an unsigned 32-bit number needs: Slurm's step ids are such.
    if not re.fullmatch(r"[0-9]{1,10}", text):
        raise UsageError(f"{name}={env[name]!r}: expected a whole number, 0 or more")
    return Given(name, int(text))


def option(name: str, value: int | None) -> Given | None:
    """The command line's value for one option."""
    if value is not None and value < 0:
        raise UsageError(f"{name} {value}: expected a whole number, 0 or more")
    return None if value is None else Given(name, value)


def agreed(variable: Given | None, given: Given | None) -> Given | None:
    """A value that environment and command line may both give, if they agree."""
    if variable and given and variable.value != given.value:
        raise UsageError(f"{given} contradicts {variable}: expected the same, or only one of them")
    return variable or given


def needed(found: Given | None, name: str, because: object, expected: str) -> Given:
    """The value, which must have been given."""
    if found is None:
        raise UsageError(f"{because}, but {name} is not given: expected {expected}")
    return found


def check_positive(said: Given | None) -> None:
    """Refuse a size of zero."""
    if said is not None and said.value < 1:
        raise UsageError(f"{said}: expected 1 or more")


def check_below(rank: Given | None, size: Given | None) -> None:
    """Refuse a rank outside its world, or host."""
    check_positive(size)
    if rank is not None and size is not None and rank.value >= size.value:
        raise UsageError(f"{rank}: expected 0 to {size.value - 1}, because of {size}")


def master_port(env: Environ, given: int | None) -> int | None:
    """MASTER_PORT or --master-port."""
    said = agreed(number(env, "MASTER_PORT"), option("--master-port", given))
    if said is not None and not 1 <= said.value <= 65535:
        raise UsageError(f"{said}: expected a port, 1 to 65535")
    return None if said is None else said.value


def master_addr(env: Environ, given: str | None) -> str | None:
    """MASTER_ADDR or --master-addr: one host name or address."""
    variable = env.get("MASTER_ADDR", "").strip()
    if variable and given and variable != given:
        raise UsageError(f"--master-addr {given} contradicts MASTER_ADDR={variable}: expected the same")
    if variable:
        return one_host(variable, f"MASTER_ADDR={variable}")
    return one_host(given, f"--master-addr {given}") if given else None


def one_host(name: str, said: str) -> str:
    """The name, if it can be a single host: Slurm's compressed lists are the usual mistake."""
    if set(name) & set("[],"):
        fix = 'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
        raise UsageError(f"{said}: expected one host, not a list of hosts; in a Slurm job: {fix}")
    if not name.isprintable() or set(name) & set(" /") or name.count(":") == 1:
        raise UsageError(f"{said!r}: expected one host name or address, without a port")
    return name


def digest(*parts: object) -> str:
    """A short name for these values, the same in every process that knows them."""
    return hashlib.sha256("\0".join(map(str, parts)).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def derived_port(seed: int) -> int:
    """A port for those who share the seed; neighbouring seeds do not meet."""
    return DERIVED_PORTS[seed % len(DERIVED_PORTS)]


def plain_name(text: str) -> str:
    """The text if it can be part of a file name, else its digest: run ids become names of directories."""
    return text if re.fullmatch(r"[A-Za-z0-9._-]{1,64}", text) else digest(text)


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
# PMIx offers its job size through its library only; without OMPI_* it must be given by --world-size.
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


# Variables of torchrun beyond `Place`; workers see them unchanged.
TORCHRUN_EXTRAS = (
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
)


class Launch(Struct, frozen=True, kw_only=True):
    """The launch of this process.

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
        """Whether the whole world is on this host, started by this process."""
        return len(self.ranks) == self.place.world_size

    @property
    def on_loopback(self) -> bool:
        """Whether all ranks meet over an address that never leaves this host."""
        return self.whole or self.coordinator == "localhost" or self.coordinator.startswith("127.")

    @property
    def is_local(self) -> bool:
        """Whether all ranks are known to be on this host."""
        return self.on_loopback or self.place.local_world_size == self.place.world_size


def places(launch: Launch) -> tuple[Place, ...]:
    """The places of all ranks that this process stands for."""
    first = launch.place
    if not launch.ranks:
        return (first,)
    return tuple(structs.replace(first, rank=rank, local_rank=index) for index, rank in enumerate(launch.ranks))


def worker_variables(launch: Launch, place: Place, master_port: int) -> dict[str, str]:
    """torchrun's variables for a worker, under every launcher; unknown values are left out, not guessed."""
    local_size, nodes = place.local_world_size, launch.nodes
    if nodes is None and local_size and place.world_size % local_size == 0:
        nodes = place.world_size // local_size
    known: dict[str, int | str | None] = {
        "RANK": place.rank,
        "WORLD_SIZE": place.world_size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": local_size,
        "GROUP_RANK": place.node_rank,
        "GROUP_WORLD_SIZE": nodes,
        "ROLE_RANK": place.rank,
        "ROLE_WORLD_SIZE": place.world_size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": launch.coordinator,
        "MASTER_PORT": master_port,
        "TORCHELASTIC_RUN_ID": launch.run_id,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
    }
    return {name: str(value) for name, value in known.items() if value is not None} | launch.given


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
    local_rank: Given | int | None = None,
    local_size: Given | int | None = None,
    node: Given | int | None = None,
) -> Place:
    """The place of a process that is one rank, or starts several and stands for the first of them."""

    def plain(given: Given | int | None) -> int | None:
        return given.value if isinstance(given, Given) else given

    return Place(
        rank=rank,
        world_size=world.value,
        host=here.host,
        launcher=launcher,
        local_rank=plain(local_rank),
        local_world_size=plain(local_size),
        node_rank=plain(node),
    )


def ranks_here(asked: LaunchArgs, here: Here) -> int | None:
    """--nproc-per-node, within reason; the words have the meaning that torchrun gives them."""
    match asked.nproc_per_node:
        case "gpu" if not here.gpus:
            raise UsageError("--nproc-per-node gpu: no GPU is visible on this host; give a number, or cpu")
        case "auto" | "gpu" if here.gpus:
            return here.gpus
        case str():
            return here.cores
    wanted = option("--nproc-per-node", asked.nproc_per_node)
    check_positive(wanted)
    if wanted is not None and wanted.value > MOST_RANKS_HERE:
        raise UsageError(f"{wanted}: expected at most {MOST_RANKS_HERE}")
    return None if wanted is None else wanted.value


def check_world(world: Given) -> None:
    """Refuse a world that no cluster holds: lists of its ranks would fill the memory."""
    if world.value > MOST_RANKS:
        raise UsageError(f"{world}: expected at most {MOST_RANKS:,} ranks")


def refuse_block(asked: LaunchArgs, rank: Given) -> None:
    """A process that is a rank starts none."""
    blocks = {"--nproc-per-node": asked.nproc_per_node, "--nnodes": asked.nnodes, "--node-rank": asked.node_rank}
    for name, value in blocks.items():
        if value is not None:
            raise UsageError(f"{name} {value} contradicts {rank}: this process is that rank, and starts no others")


def refuse_single(asked: LaunchArgs, because: str) -> None:
    """A process that starts several ranks is none of them."""
    for name, value in {"--rank": asked.rank, "--local-rank": asked.local_rank}.items():
        if value is not None:
            raise UsageError(f"{name} {value} has no meaning here: {because}")


def run_id(asked: LaunchArgs, own: str | None, *shared: object) -> str:
    """The same in all processes of this launch: asked for, the launcher's own, or from what all `shared`.

    Where people start ranks by hand that is the port alone: they spell the coordinator in many ways (a name, an
    address, localhost), all of which reach it, and a wrong world size is to be told, not to be missed.
    torchrun's run id is "none" unless the user chose one, so it does not tell runs apart.
    """
    if asked.run_id is not None:
        return asked.run_id
    return plain_name(own) if own and own != "none" else digest(*shared)
