"""`Launch`, the result of reading a launcher's variables, and the functions that read and check single values.

Each number is a `Setting`, which keeps its source, so that a message can name the variable or option to change. Each
launcher that sets the rank of every process is a row of `LAUNCHERS`. Slurm needs more (slurm.py).
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


class Setting(Struct, frozen=True):
    """A number, and the name of the variable or option that sets it. It prints as the user would write it."""

    source: str
    value: int

    def __str__(self) -> str:
        return f"{self.source} {self.value}" if self.source.startswith("-") else f"{self.source}={self.value}"


def variable_number(env: Environ, *names: str) -> Setting | None:
    """The number in the first of these variables that is set, or None. UsageError if it is no whole number."""
    name = next((name for name in names if name in env), None)
    if name is None:
        return None
    text = env[name].strip()
    # At most ten digits, which fit an unsigned 32-bit number, such as Slurm's step ids.
    if not re.fullmatch(r"[0-9]{1,10}", text):
        raise UsageError(f"{name}={env[name]!r}: expected a whole number, 0 or more")
    return Setting(name, int(text))


def option_number(name: str, value: int | None) -> Setting | None:
    """The number of a command-line option, or None if the user did not set it. UsageError if it is negative."""
    if value is not None and value < 0:
        raise UsageError(f"{name} {value}: expected a whole number, 0 or more")
    return None if value is None else Setting(name, value)


def agreed_setting(variable: Setting | None, option: Setting | None) -> Setting | None:
    """The setting from the environment or the command line, or None. UsageError if both exist and differ."""
    if variable and option and variable.value != option.value:
        raise UsageError(f"{option} contradicts {variable}: expected the same, or only one of them")
    return variable or option


def require(value: Setting | None, name: str, because: object, expected: str) -> Setting:
    """Return `value`. If it is None, UsageError with `because`, the setting or reason that requires a value."""
    if value is None:
        raise UsageError(f"{because}, but {name} is not given: expected {expected}")
    return value


def check_positive(setting: Setting | None) -> None:
    if setting is not None and setting.value < 1:
        raise UsageError(f"{setting}: expected 1 or more")


def check_below(rank: Setting | None, size: Setting | None) -> None:
    """UsageError if a rank is not below the number of ranks, of its world or on its host."""
    check_positive(size)
    if rank is not None and size is not None and rank.value >= size.value:
        raise UsageError(f"{rank}: expected 0 to {size.value - 1}, because of {size}")


def master_port(env: Environ, option: int | None) -> int | None:
    """MASTER_PORT or --master-port, or None. UsageError if they differ, or if the number is no port."""
    setting = agreed_setting(variable_number(env, "MASTER_PORT"), option_number("--master-port", option))
    if setting is not None and not 1 <= setting.value <= 65535:
        raise UsageError(f"{setting}: expected a port, 1 to 65535")
    return None if setting is None else setting.value


def master_addr(env: Environ, option: str | None) -> str | None:
    """The host name or address in MASTER_ADDR or --master-addr, or None. UsageError if they differ."""
    variable = env.get("MASTER_ADDR", "").strip()
    if variable and option and variable != option:
        raise UsageError(f"--master-addr {option} contradicts MASTER_ADDR={variable}: expected the same")
    if variable:
        return one_host(variable, f"MASTER_ADDR={variable}")
    return one_host(option, f"--master-addr {option}") if option else None


def one_host(name: str, shown_setting: str) -> str:
    """Return `name`. UsageError if it is no single host. The usual mistake is a list of Slurm, such as n[0-3]."""
    if set(name) & set("[],"):
        fix = 'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
        raise UsageError(f"{shown_setting}: expected one host, not a list of hosts; in a Slurm job: {fix}")
    if not name.isprintable() or set(name) & set(" /") or name.count(":") == 1:
        raise UsageError(f"{shown_setting!r}: expected one host name or address, without a port")
    return name


def digest(*parts: object) -> str:
    """A hash of these values, in 16 hexadecimal digits."""
    return hashlib.sha256("\0".join(map(str, parts)).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def derived_port(seed: int) -> int:
    """A port that depends only on the seed. Consecutive seeds give different ports."""
    return DERIVED_PORTS[seed % len(DERIVED_PORTS)]


def safe_name(text: str) -> str:
    """The text if it can be part of a file name, else its digest. Run ids become names of folders."""
    return text if re.fullmatch(r"[A-Za-z0-9._-]{1,64}", text) else digest(text)


# More ranks than this on one host are a typing error.
MAX_RANKS_PER_HOST = 1024
# Eight times the ranks of the largest world in a test (judged from a simulated recording).
MAX_WORLD_SIZE = 1 << 20


class LauncherVariables(Struct, frozen=True, kw_only=True):
    """The names of one launcher's variables. Of several names for one value the first that is set counts."""

    launcher: str
    rank: str
    world_size: tuple[str, ...] = ()
    local_rank: tuple[str, ...] = ()
    local_world_size: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()


TORCHRUN = LauncherVariables(
    launcher="torchrun",
    rank="RANK",
    world_size=("WORLD_SIZE",),
    local_rank=("LOCAL_RANK",),
    local_world_size=("LOCAL_WORLD_SIZE",),
    node_rank=("GROUP_RANK",),
)
# OMPI_COMM_WORLD_NODE_RANK is not the number of a node: it counts the processes of all jobs on a node. It is not read.
OPEN_MPI = LauncherVariables(
    launcher="openmpi",
    rank="OMPI_COMM_WORLD_RANK",
    world_size=("OMPI_COMM_WORLD_SIZE",),
    local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
    local_world_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
)
# PMIx reports the job's size only through its library. Without OMPI_* the user must set --world-size.
PMIX = LauncherVariables(launcher="pmix", rank="PMIX_RANK")
# Set by hydra, the launcher of MPICH and of Intel MPI. The second names are those of Cray's PALS.
PMI = LauncherVariables(
    launcher="pmi",
    rank="PMI_RANK",
    world_size=("PMI_SIZE",),
    local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
    local_world_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
)
# In order of trust: mpirun may start its daemons with srun, and torchrun may run under mpirun or srun.
LAUNCHERS = (TORCHRUN, OPEN_MPI, PMIX, PMI)


# Variables of torchrun that `Place` does not hold. Workers get them unchanged.
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

    `place` is the place of this process, or of the first rank that it starts. `master_addr` is rank 0's host, and
    `port` is MASTER_PORT, None only if this process starts all ranks. `ranks` are the ranks that this process must
    start; they are empty if it is a rank itself. `notice` is a sentence for the user, or empty. `agent_store` says
    whether torchrun's agent serves the store of env://. `unset_variables` names unset variables that scripts often read
    in addition to those of env://. `host_count` is None if unknown. `torchrun_extras` holds torchrun's variables that
    `place` does not hold. `layout` is the host of each rank; it is empty if the launcher does not name the hosts.
    """

    place: Place
    master_addr: str
    port: int | None
    run_id: str
    ranks: tuple[int, ...] = ()
    notice: str = ""
    agent_store: bool = False
    unset_variables: tuple[str, ...] = ()
    host_count: int | None = None
    torchrun_extras: dict[str, str] = field(default_factory=dict)
    layout: tuple[str, ...] = ()

    @property
    def starts_all_ranks(self) -> bool:
        return len(self.ranks) == self.place.world_size

    @property
    def on_loopback(self) -> bool:
        """Whether all ranks connect to rank 0 over a loopback address."""
        return self.starts_all_ranks or self.master_addr == "localhost" or self.master_addr.startswith("127.")

    @property
    def is_local(self) -> bool:
        """Whether all ranks are known to be on this host."""
        return self.on_loopback or self.place.local_world_size == self.place.world_size


def places(launch: Launch) -> tuple[Place, ...]:
    """The places of all ranks that this process starts, or its own place if it is a rank itself."""
    first = launch.place
    if not launch.ranks:
        return (first,)
    return tuple(structs.replace(first, rank=rank, local_rank=index) for index, rank in enumerate(launch.ranks))


def worker_variables(launch: Launch, place: Place, master_port: int) -> dict[str, str]:
    """The variables that torchrun would set for a worker. Unknown values are left out, not guessed."""
    local_size, host_count = place.local_world_size, launch.host_count
    if host_count is None and local_size and place.world_size % local_size == 0:
        host_count = place.world_size // local_size
    known: dict[str, int | str | None] = {
        "RANK": place.rank,
        "WORLD_SIZE": place.world_size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": local_size,
        "GROUP_RANK": place.node_rank,
        "GROUP_WORLD_SIZE": host_count,
        "ROLE_RANK": place.rank,
        "ROLE_WORLD_SIZE": place.world_size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": launch.master_addr,
        "MASTER_PORT": master_port,
        "TORCHELASTIC_RUN_ID": launch.run_id,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
    }
    return {name: str(value) for name, value in known.items() if value is not None} | launch.torchrun_extras


class ThisHost(Struct, frozen=True, kw_only=True):
    """This host's name, the numbers of GPUs and cores that this process may use, and an id that no other run has."""

    name: str
    gpus: int
    cores: int
    unique_id: str


def make_place(
    host: ThisHost,
    launcher: str,
    rank: int,
    world: Setting,
    *,
    local_rank: Setting | int | None = None,
    local_size: Setting | int | None = None,
    node_rank: Setting | int | None = None,
) -> Place:
    def plain(number: Setting | int | None) -> int | None:
        return number.value if isinstance(number, Setting) else number

    return Place(
        rank=rank,
        world_size=world.value,
        host=host.name,
        launcher=launcher,
        local_rank=plain(local_rank),
        local_world_size=plain(local_size),
        node_rank=plain(node_rank),
    )


def requested_rank_count(args: LaunchArgs, host: ThisHost) -> int | None:
    """Number of ranks by --nproc-per-node, or None. The words gpu, cpu and auto mean the same as for torchrun."""
    match args.nproc_per_node:
        case "gpu" if not host.gpus:
            raise UsageError("--nproc-per-node gpu: no GPU is visible on this host; give a number, or cpu")
        case "auto" | "gpu" if host.gpus:
            return host.gpus
        case str():
            return host.cores
    wanted = option_number("--nproc-per-node", args.nproc_per_node)
    check_positive(wanted)
    if wanted is not None and wanted.value > MAX_RANKS_PER_HOST:
        raise UsageError(f"{wanted}: expected at most {MAX_RANKS_PER_HOST}")
    return None if wanted is None else wanted.value


def check_world(world: Setting) -> None:
    """UsageError for a world larger than any cluster, because lists of its ranks would fill the memory."""
    if world.value > MAX_WORLD_SIZE:
        raise UsageError(f"{world}: expected at most {MAX_WORLD_SIZE:,} ranks")


def refuse_multi_rank_options(args: LaunchArgs, rank: Setting) -> None:
    """UsageError if an option starts several ranks, although this process is the rank `rank`."""
    blocks = {"--nproc-per-node": args.nproc_per_node, "--nnodes": args.nnodes, "--node-rank": args.node_rank}
    for name, value in blocks.items():
        if value is not None:
            raise UsageError(f"{name} {value} contradicts {rank}: this process is that rank, and starts no others")


def refuse_one_rank_options(args: LaunchArgs, because: str) -> None:
    """UsageError if an option sets one rank, although this process starts several, for the reason `because`."""
    for name, value in {"--rank": args.rank, "--local-rank": args.local_rank}.items():
        if value is not None:
            raise UsageError(f"{name} {value} has no meaning here: {because}")


def run_id(args: LaunchArgs, launcher_id: str | None, *shared_values: object) -> str:
    """The run's id, the same in all its processes: --run-id, the launcher's id, or a digest of `shared_values`.

    For ranks started by hand, the port is the only shared value: people spell rank 0's host in many ways (a name, an
    address, localhost), and a rank with a wrong world size must find this run, so that it can be reported. torchrun's
    run id is "none" unless the user chose one, so "none" does not distinguish runs.
    """
    if args.run_id is not None:
        return args.run_id
    return safe_name(launcher_id) if launcher_id and launcher_id != "none" else digest(*shared_values)
