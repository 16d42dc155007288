"""The result of reading the launcher's variables, a `Launch`, and tables of the names of these variables.

Each value is kept with its source, so that a message can name what to change. A launcher that sets the rank of each
process is a row of `LAUNCHERS`; Slurm needs more (slurm.py).
"""

import hashlib
import re
from collections.abc import Mapping

from msgspec import Struct, field, structs

from ddpdiag.errors import UsageError
from ddpdiag.model import Place
from ddpdiag.model.launch import LaunchArgs

TORCH_PORT = 29500  # the default of torchrun and of torch.distributed.launch

# Below the ephemeral ports (32768 on Linux), above the ports of common services, and without TORCH_PORT.
DERIVED_PORTS = range(20000, 29000)

Environ = Mapping[str, str]


class Given(Struct, frozen=True):
    """A number and its source (a variable or an option); prints as the user would write it."""

    source: str
    value: int

    def __str__(self) -> str:
        return f"{self.source} {self.value}" if self.source.startswith("-") else f"{self.source}={self.value}"


def number(env: Environ, *names: str) -> Given | None:
    """The whole number in the first of these variables that is set, or None. UsageError for any other text."""
    name = next((name for name in names if name in env), None)
    if name is None:
        return None
    text = env[name].strip()
    # At most ten digits, which fit an unsigned 32-bit number, such as Slurm's step ids.
    if not re.fullmatch(r"[0-9]{1,10}", text):
        raise UsageError(f"{name}={env[name]!r}: expected a whole number, 0 or more")
    return Given(name, int(text))


def option(name: str, value: int | None) -> Given | None:
    """The value of a command-line option with its name, or None if it is not given. UsageError if it is negative."""
    if value is not None and value < 0:
        raise UsageError(f"{name} {value}: expected a whole number, 0 or more")
    return None if value is None else Given(name, value)


def agreed(variable: Given | None, given: Given | None) -> Given | None:
    """The value that the environment, the command line or both give, or None. UsageError if they differ."""
    if variable and given and variable.value != given.value:
        raise UsageError(f"{given} contradicts {variable}: expected the same, or only one of them")
    return variable or given


def needed(value: Given | None, name: str, because: object, expected: str) -> Given:
    """The value; UsageError if it is None."""
    if value is None:
        raise UsageError(f"{because}, but {name} is not given: expected {expected}")
    return value


def check_positive(setting: Given | None) -> None:
    """UsageError for a size of zero."""
    if setting is not None and setting.value < 1:
        raise UsageError(f"{setting}: expected 1 or more")


def check_below(rank: Given | None, size: Given | None) -> None:
    """UsageError for a rank outside its world or its host."""
    check_positive(size)
    if rank is not None and size is not None and rank.value >= size.value:
        raise UsageError(f"{rank}: expected 0 to {size.value - 1}, because of {size}")


def master_port(env: Environ, given: int | None) -> int | None:
    """MASTER_PORT or --master-port, or None. UsageError if they differ, or if the value is no port."""
    setting = agreed(number(env, "MASTER_PORT"), option("--master-port", given))
    if setting is not None and not 1 <= setting.value <= 65535:
        raise UsageError(f"{setting}: expected a port, 1 to 65535")
    return None if setting is None else setting.value


def master_addr(env: Environ, given: str | None) -> str | None:
    """MASTER_ADDR or --master-addr, or None: one host name or address. UsageError if they differ."""
    variable = env.get("MASTER_ADDR", "").strip()
    if variable and given and variable != given:
        raise UsageError(f"--master-addr {given} contradicts MASTER_ADDR={variable}: expected the same")
    if variable:
        return one_host(variable, f"MASTER_ADDR={variable}")
    return one_host(given, f"--master-addr {given}") if given else None


def one_host(name: str, setting: str) -> str:
    """`name`; UsageError if it cannot be a single host. Slurm's compressed lists are the usual mistake."""
    if set(name) & set("[],"):
        fix = 'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
        raise UsageError(f"{setting}: expected one host, not a list of hosts; in a Slurm job: {fix}")
    if not name.isprintable() or set(name) & set(" /") or name.count(":") == 1:
        raise UsageError(f"{setting!r}: expected one host name or address, without a port")
    return name


def digest(*parts: object) -> str:
    """A short text for these values, equal in every process that has the same values."""
    return hashlib.sha256("\0".join(map(str, parts)).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def derived_port(seed: int) -> int:
    """A port that depends only on the seed; neighbouring seeds give different ports."""
    return DERIVED_PORTS[seed % len(DERIVED_PORTS)]


def plain_name(text: str) -> str:
    """The text if it can be part of a file name, else its digest, because run ids become names of folders."""
    return text if re.fullmatch(r"[A-Za-z0-9._-]{1,64}", text) else digest(text)


# More ranks than this on one host are a typing error.
MOST_RANKS_HERE = 1024
# Eight times the ranks of the largest world in a test (judged from a simulated recording).
MOST_RANKS = 1 << 20


class Names(Struct, frozen=True, kw_only=True):
    """The variables of one launcher; if several names are given for a value, the first that is set counts."""

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
# OMPI_COMM_WORLD_NODE_RANK is not the number of a node: it counts the processes of all jobs on a node. It is not read.
OPEN_MPI = Names(
    launcher="openmpi",
    rank="OMPI_COMM_WORLD_RANK",
    world_size=("OMPI_COMM_WORLD_SIZE",),
    local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
    local_world_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
)
# PMIx tells the job's size only through its library; without OMPI_* the user must give --world-size.
PMIX = Names(launcher="pmix", rank="PMIX_RANK")
# Set by hydra of MPICH and of Intel; the second names are of Cray's PALS.
PMI = Names(
    launcher="pmi",
    rank="PMI_RANK",
    world_size=("PMI_SIZE",),
    local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
    local_world_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
)
# In order of trust: mpirun may start its daemons with srun, and torchrun may run under mpirun or srun.
LAUNCHERS = (TORCHRUN, OPEN_MPI, PMIX, PMI)


# Variables of torchrun beyond `Place`; workers get them unchanged.
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
    """The way in which this process was launched.

    `place` is the place of this process, or of the first rank that it starts. `coordinator` is rank 0's host
    (MASTER_ADDR). `port` is MASTER_PORT; it is None only if this process starts the whole world. `ranks` are the ranks
    that this process must start, none if it is a rank itself. `note` is a sentence for the user. `agent_store`:
    torchrun's agent serves the store of env://. `nodes` is the number of hosts, if known. `given` holds torchrun's
    variables beyond `place`. `layout` is the host of each rank, empty if the launcher does not tell. `lacks` names
    variables that are not set, but that scripts read beside those of env://.
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
        """Whether this process starts all ranks of the world."""
        return len(self.ranks) == self.place.world_size

    @property
    def on_loopback(self) -> bool:
        """Whether all ranks connect over an address that never leaves this host."""
        return self.whole or self.coordinator == "localhost" or self.coordinator.startswith("127.")

    @property
    def is_local(self) -> bool:
        """Whether all ranks are known to be on this host."""
        return self.on_loopback or self.place.local_world_size == self.place.world_size


def places(launch: Launch) -> tuple[Place, ...]:
    """The places of all ranks that this process starts, or its own place if it is a rank."""
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
    """This host: its name, the GPUs and cores that this process may use, and a `fresh` id that no other run has."""

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
    """The place of a process that is one rank, or of the first rank that it starts."""

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


def ranks_here(args: LaunchArgs, here: Here) -> int | None:
    """Number of ranks on this host by --nproc-per-node, or None; its words mean the same as for torchrun."""
    match args.nproc_per_node:
        case "gpu" if not here.gpus:
            raise UsageError("--nproc-per-node gpu: no GPU is visible on this host; give a number, or cpu")
        case "auto" | "gpu" if here.gpus:
            return here.gpus
        case str():
            return here.cores
    wanted = option("--nproc-per-node", args.nproc_per_node)
    check_positive(wanted)
    if wanted is not None and wanted.value > MOST_RANKS_HERE:
        raise UsageError(f"{wanted}: expected at most {MOST_RANKS_HERE}")
    return None if wanted is None else wanted.value


def check_world(world: Given) -> None:
    """UsageError for a world larger than any cluster, because lists of its ranks would fill the memory."""
    if world.value > MOST_RANKS:
        raise UsageError(f"{world}: expected at most {MOST_RANKS:,} ranks")


def refuse_block(args: LaunchArgs, rank: Given) -> None:
    """UsageError for options that start several ranks, if this process is a rank."""
    blocks = {"--nproc-per-node": args.nproc_per_node, "--nnodes": args.nnodes, "--node-rank": args.node_rank}
    for name, value in blocks.items():
        if value is not None:
            raise UsageError(f"{name} {value} contradicts {rank}: this process is that rank, and starts no others")


def refuse_single(args: LaunchArgs, because: str) -> None:
    """UsageError for the options of one rank, if this process starts several."""
    for name, value in {"--rank": args.rank, "--local-rank": args.local_rank}.items():
        if value is not None:
            raise UsageError(f"{name} {value} has no meaning here: {because}")


def run_id(args: LaunchArgs, launcher_id: str | None, *shared: object) -> str:
    """The run's id, the same in all its processes: --run-id, the launcher's id, or a digest of the `shared` values.

    If people start ranks by hand, only the port is shared: they spell the coordinator in many ways (a name, an address,
    localhost), and a rank with a wrong world size must find this run, so that it can be reported. torchrun's run id is
    "none" unless the user chose one, so it does not distinguish runs.
    """
    if args.run_id is not None:
        return args.run_id
    return plain_name(launcher_id) if launcher_id and launcher_id != "none" else digest(*shared)
