"""The world of a run, as checks see it: the ranks that joined, their hosts and GPUs."""

from collections.abc import Sequence
from functools import cached_property

from msgspec import Struct

from ddpdiag.model import Arrival, Place, RunOptions


class World(Struct, frozen=True, kw_only=True, dict=True):
    """The ranks of a run: `size` of them should join, and those in `arrivals` joined."""

    size: int
    launcher: str
    options: RunOptions
    arrivals: dict[int, Arrival]
    out: frozenset[int] = frozenset()  # ranks that can take no further part

    @cached_property
    def places(self) -> dict[int, Place]:
        """The place of every rank that joined."""
        return {rank: arrival.place for rank, arrival in self.arrivals.items()}

    @cached_property
    def living(self) -> tuple[int, ...]:
        """The ranks that joined and can take part in a trial."""
        return tuple(rank for rank in self.arrivals if rank not in self.out)

    @cached_property
    def hosts(self) -> dict[tuple[str, str], tuple[int, ...]]:
        """The ranks that joined, by host (name and boot id)."""
        hosts: dict[tuple[str, str], list[int]] = {}
        for rank, arrival in self.arrivals.items():
            hosts.setdefault(arrival.host, []).append(rank)
        return {host: tuple(ranks) for host, ranks in hosts.items()}

    @cached_property
    def ranks_per_core(self) -> float:
        """Ranks per core on the host with the most ranks per core; 0 if no host's cores are known."""
        return max(
            (len(ranks) / cores for ranks in self.hosts.values() if (cores := self.cores_of(ranks))), default=0.0
        )

    def cores_of(self, ranks: Sequence[int]) -> int:
        """The number of processors that at least one of these ranks may use; 0 if not known."""
        mask = 0
        for cpus in {self.arrivals[rank].cpu_mask for rank in ranks}:
            mask |= int(cpus or "0", 16)
        return mask.bit_count()

    @cached_property
    def in_slurm(self) -> bool:
        """Whether Slurm started the run, or started its launcher."""
        return self.launcher == "slurm" or any(arrival.slurm_step for arrival in self.arrivals.values())

    def host_of(self, rank: int) -> str:
        """The host name of a rank, or "?" if it never joined."""
        arrival = self.arrivals.get(rank)
        return arrival.place.host if arrival else "?"

    def hosts_of(self, ranks: Sequence[int]) -> tuple[str, ...]:
        """The host names of those `ranks` that joined, each once, in order."""
        return tuple(dict.fromkeys(self.host_of(rank) for rank in ranks if rank in self.arrivals))

    @cached_property
    def given_leaves(self) -> dict[str, str]:
        """The leaf switch of each host in the user's topology. Names match with or without their domain."""
        known = self.options.topology
        short = {short_name(name): leaf for name, leaf in known.items()}
        leaves = {name: known.get(name, short.get(short_name(name), "")) for name, _ in self.hosts}
        return {name: leaf for name, leaf in leaves.items() if leaf}

    @cached_property
    def gpus(self) -> int:
        """The number of GPUs that ranks may use: the sum, over hosts, of the most GPUs that one rank may use."""
        return sum(max(self.arrivals[rank].gpus for rank in ranks) for ranks in self.hosts.values())

    @cached_property
    def backend(self) -> str:
        """The job's backend: the one of `--backend`, else nccl if every rank has a GPU, else gloo."""
        if self.options.backend != "auto":
            return self.options.backend
        return "nccl" if self.arrivals and all(a.gpus for a in self.arrivals.values()) else "gloo"


# The start of a rank (supervisor, worker, `import torch` with the parts that training needs) takes 3 s of a core
# (measured, torch 2.13): 16 ranks on 2 cores delay each other by 24 s, and none of them hangs. The deadlines of the
# checks allow for two ranks per core.
START_CORE_SECONDS = 3.0
USUAL_RANKS_PER_CORE = 2.0


def crowded_seconds(ranks_per_core: float) -> float:
    """The seconds to add to the deadline of any trial if `ranks_per_core` ranks share each core."""
    return START_CORE_SECONDS * max(0.0, ranks_per_core - USUAL_RANKS_PER_CORE)


# Reasons of several checks to be skipped.
ONE_RANK = "one rank alone has no other rank to communicate with"


def without_gpu(world: World) -> str | None:
    """The reason to skip a check over the job's backend if that is nccl and no rank has a GPU; else None."""
    return "nccl needs GPUs, and no rank has a visible GPU" if world.backend == "nccl" and not world.gpus else None


def short_name(name: str) -> str:
    """A host's name without its domain."""
    return name.partition(".")[0]
