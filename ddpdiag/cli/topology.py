"""`--topology FILE`: which leaf switch (or rack) each host hangs on."""

import re
from collections.abc import Iterator

from ddpdiag.codec import read_bytes, readable
from ddpdiag.errors import UsageError
from ddpdiag.probes.host.environment import expanded

# A line of 100 bytes for each of 65,536 hosts.
_MOST_BYTES = 8 << 20
_HOST_NAME = re.compile(r"[\w.:-]+")
# Slurm's topology.conf; parameter names are case insensitive there. What names no hosts is an upper level.
_SWITCHES = ("switchname", "blockname")
_KNOWN = (*_SWITCHES, "nodes", "switches", "linkspeed", "blocksizes")


def read_topology(path: str) -> dict[str, str]:
    """The leaf of each host: "host leaf" a line, or Slurm's "SwitchName=leaf Nodes=n[0-31]"; "#" begins a comment."""
    leaves: dict[str, str] = {}
    for number, line in _lines(path):
        where = f"--topology {path}, line {number}"
        words = line.split()
        if "=" in words[0]:
            for host, leaf in _slurm(words, where).items():
                leaves.setdefault(host, leaf)  # Slurm lets a host hang on several leaves
            continue
        if len(words) != 2:
            raise UsageError(f"{where}: {readable(line)!r}: expected HOST LEAF, or SwitchName=LEAF Nodes=HOSTS")
        for host in _hosts(words[0], where):
            if leaves.setdefault(host, words[1]) != words[1]:
                raise UsageError(f"{where}: {host} is on {words[1]} here, and on {leaves[host]} above")
    if not leaves:
        raise UsageError(f"--topology {path}: it names no host; expected HOST LEAF, one host a line")
    return leaves


def _lines(path: str) -> Iterator[tuple[int, str]]:
    """Lines that say something, without comments; one that ends in a backslash goes on in the next."""
    try:
        text = read_bytes(path, _MOST_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise UsageError(f"--topology {path}: {reason}") from error
    begun = ""
    for number, line in enumerate(text.splitlines(), 1):
        whole = begun + line.partition("#")[0].strip()
        begun = whole.removesuffix("\\") if whole.endswith("\\") else ""
        if whole and not begun:
            yield number, whole


def _slurm(words: list[str], where: str) -> dict[str, str]:
    """The hosts of one switch; none of an upper level."""
    values: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not value or name.lower() not in _KNOWN:
            raise UsageError(f"{where}: {readable(word)!r}: expected SwitchName=LEAF Nodes=HOSTS")
        values[name.lower()] = value
    leaf = next((values[name] for name in _SWITCHES if name in values), None)
    if leaf is None and "nodes" in values:
        raise UsageError(f"{where}: Nodes without SwitchName: expected SwitchName=LEAF Nodes=HOSTS")
    return dict.fromkeys(_hosts(values["nodes"], where), leaf) if leaf and "nodes" in values else {}


def _hosts(nodelist: str, where: str) -> tuple[str, ...]:
    """The hosts of "n[0-31]": with Slurm's own grammar, in which no name is a group, and no list fills the memory."""
    hosts = expanded(nodelist) if nodelist.count("[") == nodelist.count("]") else ()
    if not hosts or not all(map(_HOST_NAME.fullmatch, hosts)):
        raise UsageError(f"{where}: {readable(nodelist)!r}: expected a host, or a list of hosts such as n[0-31,40]")
    return hosts
