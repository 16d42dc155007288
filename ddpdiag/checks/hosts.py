"""Each host with the data of its ranks, and texts that several checks share."""

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from shlex import quote
from typing import Any, NamedTuple, TypeVar

from ddpdiag.checks.api import Seen
from ddpdiag.model import Finding
from ddpdiag.stats import OddRanks
from ddpdiag.text import fold_hosts, fold_ranks

D = TypeVar("D")

MIB = 1 << 20
GIB = 1 << 30


class Host(NamedTuple):
    """A host: its name, its ranks that joined, and its number of GPUs (the most that one of these ranks may use)."""

    name: str
    ranks: tuple[int, ...]
    gpu_count: int


def hosts_of(seen: Seen[Any]) -> Iterator[Host]:
    """Yield the hosts of the run, in the order in which their first ranks joined."""
    arrivals = seen.world.arrivals
    for (name, _), ranks in seen.world.hosts.items():
        yield Host(name, ranks, max(arrivals[rank].gpus for rank in ranks))


def data_by_host(seen: Seen[D]) -> Iterator[tuple[Host, dict[int, D]]]:
    """Yield each host that has data, with the latest data of its ranks, by rank."""
    for host in hosts_of(seen):
        if data := {rank: seen.by_rank[rank] for rank in host.ranks if rank in seen.by_rank}:
            yield host, data


def ranks_text(ranks: Sequence[int]) -> str:
    """Describe ranks: "rank 3", "ranks 0-3,7". Ranks beyond 8 ranges are counted: "ranks 0-3,7,... and 85 more"."""
    return f"rank{'' if len(ranks) == 1 else 's'} {fold_ranks(ranks, limit=8).replace(' +', ' and ')}"


def subject_text(seen: Seen[Any], ranks: Sequence[int]) -> str:
    """Describe ranks and their hosts: "ranks 0-1 on n1" ("?": unknown host). In `ddpdiag host` only: "host n1"."""
    hosts = names_text(seen.world.host_names(ranks)) or "?"
    return f"host {hosts}" if seen.options.alone else f"{ranks_text(ranks)} on {hosts}"


def names_text(names: Sequence[str], limit: int = 8) -> str:
    """List at most `limit` names (`limit` + 1 if these are all): "n1, n2", or "n1, n2 and 30 more"."""
    shown = names if len(names) <= limit + 1 else names[:limit]
    hidden = len(names) - len(shown)
    return ", ".join(shown) + (f" and {hidden:,} more" if hidden else "")


def leave_out(names: Sequence[str]) -> str:
    """Return the advice to exclude hosts, such as "leave n1, n2 out (Slurm: `--exclude='n[1-2]'`)"."""
    return f"leave {names_text(names)} out (Slurm: `--exclude={quote(fold_hosts(names))}`)"


def errno_text(name: str) -> str:
    """Return the name of an errno with its meaning, such as "ENOENT (No such file or directory)"."""
    number = getattr(errno, name, None)
    return name if number is None else f"{name} ({os.strerror(number)})"


def address_fix(host: str, port: int | str = "PORT") -> str:
    """Return the fix if MASTER_ADDR is a name that does not work. `host` is rank 0's host."""
    return (
        f"Set MASTER_ADDR to an IP address of {host}, rank 0's host, in every process: `export MASTER_ADDR=ADDRESS` "
        f"(`ip -br addr` on {host} shows it; torchrun: `--rdzv-endpoint=ADDRESS:{port}`)."
    )


def nvml_fix(host: str) -> str:
    """Return the fix if NVML does not work on `host`."""
    return (
        f"Run `nvidia-smi` on {host}. If it fails in a container only, start the container with the GPUs (docker: "
        "`--gpus all`). Otherwise `dmesg | grep -i nvrm` (as root) shows the error. Load the driver (`modprobe "
        f"nvidia`), or reboot {host} if it is loaded."
    )


def xid_fix(host: str) -> str:
    """Return the advice to read the kernel log of `host` for the driver's GPU errors (Xids)."""
    return f"As root run `dmesg -T | grep -i xid` on {host} for the cause."


def untested_hosts_finding(seen: Seen[Any], limit: int, subject: str, clause: str) -> Iterator[Finding]:
    """Yield the finding that only `limit` of the hosts tested `subject`. `clause` continues "3 of 9 hosts ..."."""
    hosts = len(seen.world.hosts)
    if hosts > limit:
        yield seen.finding(
            "partly",
            f"only {limit:,} of {hosts:,} hosts tested {subject}",
            f"{limit:,} of {hosts:,} hosts {clause}; this check takes at most {limit:,}. "
            f"{'The other host was' if hosts - limit == 1 else f'The other {hosts - limit:,} hosts were'} not tested.",
            fix="Nothing to do. If you suspect one of the others, run `ddpdiag check` on a smaller allocation that "
            "includes it.",
        )


def odd_text(odd: OddRanks, missing: str, show: Callable[[Sequence[int]], str] = ranks_text) -> str:
    """List values with their ranks, the most common last: "a on rank 3, but b on rank 0". `missing` replaces None."""
    groups = sorted(odd.by_value.items(), key=lambda group: len(group[1]))
    parts = [f"{missing if value is None else value} on {show(ranks)}" for value, ranks in groups]
    shown = parts[:2] + ([f"{len(parts) - 3} other values"] if len(parts) > 3 else []) + parts[2:][-1:]
    return ", ".join(shown[:-1]) + (", but " if len(shown) > 1 else "") + shown[-1]
