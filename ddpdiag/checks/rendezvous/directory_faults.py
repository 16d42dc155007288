"""What hosts find in a shared directory, each by itself: can it write and lock, and is there room? Part of RDZ006."""

from collections.abc import Iterator, Mapping, Sequence
from shlex import quote

from msgspec import Struct

from ddpdiag.checks.api import Seen
from ddpdiag.checks.hosts import MIB, errno_text, leave_out, names_text
from ddpdiag.model import Finding, Scalar, Severity
from ddpdiag.probes.host.shared_files import Mount, Space, Store
from ddpdiag.text import count, size_text

_OTHER = "give a directory that every host shares: `--shared-dir DIRECTORY`."
_MAKE_ROOM = "Run `df -h {directory}; df -i {directory}; quota -s` on {host}: one of them shows what is used up."
# The word of each failure to write, the state of the directory, and what to do.
_WRITE_ERRORS = {
    **dict.fromkeys(
        ("ENOENT", "ENOTDIR"),
        (
            "missing",
            "does not exist",
            f"{{mount}} Or {_OTHER}",
        ),
    ),
    **dict.fromkeys(
        ("EACCES", "EPERM"),
        (
            "denied",
            "is not writable for this user",
            "Run `id; ls -ld {directory}` on {host}. Ask the owner of the directory for write permission (`chmod` or "
            f"`setfacl`). Or {_OTHER}",
        ),
    ),
    **dict.fromkeys(
        ("ENOSPC", "EDQUOT"),
        (
            "full",
            "is full",
            f"{_MAKE_ROOM} Remove files there, or ask the administrator for a larger quota. Or {_OTHER}",
        ),
    ),
    "EROFS": (
        "read-only",
        "is mounted read-only",
        "As root on {host} find the mount point with `findmnt -T {directory}`, and run `mount -o remount,rw "
        "MOUNTPOINT`. If it should be read-write already, `dmesg -T` shows why the kernel made it read-only. Or "
        f"{_OTHER}",
    ),
}
_OTHER_ERROR = (
    "broken",
    "is not writable",
    "Run `findmnt -T {directory}` and, as root, `dmesg -T | tail -n 50` on {host}, and send both to the administrator "
    "of the file system. Until then {out}give another directory: `--shared-dir DIRECTORY`.",
)
_MOUNT_WITH_LOCKS = (
    "mount the directory with locks: NFS as version 4, or as version 3 without `nolock` and with rpc.statd running; "
    "Lustre with `-o flock`."
)
_USE_TCP = "Use tcp:// or env:// for the rendezvous; they need no locks. Or, as root,"


class Data(Struct, frozen=True, kw_only=True):
    """What one host found; errors are errno names, None where it went well.

    `unseen`, `seconds` and `lock_is_local` are those of a `DirectoryLook`. `stores` are looked for by rank 0's host.
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
        """Such as "0 B free" or "1 TiB and 0 inodes free"; empty if it is not known."""
        if self.space is None:
            return ""
        inodes = "" if self.space.free_inodes is None else f" and {count(self.space.free_inodes, 'inode')}"
        return f"{size_text(self.space.free_bytes)}{inodes} free"

    @property
    def evidence(self) -> dict[str, Scalar]:
        return {
            "directory": self.directory,
            "filesystem": self.mount.kind if self.mount else None,
            "source": self.mount.source if self.mount else None,
            "free_bytes": self.space.free_bytes if self.space else None,
            "free_inodes": self.space.free_inodes if self.space else None,
        }


def where_of(seen: Seen[Data], ranks: Sequence[int], hosts: int) -> tuple[str, tuple[str, ...]]:
    """The hosts of these ranks in words, and those to name: none if it is all, since then it is what they share."""
    names = seen.world.nodes_of(ranks)
    return ("every host", ()) if len(ranks) == hosts > 1 else (names_text(names), names)


def unwritable(seen: Seen[Data], answers: Mapping[int, Data]) -> Iterator[Finding]:
    """Where writing failed, by the kind of failure."""
    failed = {rank: data.error for rank, data in answers.items() if data.error is not None}
    for error in dict.fromkeys(failed.values()):
        ranks = [rank for rank, own in failed.items() if own == error]
        word, what, fix = _WRITE_ERRORS.get(error, _OTHER_ERROR)
        data, (where, nodes) = answers[ranks[0]], where_of(seen, ranks, len(answers))
        what = "is not a directory" if error == "ENOTDIR" else what
        message = f"{data.name} {what} on {where}"
        if word == "missing":
            message = f"The shared directory {data.directory} {what} on {where}"
        elif word == "denied":
            message = f"This user may not write to {data.name} on {where}"
        elif error == "EDQUOT":
            message = f"The quota in {data.name} is used up on {where}"
        elif word == "full" and data.room:
            message += f": {data.room}"
        yield seen.finding(
            word,
            f"{data.directory} {what} on {where}",
            f"{message}. Writing a small file there gave {errno_text(error)}.",
            nodes=nodes,
            evidence={"error": error, **data.evidence},
            fix=fix.format(
                mount=f"As root mount it on {where} like on the other hosts; `findmnt -T {quote(data.directory)}` on "
                "one of them shows what is mounted."
                if nodes
                else "Create it, or as root mount it on every host.",
                directory=data.directory,
                hosts=where,
                host=seen.world.node_of(ranks[0]),
                out=f"{leave_out(nodes)}, or " if nodes else "",
            ),
        )


def locks(seen: Seen[Data], writers: Mapping[int, Data]) -> Iterator[Finding]:
    """Locks that fail, and those that another host does not respect."""
    for kind, word, severity, so, fix in (
        (
            "flock",
            "locks",
            Severity.ERROR,
            "torch's FileStore needs these locks for a rendezvous over file://",
            f"{_USE_TCP} {_MOUNT_WITH_LOCKS}",
        ),
        (
            "lockf",
            "fcntl-locks",
            Severity.WARNING,
            "torch does not need lockf, but other libraries do",
            f"Nothing to do for torch. If another library fails, ask the administrator to {_MOUNT_WITH_LOCKS}",
        ),
    ):
        own = {rank: data.flock if kind == "flock" else data.lockf for rank, data in writers.items()}
        if errors := {rank: error for rank, error in own.items() if error is not None}:
            data, (where, nodes) = writers[next(iter(errors))], where_of(seen, tuple(errors), len(writers))
            gave = ", ".join(map(errno_text, sorted(set(errors.values()))))
            yield seen.finding(
                word,
                f"file locks ({kind}) fail in {data.directory}",
                f"Locking a file in {data.name} with {kind} gave {gave} on {where}. {so}.",
                severity=severity,
                nodes=nodes,
                evidence=data.evidence,
                fix=fix,
            )
    local = [rank for rank, data in writers.items() if data.lock_is_local]
    # A first host that cannot lock held nothing.
    if local and writers[min(writers)].flock is None:
        data, (where, nodes), two = writers[local[0]], where_of(seen, local, len(writers) - 1), len(writers) == 2
        where = "every other host" if not nodes else where
        doubt = " With two hosts it cannot be decided whose mount is the cause." if two else ""
        yield seen.finding(
            "local-locks",
            f"file locks in {data.directory} work on one host only",
            f"{seen.world.node_of(min(writers))} held a lock (flock) in {data.name}, and {where} got the same lock. "
            f"Two hosts that write to one FileStore (file://) at the same time damage it.{doubt}",
            nodes=() if two else nodes,
            evidence=data.evidence,
            fix=f"{_USE_TCP} mount the directory with locks that all hosts share: NFS without `nolock` and "
            "`local_lock`, Lustre with `-o flock` instead of `localflock`.",
        )


def little_room(seen: Seen[Data], writers: Mapping[int, Data], free_mib: float) -> Iterator[Finding]:
    """Little room: the small file of this check was written, the next one may not be."""
    rooms = {rank: data.space for rank, data in writers.items()}
    low = [r for r, room in rooms.items() if room and (room.free_bytes < free_mib * MIB or room.free_inodes == 0)]
    if low:
        data, (where, nodes) = writers[low[0]], where_of(seen, low, len(writers))
        yield seen.finding(
            "little-room",
            f"{data.directory} is nearly full",
            f"{data.name} has only {data.room} on {where}. At least {free_mib:g} MiB and one free inode are expected.",
            nodes=nodes,
            evidence=data.evidence,
            fix=f"Run `df -h {quote(data.directory)}; df -i {quote(data.directory)}`, and remove files there. Or give "
            "another directory: `--shared-dir DIRECTORY`.",
        )
