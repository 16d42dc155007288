"""The world of a run: the ranks that joined, and their hosts and GPUs."""

from collections.abc import Sequence
from functools import cached_property

from msgspec import Struct

from ddpdiag.model import Arrival, Place, RunOptions


class World(Struct, frozen=True, kw_only=True, dict=True):
    """The ranks of a run. `size` ranks should join; `arrivals` has the first message of each rank that joined."""

    size: int
    launcher: str
    options: RunOptions
    arrivals: dict[int, Arrival]
    inactive_ranks: frozenset[int] = frozenset()  # ranks that can take part in no further trial

    @cached_property
    def places(self) -> dict[int, Place]:
        """The place of each rank that joined."""
        return {rank: arrival.place for rank, arrival in self.arrivals.items()}

    @cached_property
    def living_ranks(self) -> tuple[int, ...]:
        """The ranks that joined and can still take part in trials."""
        return tuple(rank for rank in self.arrivals if rank not in self.inactive_ranks)

    @cached_property
    def hosts(self) -> dict[tuple[str, str], tuple[int, ...]]:
        """The ranks that joined, by host (name and boot id)."""
        hosts: dict[tuple[str, str], list[int]] = {}
        for rank, arrival in self.arrivals.items():
            hosts.setdefault(arrival.host, []).append(rank)
        return {host: tuple(ranks) for host, ranks in hosts.items()}

    @cached_property
    def ranks_per_core(self) -> float:
        """The largest number of ranks per core of any host; 0 if no host's cores are known."""
        counts = ((len(ranks), self.core_count_of(ranks)) for ranks in self.hosts.values())
        return max((ranks / cores for ranks, cores in counts if cores), default=0.0)

    def core_count_of(self, ranks: Sequence[int]) -> int:
        """Return the number of cores that these ranks may use together; 0 if it is not known."""
        mask = 0
        for cpus in {self.arrivals[rank].cpu_mask for rank in ranks}:
            mask |= int(cpus or "0", 16)
        return mask.bit_count()

    @cached_property
    def in_slurm(self) -> bool:
        """Whether Slurm started the run, or started its launcher."""
        return self.launcher == "slurm" or any(arrival.slurm_step for arrival in self.arrivals.values())

    def host_name(self, rank: int) -> str:
        """Return the host name of a rank, or "?" if the rank never joined."""
        arrival = self.arrivals.get(rank)
        return arrival.place.host if arrival else "?"

    def host_names(self, ranks: Sequence[int]) -> tuple[str, ...]:
        """Return the host names of those `ranks` that joined, each name once, in order."""
        return tuple(dict.fromkeys(self.host_name(rank) for rank in ranks if rank in self.arrivals))

    @cached_property
    def leaf_by_host(self) -> dict[str, str]:
        """The leaf switch of each host that the user's topology names, with or without the host's domain."""
        known = self.options.topology
        short = {short_name(name): leaf for name, leaf in known.items()}
        leaves = {name: known.get(name, short.get(short_name(name), "")) for name, _ in self.hosts}
        return {name: leaf for name, leaf in leaves.items() if leaf}

    @cached_property
    def gpu_count(self) -> int:
        """The number of GPUs in the run. Each host counts with the most GPUs that one of its ranks may use."""
        return sum(max(self.arrivals[rank].gpus for rank in ranks) for ranks in self.hosts.values())

    @cached_property
    def backend(self) -> str:
        """The job's backend: the value of `--backend`; by default nccl if every rank has a GPU, else gloo."""
        if self.options.backend != "auto":
            return self.options.backend
        return "nccl" if self.arrivals and all(a.gpus for a in self.arrivals.values()) else "gloo"


# The start of a rank (supervisor, worker, `import torch` with the parts that training needs) takes 3 s of a core
# (measured, torch 2.13). So 16 ranks on 2 cores delay each other by 24 s, although none of them hangs. The deadlines of
# the checks allow for two ranks per core.
START_CORE_SECONDS = 3.0
USUAL_RANKS_PER_CORE = 2.0


def extra_deadline_seconds(ranks_per_core: float) -> float:
    """Return the seconds to add to the deadline of each trial if `ranks_per_core` ranks share a core."""
    return START_CORE_SECONDS * max(0.0, ranks_per_core - USUAL_RANKS_PER_CORE)


ONE_RANK_REASON = "one rank alone has no other rank to communicate with"


def no_gpu_reason(world: World) -> str | None:
    """Return the reason to skip checks over nccl if this is the job's backend and no rank has a GPU; else None."""
    return "nccl needs GPUs, and no rank has a visible GPU" if world.backend == "nccl" and not world.gpu_count else None


def short_name(name: str) -> str:
    """Return a host's name without its domain."""
    return name.partition(".")[0]
