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
    """A host: its name, the ranks that joined from it, and the most GPUs that one of these ranks may use."""

    name: str
    ranks: tuple[int, ...]
    gpus: int


def hosts_of(seen: Seen[Any]) -> Iterator[Host]:
    """The hosts of the run, in order of their first rank."""
    arrivals = seen.world.arrivals
    for (name, _), ranks in seen.world.hosts.items():
        yield Host(name, ranks, max(arrivals[rank].gpus for rank in ranks))


def answers_by_host(seen: Seen[D]) -> Iterator[tuple[Host, dict[int, D]]]:
    """Each host with the latest data of its ranks, by rank. Hosts without data are left out."""
    answers = seen.by_rank
    for host in hosts_of(seen):
        if own := {rank: answers[rank] for rank in host.ranks if rank in answers}:
            yield host, own


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks in words: "rank 3", "ranks 0-3,7" or, after 8 ranges, "ranks 0-3,7,... and 85 more" (ranks)."""
    return f"rank{'' if len(ranks) == 1 else 's'} {fold_ranks(ranks, limit=8).replace(' +', ' and ')}"


def who_text(seen: Seen[Any], ranks: Sequence[int]) -> str:
    """Ranks and hosts in words: "ranks 0-1 on n1" ("?": unknown host), or "host n1" in `ddpdiag host`."""
    hosts = names_text(seen.world.hosts_of(ranks)) or "?"
    return f"host {hosts}" if seen.options.alone else f"{ranks_text(ranks)} on {hosts}"


def names_text(names: Sequence[str], most: int = 8) -> str:
    """At most `most` names: "n1, n2" or "n1, n2 and 30 more". If only one more exists, its name is shown as well."""
    shown = names if len(names) <= most + 1 else names[:most]
    hidden = len(names) - len(shown)
    return ", ".join(shown) + (f" and {hidden:,} more" if hidden else "")


def leave_out(names: Sequence[str]) -> str:
    """The advice to exclude hosts, such as "leave n1, n2 out (Slurm: `--exclude='n[1-2]'`)"."""
    return f"leave {names_text(names)} out (Slurm: `--exclude={quote(fold_hosts(names))}`)"


def errno_text(name: str) -> str:
    """The name of an errno with its meaning, such as "ENOENT (No such file or directory)"."""
    number = getattr(errno, name, None)
    return name if number is None else f"{name} ({os.strerror(number)})"


def use_address(node: str, port: int | str = "PORT") -> str:
    """The fix if MASTER_ADDR is a name that does not work. `node` is the host of rank 0."""
    return (
        f"Set MASTER_ADDR to an IP address of {node}, rank 0's host, in every process: `export MASTER_ADDR=ADDRESS` "
        f"(`ip -br addr` on {node} shows it; torchrun: `--rdzv-endpoint=ADDRESS:{port}`)."
    )


def nvml_fix(host: str) -> str:
    """The fix if NVML does not answer on `host`."""
    return (
        f"Run `nvidia-smi` on {host}. If it fails in a container only, start the container with the GPUs (docker: "
        "`--gpus all`). Otherwise `dmesg | grep -i nvrm` (as root) shows the error. Load the driver (`modprobe "
        f"nvidia`), or reboot {host} if it is loaded."
    )


def xid_fix(host: str) -> str:
    """The advice to run the command that shows why the driver gave up a GPU."""
    return f"As root run `dmesg -T | grep -i xid` on {host} for the cause."


def left_out(seen: Seen[Any], most: int, what: str, tried: str) -> Iterator[Finding]:
    """A finding if only `most` of the hosts tested `what`. `tried` says the same after "3 of 9 hosts"."""
    hosts = len(seen.world.hosts)
    if hosts > most:
        yield seen.finding(
            "partly",
            f"only {most:,} of {hosts:,} hosts tested {what}",
            f"{most:,} of {hosts:,} hosts {tried}; this check takes at most {most:,}. "
            f"{'The other host was' if hosts - most == 1 else f'The other {hosts - most:,} hosts were'} not tested.",
            fix="Nothing to do. If you suspect one of the others, run `ddpdiag check` on a smaller allocation that "
            "includes it.",
        )


def odd_text(odd: OddRanks, missing: str, where: Callable[[Sequence[int]], str] = ranks_text) -> str:
    """Values with their ranks, the most common last: "a on rank 3, but b on ranks 0-2". `missing` replaces None."""
    groups = sorted(odd.by_value.items(), key=lambda group: len(group[1]))
    parts = [f"{missing if value is None else value} on {where(ranks)}" for value, ranks in groups]
    shown = parts[:2] + ([f"{len(parts) - 3} other values"] if len(parts) > 3 else []) + parts[2:][-1:]
    return ", ".join(shown[:-1]) + (", but " if len(shown) > 1 else "") + shown[-1]
