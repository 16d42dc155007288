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
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote

from msgspec import structs

from ddpdiag.checks.api import Check, Contribution, Scope, Seen, SkipReason, Stage, new_trial, optional, scope_groups
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.hosts import left_out, names_text
from ddpdiag.checks.rendezvous.directory_faults import Data, little_room, locks, unwritable, where_of
from ddpdiag.model import Finding, Scalar, Severity, Trial
from ddpdiag.model.trial import Context
from ddpdiag.probes.host import shared_files
from ddpdiag.probes.host.programs import span_text
from ddpdiag.stats import odd_ones_out

FINDINGS = {
    **dict.fromkeys(
        ("missing", "denied", "read-only", "full", "broken"),
        FindingSpec.error(
            "the directory cannot be written to. torch reports it only after five minutes of silence: it opens the "
            "file again and again, whatever time-out the job gave."
        ),
    ),
    "not-shared": FindingSpec.error(
        "a host does not see what the others write: its file server is not mounted, or another one is."
    ),
    "locks": FindingSpec("flock fails."),
    "local-locks": FindingSpec.error(
        "two hosts get the same lock at once, as on NFS mounted with `nolock` or Lustre with `localflock`. torch's "
        "FileStore needs both.",
        same_item=True,
    ),
    "fcntl-locks": FindingSpec("lockf fails, which other libraries use.", same_item=True),
    "slow": FindingSpec.warning(
        "what one host writes appears late on another, because it keeps attributes in a cache (NFS's `actimeo`)."
    ),
    "partly": FindingSpec.note("there are so many hosts that not all of them tried."),
    "little-room": FindingSpec.warning("the directory is nearly full."),
    "stale": FindingSpec.warning(
        "a file there is the store of an earlier job that ended without removing it. A job that uses it again connects "
        "to processes that no longer exist, and hangs."
    ),
}

# Every host looks for every other's file.
MAX_HOSTS = 64


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


def skip(seen: Seen[Data]) -> SkipReason | None:
    """Nothing to look at unless a directory was named."""
    return optional(None if seen.options.shared_dir else "no shared directory was given (--shared-dir)")


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    """What fails on which host; then what one host does not see of another."""
    answers = seen.by_rank
    yield from unwritable(seen, answers)
    # Hosts that wrote a file. The file of a host that gave no answer may be removed: not to see it means nothing.
    ranks = sorted(rank for rank, data in answers.items() if data.error is None)
    unseen = {rank: tuple(other for other in answers[rank].unseen if other in ranks) for rank in ranks}
    writers = {rank: structs.replace(answers[rank], unseen=unseen[rank]) for rank in ranks}
    yield from _not_shared(seen, writers)
    yield from locks(seen, writers)
    yield from _slow(seen, writers)
    yield from little_room(seen, writers, seen.number("free_mib"))
    if left := [store for data in answers.values() for store in data.stores]:
        one, directory = len(left) == 1, next(iter(answers.values())).directory
        shown = ", ".join(
            f"{store.path} {span_text(store.age_seconds)} ago ({store.bytes} bytes, owner {store.owner})"
            for store in left[:4]
        )
        more = f" and {len(left) - 4} more" if len(left) > 4 else ""
        yield seen.finding(
            "stale",
            f"{'an old FileStore file is' if one else 'old FileStore files are'} in the shared directory",
            f"torch's FileStore wrote {shown}{more}. A new job that uses "
            f"{'this file' if one else 'one of these files'} connects to processes that no longer exist, and hangs.",
            evidence={"paths": [store.path for store in left]},
            fix=f"If no running job uses {'the file, remove it' if one else 'these files, remove them'}: "
            f"`rm {shlex.join(store.path for store in left[:4])}`. Give every job a file of its own, such as "
            f"{directory}/store-$SLURM_JOB_ID.",
        )
    if answers:
        yield from left_out(seen, MAX_HOSTS, "the shared directory", "tried the shared directory")


def usable(seen: Seen[Data]) -> bool:
    """May a job meet over a file there, as far as is known?"""
    return all(map(seen.succeeded, seen.trials)) and not any(f.severity is Severity.ERROR for f in judge(seen))


def _not_shared(seen: Seen[Data], writers: Mapping[int, Data]) -> Iterator[Finding]:
    """Hosts whose view differs from the one that most have: each should see every file that was written."""
    unseen = {seen.world.node_of(rank): seen.world.nodes_of(own.unseen) for rank, own in writers.items() if own.unseen}
    if not unseen:
        return
    odd = odd_ones_out({rank: frozenset(writers) - frozenset(data.unseen) for rank, data in writers.items()})
    blamed = odd.ranks if odd is not None else ()
    rank = next(rank for rank in (*blamed, *writers) if writers[rank].unseen)
    node, data = seen.world.node_of(rank), writers[rank]
    whose = "" if blamed else " There is no majority, so no host is blamed."
    # What lies there on one host, and on the first of those whose file it does not see.
    mounts = [(seen.world.node_of(own), writers[own].mount) for own in (rank, data.unseen[0]) if own in writers]
    known = [f"{name} has {mount.kind} ({mount.source})" for name, mount in mounts if mount]
    known[:1] = [f"{first} mounted there" for first in known[:1]]
    mounted = f" {', '.join(known)}." if known else ""
    yield seen.finding(
        "not-shared",
        f"{data.directory} is not the same directory on all hosts",
        f"{node} does not see the {'files' if len(data.unseen) > 1 else 'file'} that {names_text(unseen[node])} wrote "
        f"in {data.directory}; it looked for {shared_files.LOOK_SECONDS:g} s.{mounted}{whose}",
        nodes=seen.world.nodes_of(blamed),
        links=[f"{seen.world.node_of(other)} -> {node}" for other in data.unseen],
        evidence={host: f"does not see {names_text(others)}" for host, others in unseen.items()},
        fix=f"As root mount the same file system at {data.directory} on every host; `findmnt -T "
        f"{quote(data.directory)}` "
        "shows what is mounted. Or give a directory that all hosts share: `--shared-dir DIRECTORY`.",
    )


def _slow(seen: Seen[Data], writers: Mapping[int, Data]) -> Iterator[Finding]:
    """Files that appear late."""
    limit = seen.number("slow_seconds")
    if slow := {rank: data for rank, data in writers.items() if data.seconds > limit}:
        rank = max(slow, key=lambda rank: slow[rank].seconds)
        data, node, (where, nodes) = slow[rank], seen.world.node_of(rank), where_of(seen, tuple(slow), len(writers))
        yield seen.finding(
            "slow",
            f"files appear late in {data.directory} on {where}",
            f"{node} saw a file that another host wrote in {data.name} only after {data.seconds:.1f} s; at most "
            f"{limit:g} s is expected. A rendezvous over file:// is slow there.",
            nodes=nodes,
            evidence={seen.world.node_of(rank): own.seconds for rank, own in slow.items()},
            fix="Use tcp:// or env:// for the rendezvous. Or ask the administrator to mount the directory with a "
            "shorter cache time (NFS: the option `actimeo=1` or `noac`).",
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


def report(seen: Seen[Data]) -> Contribution:
    """All that the check adds to the report."""
    return Contribution(figures=figures(seen))


SETTINGS = {"slow_seconds": 1.0, "free_mib": 16.0}
CHECK: Check[Data] = Check(__name__, "RDZ006", "shared-directory", Stage.RENDEZVOUS, Scope.NODE, deadline=15)
