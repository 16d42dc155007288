"""What hosts find in a shared directory, each by itself: can it write and lock, and is there room? Part of RDZ006."""

from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from ddpdiag.checks.api import Seen
from ddpdiag.checks.hosts import names_text
from ddpdiag.model import Finding, Scalar, Severity
from ddpdiag.probes.host.shared_files import Mount, Space, Store
from ddpdiag.text import size_text

_MIB = 1 << 20


class Data(Struct, frozen=True, kw_only=True):
    """What one host found; errors are errno names, None where it went well.

    `unseen`, `seconds` and `lock_is_local` are those of a `View`. `stores` are looked for by rank 0's host.
    """

    directory: str
    mount: Mount | None = None
    space: Space | None = None
    error: str | None = None
    flock: str | None = None
    lockf: str | None = None
    unseen: tuple[int, ...] = ()
    seconds: float = 0.0
    lock_is_local: bool | None = None
    stores: tuple[Store, ...] = ()

    @property
    def name(self) -> str:
        """Such as "/shared (nfs4)"."""
        return f"{self.directory} ({self.mount.kind})" if self.mount else self.directory

    @property
    def room(self) -> str:
        """Such as " (0 B free, 17 free inodes)"."""
        if self.space is None:
            return ""
        inodes = "" if self.space.free_inodes is None else f", {self.space.free_inodes} free inodes"
        return f" ({size_text(self.space.free_bytes)} free{inodes})"

    @property
    def evidence(self) -> dict[str, Scalar | list[Scalar]]:
        return {
            "directory": self.directory,
            "filesystem": self.mount.kind if self.mount else None,
            "source": self.mount.source if self.mount else None,
            "free_bytes": self.space.free_bytes if self.space else None,
            "free_inodes": self.space.free_inodes if self.space else None,
        }


class Where(Struct, frozen=True):
    """Some of the hosts, in words, and those to name: none if it is all of them, since then it is what they share."""

    text: str
    nodes: tuple[str, ...]


def where(seen: Seen[Data], ranks: Sequence[int], hosts: int) -> Where:
    """The hosts of these ranks, of so many."""
    names = seen.world.nodes_of(ranks)
    return Where("every host", ()) if len(ranks) == hosts > 1 else Where(names_text(names), names)


class _WriteError(Struct, frozen=True):
    """A kind of failure to write: its word, the state of the directory, and what to do."""

    word: str
    what: str
    fix: str


_MISSING = _WriteError("missing", "does not exist", "Mount it there, or give another directory with --shared-dir.")
_DENIED = _WriteError("denied", "is not writable for this user", "Give this user write permission (mode, ACL, squash).")
_FULL = _WriteError("full", "is full", "Make room there, or raise the quota.")
_READ_ONLY = _WriteError(
    "read-only",
    "is mounted read-only",
    "Mount it read-write; where it was, see `dmesg` there for why the kernel made it read-only.",
)
_BROKEN = _WriteError("broken", "is not writable", "Look at the mount and at the kernel log there.")
_WRITE_ERRORS = {
    "ENOENT": _MISSING,
    "ENOTDIR": _MISSING,
    "EACCES": _DENIED,
    "EPERM": _DENIED,
    "ENOSPC": _FULL,
    "EDQUOT": _FULL,
    "EROFS": _READ_ONLY,
}


def unwritable(seen: Seen[Data], answers: Mapping[int, Data]) -> Iterator[Finding]:
    """Where writing failed, by the kind of failure."""
    failed = {rank: data.error for rank, data in answers.items() if data.error is not None}
    for error in dict.fromkeys(failed.values()):
        ranks = [rank for rank, own in failed.items() if own == error]
        failure, data, hosts = _WRITE_ERRORS.get(error, _BROKEN), answers[ranks[0]], where(seen, ranks, len(answers))
        room = data.room if failure is _FULL else ""
        yield seen.finding(
            failure.word,
            f"{data.directory} {failure.what}",
            f"{data.name} {failure.what} on {hosts.text}: writing a small file gave {error}{room}.",
            nodes=hosts.nodes,
            evidence={"error": error, **data.evidence},
            fix=failure.fix,
        )


def without_locks(seen: Seen[Data], writers: Mapping[int, Data]) -> Iterator[Finding]:
    """Locks that fail, and those that another host does not respect."""
    yield from _failing(seen, writers, "flock", Severity.ERROR, "torch's FileStore needs it")
    yield from _failing(seen, writers, "lockf", Severity.WARNING, "torch does not need it, but other libraries do")
    local = [rank for rank, data in writers.items() if data.lock_is_local]
    # A first host that cannot lock held nothing.
    if local and writers[min(writers)].flock is None:
        data, hosts, two = writers[local[0]], where(seen, local, len(writers) - 1), len(writers) == 2
        doubt = " With two hosts it cannot be decided whose mount is the cause." if two else ""
        yield seen.finding(
            "local-locks",
            f"locks in {data.directory} have an effect on one host only",
            f"{hosts.text} got a lock (flock) in {data.name} that {seen.world.node_of(min(writers))} held; two hosts "
            f"that write to a FileStore at once damage it.{doubt}",
            nodes=() if two else hosts.nodes,
            evidence=data.evidence,
            fix="Mount it with locks that all hosts share (NFS: without local_lock; Lustre: flock, not localflock).",
        )


def _failing(
    seen: Seen[Data], writers: Mapping[int, Data], kind: str, severity: Severity, so: str
) -> Iterator[Finding]:
    own = {rank: data.flock if kind == "flock" else data.lockf for rank, data in writers.items()}
    errors = {rank: error for rank, error in own.items() if error is not None}
    if errors:
        data, hosts = writers[next(iter(errors))], where(seen, tuple(errors), len(writers))
        yield seen.finding(
            "locks" if kind == "flock" else "fcntl-locks",
            f"{kind} fails in {data.directory}",
            f"{kind} on a file in {data.name} gave {', '.join(sorted(set(errors.values())))} on {hosts.text}; {so}.",
            severity=severity,
            nodes=hosts.nodes,
            evidence=data.evidence,
            fix="Mount it with locks (NFS: not nolock, and with rpc.statd, or version 4; Lustre: flock).",
        )


def little_room(seen: Seen[Data], writers: Mapping[int, Data], free_mib: float) -> Iterator[Finding]:
    """The small file of this check was written; the next one may not be."""
    low = {
        rank: data
        for rank, data in writers.items()
        if data.space is not None and (data.space.free_bytes < free_mib * _MIB or data.space.free_inodes == 0)
    }
    if low:
        data, hosts = next(iter(low.values())), where(seen, tuple(low), len(writers))
        yield seen.finding(
            "little-room",
            f"{data.directory} is nearly full",
            f"{data.name} is nearly full on {hosts.text}{data.room}; {free_mib:g} MiB and a free inode are expected.",
            nodes=hosts.nodes,
            evidence=data.evidence,
            fix=_FULL.fix,
        )
