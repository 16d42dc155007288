"""The shared directory.

A rendezvous by `file://` needs a directory that every host sees, can write to, and can lock files in. One rank of each
host writes a small file there, locks it, and looks for the files of all the others. Everything is removed again.

Findings and their causes:

Fix: mount the same file system on every host, with locks; give every job a file of its own
(`file:///shared/store-$SLURM_JOB_ID`), and remove it before the job starts.

Confirm by hand: On two hosts `findmnt -T DIR; touch DIR/$(hostname); ls -l DIR; flock DIR/probe sleep 20` at the same
time: the second flock must wait.

Sources: torch/csrc/distributed/c10d/FileStore.cpp; flock(2), NFS; PyTorch issues 13865 (a stale file) and 67566;
nfs(5), actimeo and nolock; Lustre manual, flock and localflock.
"""

import fcntl
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct, structs

from ddpdiag.checks.api import Check, Scope, Seen, Stage, new_trial, scope_groups
from ddpdiag.checks.findings import Explained
from ddpdiag.checks.hosts import MIB, left_out, names_text
from ddpdiag.checks.world import World
from ddpdiag.model import Finding, Scalar, Severity, Trial
from ddpdiag.model.trial import Context
from ddpdiag.probes.host import shared_files
from ddpdiag.probes.host.programs import span_text
from ddpdiag.stats import odd_ones_out
from ddpdiag.text import size_text

FINDINGS = {
    **dict.fromkeys(
        ("missing", "denied", "read-only", "full", "broken"),
        Explained.error(
            "the directory cannot be written to. torch reports it only after five minutes of silence: it opens the "
            "file again and again, whatever time-out the job gave."
        ),
    ),
    "not-shared": Explained.error(
        "a host does not see what the others write: its file server is not mounted, or another one is."
    ),
    "locks": Explained("flock fails."),
    "local-locks": Explained.error(
        "two hosts get the same lock at once, as on NFS mounted with `nolock` or Lustre with `localflock`. torch's "
        "FileStore needs both.",
        same_item=True,
    ),
    "fcntl-locks": Explained("lockf fails, which other libraries use.", same_item=True),
    "slow": Explained.warning(
        "what one host writes appears late on another, because it keeps attributes in a cache (NFS's `actimeo`)."
    ),
    "partly": Explained.note("there are so many hosts that not all of them tried."),
    "little-room": Explained.warning("the directory is nearly full."),
    "stale": Explained.warning(
        "a file there is the store of an earlier job that ended without removing it. A job that uses it again connects "
        "to processes that no longer exist, and hangs."
    ),
}

# Every host looks for every other's file.
MAX_HOSTS = 64
_MAKE_ROOM = "Make room there, or raise the quota."
# The word of each failure to write, the state of the directory, and what to do.
_WRITE_ERRORS = {
    **dict.fromkeys(
        ("ENOENT", "ENOTDIR"),
        ("missing", "does not exist", "Mount it there, or give another directory with --shared-dir."),
    ),
    **dict.fromkeys(
        ("EACCES", "EPERM"),
        ("denied", "is not writable for this user", "Give this user write permission (mode, ACL, squash)."),
    ),
    **dict.fromkeys(("ENOSPC", "EDQUOT"), ("full", "is full", _MAKE_ROOM)),
    "EROFS": (
        "read-only",
        "is mounted read-only",
        "Mount it read-write; where it was, see `dmesg` there for why the kernel made it read-only.",
    ),
}
_OTHER_ERROR = ("broken", "is not writable", "Look at the mount and at the kernel log there.")


class Data(Struct, frozen=True, kw_only=True):
    """What one host found; errors are errno names, None where it went well.

    `unseen`, `seconds` and `lock_is_local` are those of a `DirectoryLook`. `stores` are looked for by rank 0's host.
    """

    directory: str
    mount: shared_files.Mount | None = None
    space: shared_files.Space | None = None
    error: str | None = None
    flock: str | None = None
    lockf: str | None = None
    unseen: tuple[int, ...] = ()
    seconds: float = 0.0
    lock_is_local: bool | None = None
    stores: tuple[shared_files.Store, ...] = ()

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
    def evidence(self) -> dict[str, Scalar]:
        return {
            "directory": self.directory,
            "filesystem": self.mount.kind if self.mount else None,
            "source": self.mount.source if self.mount else None,
            "free_bytes": self.space.free_bytes if self.space else None,
            "free_inodes": self.space.free_inodes if self.space else None,
        }


def measure(ctx: Context) -> Data:
    """Write, lock, look at the others' files, and always remove the own one."""
    directory, token = Path(ctx.options.shared_dir or ctx.scratch), secrets.token_hex(8)
    own = shared_files.file_of(directory, token)
    try:
        ctx.step(f"write a file in {directory}")
        error = shared_files.write(own, token)
        ctx.step(f"lock a file in {directory}")
        flock = None if error else shared_files.lock(own, fcntl.flock)
        lockf = None if error else shared_files.lock(own, fcntl.lockf)
        ctx.step(f"look through {directory}")
        mount, room = shared_files.mount_of(directory.resolve()), shared_files.space(directory)
        left = shared_files.stores(directory) if ctx.group_rank == 0 else ()
        # Every host learns what every other one wrote; a host that wrote nothing looks for nothing.
        with shared_files.locked(own):
            peers = ctx.exchange("" if error else token)
            tokens = {rank: peer.offer for rank, peer in zip(ctx.group, peers, strict=True)}
            ctx.step(f"look for the other hosts' files in {directory}")
            view = shared_files.DirectoryLook() if error else shared_files.look(directory, ctx.place.rank, tokens)
    finally:
        shared_files.remove((own, shared_files.done_of(own)))
    return Data(
        directory=str(directory),
        mount=mount,
        space=room,
        error=error,
        flock=flock,
        lockf=lockf,
        stores=left,
        **structs.asdict(view),
    )


def plan(seen: Seen[Data]) -> Sequence[Trial]:
    """One group of one rank per host."""
    leaders = tuple(rank for group in scope_groups(Scope.NODE, seen.world) for rank in group)
    return () if seen.trials else (new_trial(seen, groups=(leaders[:MAX_HOSTS],)),)


def ground(world: World) -> str | None:
    """Nothing to look at unless a directory was named."""
    return None if world.options.shared_dir else "no shared directory was given (--shared-dir)"


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    """What fails on which host; then what one host does not see of another."""
    answers = seen.by_rank
    yield from _unwritable(seen, answers)
    # Hosts that wrote a file. The file of a host that gave no answer may be removed: not to see it means nothing.
    ranks = sorted(rank for rank, data in answers.items() if data.error is None)
    unseen = {rank: tuple(other for other in answers[rank].unseen if other in ranks) for rank in ranks}
    writers = {rank: structs.replace(answers[rank], unseen=unseen[rank]) for rank in ranks}
    yield from _not_shared(seen, writers)
    yield from _locks(seen, writers)
    yield from _slow_or_full(seen, writers)
    if left := [store for data in answers.values() for store in data.stores]:
        shown = "; ".join(
            f"{store.path} ({store.bytes} bytes, owner {store.owner}, last written {span_text(store.age_seconds)} ago)"
            for store in left[:4]
        )
        more = f" and {len(left) - 4} more" if len(left) > 4 else ""
        yield seen.finding(
            "stale",
            "the shared directory has stores of other jobs",
            f"torch's FileStore wrote {shown}{more}. Unless a running job uses it, it is left over from a job that "
            "failed; a new job with this file connects to processes that no longer exist, and hangs.",
            evidence={"paths": [store.path for store in left]},
            fix="Remove it if no job uses it, and give every job a file of its own (store-$SLURM_JOB_ID).",
        )
    if answers:
        yield from left_out(seen, MAX_HOSTS, "the shared directory")


def usable(seen: Seen[Data]) -> bool:
    """May a job meet over a file there, as far as is known?"""
    return all(map(seen.went_well, seen.trials)) and not any(f.severity is Severity.ERROR for f in judge(seen))


def _hosts(seen: Seen[Data], ranks: Sequence[int], hosts: int) -> tuple[str, tuple[str, ...]]:
    """The hosts of these ranks in words, and those to name: none if it is all, since then it is what they share."""
    names = seen.world.nodes_of(ranks)
    return ("every host", ()) if len(ranks) == hosts > 1 else (names_text(names), names)


def _unwritable(seen: Seen[Data], answers: Mapping[int, Data]) -> Iterator[Finding]:
    """Where writing failed, by the kind of failure."""
    failed = {rank: data.error for rank, data in answers.items() if data.error is not None}
    for error in dict.fromkeys(failed.values()):
        ranks = [rank for rank, own in failed.items() if own == error]
        word, what, fix = _WRITE_ERRORS.get(error, _OTHER_ERROR)
        data, (where, nodes) = answers[ranks[0]], _hosts(seen, ranks, len(answers))
        room = data.room if word == "full" else ""
        yield seen.finding(
            word,
            f"{data.directory} {what}",
            f"{data.name} {what} on {where}: writing a small file gave {error}{room}.",
            nodes=nodes,
            evidence={"error": error, **data.evidence},
            fix=fix,
        )


def _locks(seen: Seen[Data], writers: Mapping[int, Data]) -> Iterator[Finding]:
    """Locks that fail, and those that another host does not respect."""
    for kind, word, severity, so in (
        ("flock", "locks", Severity.ERROR, "torch's FileStore needs it"),
        ("lockf", "fcntl-locks", Severity.WARNING, "torch does not need it, but other libraries do"),
    ):
        own = {rank: data.flock if kind == "flock" else data.lockf for rank, data in writers.items()}
        if errors := {rank: error for rank, error in own.items() if error is not None}:
            data, (where, nodes) = writers[next(iter(errors))], _hosts(seen, tuple(errors), len(writers))
            yield seen.finding(
                word,
                f"{kind} fails in {data.directory}",
                f"{kind} on a file in {data.name} gave {', '.join(sorted(set(errors.values())))} on {where}; {so}.",
                severity=severity,
                nodes=nodes,
                evidence=data.evidence,
                fix="Mount it with locks (NFS: not nolock, and with rpc.statd, or version 4; Lustre: flock).",
            )
    local = [rank for rank, data in writers.items() if data.lock_is_local]
    # A first host that cannot lock held nothing.
    if local and writers[min(writers)].flock is None:
        data, (where, nodes), two = writers[local[0]], _hosts(seen, local, len(writers) - 1), len(writers) == 2
        doubt = " With two hosts it cannot be decided whose mount is the cause." if two else ""
        yield seen.finding(
            "local-locks",
            f"locks in {data.directory} have an effect on one host only",
            f"{where} got a lock (flock) in {data.name} that {seen.world.node_of(min(writers))} held; two hosts "
            f"that write to a FileStore at once damage it.{doubt}",
            nodes=() if two else nodes,
            evidence=data.evidence,
            fix="Mount it with locks that all hosts share (NFS: without local_lock; Lustre: flock, not localflock).",
        )


def _not_shared(seen: Seen[Data], writers: Mapping[int, Data]) -> Iterator[Finding]:
    """Hosts whose view differs from the one that most have: each should see every file that was written."""
    unseen = {seen.world.node_of(rank): seen.world.nodes_of(own.unseen) for rank, own in writers.items() if own.unseen}
    if not unseen:
        return
    odd = odd_ones_out({rank: frozenset(writers) - frozenset(data.unseen) for rank, data in writers.items()})
    blamed = odd.ranks if odd is not None else ()
    rank = next(rank for rank in (*blamed, *writers) if writers[rank].unseen)
    node, data = seen.world.node_of(rank), writers[rank]
    whose = "" if blamed else "; no majority of hosts sees the same files, so no host is blamed"
    # What lies there on one host, and on the first of those whose file it does not see.
    mounts = [(seen.world.node_of(own), writers[own].mount) for own in (rank, data.unseen[0]) if own in writers]
    mounted = ", ".join(f"{mount.kind} from {mount.source} on {node}" for node, mount in mounts if mount) or "unknown"
    yield seen.finding(
        "not-shared",
        f"{data.directory} is not one directory on all hosts",
        f"{node} does not see in {data.directory} what {names_text(unseen[node])} wrote there (it "
        f"looked for {shared_files.LOOK_SECONDS:g} s){whose}. Mounted: {mounted}.",
        nodes=seen.world.nodes_of(blamed),
        links=[f"{seen.world.node_of(other)} -> {node}" for other in data.unseen],
        evidence={host: f"does not see {names_text(others)}" for host, others in unseen.items()},
        fix="Mount the same file system there on every host, or give a directory that all share with --shared-dir.",
    )


def _slow_or_full(seen: Seen[Data], writers: Mapping[int, Data]) -> Iterator[Finding]:
    """Files that appear late; little room: the small file of this check was written, the next one may not be."""
    limit, free_mib = seen.number("slow_seconds"), seen.number("free_mib")
    if slow := {rank: data for rank, data in writers.items() if data.seconds > limit}:
        rank = max(slow, key=lambda rank: slow[rank].seconds)
        data, node = slow[rank], seen.world.node_of(rank)
        yield seen.finding(
            "slow",
            f"files appear late in {data.directory}",
            f"{node} saw another host's file in {data.name} after {data.seconds:.1f} s; at most {limit:g} s expected.",
            nodes=_hosts(seen, tuple(slow), len(writers))[1],
            evidence={seen.world.node_of(rank): own.seconds for rank, own in slow.items()},
            fix="Mount it with a shorter cache time (NFS: actimeo=1 or noac), or use a rendezvous over tcp:// or env://.",
        )
    rooms = {rank: data.space for rank, data in writers.items() if data.space is not None}
    low = [rank for rank, room in rooms.items() if room.free_bytes < free_mib * MIB or room.free_inodes == 0]
    if low:
        data, (where, nodes) = writers[low[0]], _hosts(seen, low, len(writers))
        yield seen.finding(
            "little-room",
            f"{data.directory} is nearly full",
            f"{data.name} is nearly full on {where}{data.room}; {free_mib:g} MiB and a free inode are expected.",
            nodes=nodes,
            evidence=data.evidence,
            fix=_MAKE_ROOM,
        )


def figures(seen: Seen[Data]) -> Mapping[str, Scalar]:
    """Kind of file system, room, and the slowest host's seconds until it saw all others' files."""
    answers = [*seen.by_rank.values()]
    if not answers:
        return {}
    return {
        "shared_directory.filesystem": answers[0].evidence["filesystem"],
        "shared_directory.free_bytes": answers[0].evidence["free_bytes"],
        "shared_directory.visible_seconds": max(data.seconds for data in answers),
    }


CHECK = Check(
    "RDZ006",
    "shared-directory",
    Stage.RENDEZVOUS,
    Scope.NODE,
    manual=__doc__ or "",
    findings=FINDINGS,
    judge=judge,
    data=Data,
    measure=measure,
    plan=plan,
    ground=ground,
    figures=figures,
    deadline=15,
    optional=True,
    settings={"slow_seconds": 1.0, "free_mib": 16.0},
)
