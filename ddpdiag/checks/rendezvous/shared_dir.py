"""The shared directory.

A rendezvous by `file://` needs a directory that every host sees, can write to, and can lock files in. One rank of each
host writes a small file there, locks it, looks for the files of the other hosts, and finally removes its own file.

Findings and their causes:

Fix: mount the same file system on every host, with locks; give every job a file of its own
(`file:///shared/store-$SLURM_JOB_ID`), and remove it before the job starts.

Confirm by hand: On two hosts `findmnt -T DIR; touch DIR/$(hostname); ls -l DIR; flock DIR/probe sleep 20` at the same
time: the second flock must wait.

Sources: torch/csrc/distributed/c10d/FileStore.cpp; flock(2), NFS; PyTorch issues 13865 (a stale file) and 67566;
nfs(5), nolock; Lustre manual, flock and localflock.
"""

import secrets
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote

from msgspec import Struct, structs

from ddpdiag.checks.api import Check, Scope, Seen, SkipReason, Stage, new_trial, optional, scope_groups
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.hosts import errno_text, leave_out, names_text, untested_hosts_finding
from ddpdiag.checks.odd import no_majority
from ddpdiag.model import Finding, Severity, Trial
from ddpdiag.model.trial import Context
from ddpdiag.probes.host import shared_files
from ddpdiag.probes.host.programs import duration_text
from ddpdiag.stats import find_odd_ranks

FINDINGS = {
    "unwritable": FindingSpec.error(
        "the directory cannot be written to. torch reports it only after five minutes of silence: it opens the file "
        "again and again, whatever time-out the job gave."
    ),
    "not-shared": FindingSpec.error(
        "a host does not see what the others write: its file server is not mounted, or another one is."
    ),
    "locks": FindingSpec.error(
        "locks (flock) fail there, or two hosts get the same lock at once, as on NFS mounted with `nolock` or Lustre "
        "with `localflock`. torch's FileStore needs them."
    ),
    "partly": FindingSpec.note("there are so many hosts that not all of them took part."),
    "stale": FindingSpec.warning(
        "a file there is the store of an earlier job that ended without removing it. A job that uses it again connects "
        "to processes that no longer exist, and hangs."
    ),
}

# The most hosts that take part, because each looks for the files of all others.
MAX_HOSTS = 64
# The fix of a write error, by errno.
_FIXES = {
    "ENOENT": "Create it, or as root mount it on {where} like on the other hosts.",
    **dict.fromkeys(
        ("EACCES", "EPERM"),
        "Run `id; ls -ld {directory}` on {host}. Ask the owner of the directory for write permission.",
    ),
    **dict.fromkeys(
        ("ENOSPC", "EDQUOT"),
        "Run `df -h {directory}; df -i {directory}; quota -s` on {host}: one of them shows what is used up. Remove "
        "files there, or ask the administrator for a larger quota.",
    ),
    "EROFS": "As root on {host} find the mount point with `findmnt -T {directory}`, and run `mount -o remount,rw "
    "MOUNTPOINT`; `dmesg -T` shows whether the kernel made it read-only.",
}
_OTHER_FIX = (
    "Run `findmnt -T {directory}` and, as root, `dmesg -T | tail -n 50` on {host}, and send both to the administrator "
    "of the file system."
)


class Data(Struct, frozen=True, kw_only=True):
    """The shared directory as one host sees it. `error` (of writing) and `lock_error` are names of errnos, or None.
    `missing_ranks` are the ranks whose files were not found. `lock_is_local` says whether this host got a lock that the
    first host held (None: not tested). `stores` are files of torch's FileStore; only rank 0 searches for them."""

    directory: str
    error: str | None = None
    lock_error: str | None = None
    missing_ranks: tuple[int, ...] = ()
    lock_is_local: bool | None = None
    stores: tuple[shared_files.StoreFile, ...] = ()


def measure(ctx: Context) -> Data:
    """Write and lock a file, look for the files of the other hosts, and always remove the file."""
    directory, token = Path(ctx.options.shared_dir or ctx.scratch), secrets.token_hex(8)
    own_file = shared_files.token_path(directory, token)
    try:
        ctx.step(f"write a file in {directory}")
        error = shared_files.write_new(own_file, token)
        ctx.step(f"lock a file in {directory}")
        lock_error = None if error else shared_files.try_lock(own_file)
        ctx.step(f"look through {directory}")
        old_stores = shared_files.find_store_files(directory) if ctx.group_rank == 0 else ()
        # The hosts exchange the names of their files. A host that could not write does not look for the others.
        with shared_files.hold_lock(own_file):
            peers = ctx.exchange("" if error else token)
            tokens = {rank: peer.offer for rank, peer in zip(ctx.group, peers, strict=True)}
            ctx.step(f"look for the other hosts' files in {directory}")
            view = shared_files.HostFiles() if error else shared_files.find_files(directory, ctx.place.rank, tokens)
    finally:
        shared_files.remove_files((own_file, shared_files.done_path(own_file)))
    return Data(directory=str(directory), error=error, lock_error=lock_error, stores=old_stores, **structs.asdict(view))


def plan(seen: Seen[Data]) -> Sequence[Trial]:
    """Plan one trial of one group: one rank of each host, at most MAX_HOSTS."""
    leaders = tuple(rank for group in scope_groups(Scope.HOST, seen.world) for rank in group)
    return () if seen.trials else (new_trial(seen, groups=(leaders[:MAX_HOSTS],)),)


def skip(seen: Seen[Data]) -> SkipReason | None:
    return optional(None if seen.options.shared_dir else "no shared directory was given (--shared-dir)")


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    """Findings on hosts that cannot write, see files or lock, on old FileStore files, and on hosts without a test."""
    answers = seen.by_rank
    yield from _unwritable(seen, answers)
    # Only files of hosts with a result count: a host whose trial failed may have removed its file.
    ranks = sorted(rank for rank, data in answers.items() if data.error is None)
    unseen = {rank: tuple(other for other in answers[rank].missing_ranks if other in ranks) for rank in ranks}
    writers = {rank: structs.replace(answers[rank], missing_ranks=unseen[rank]) for rank in ranks}
    yield from _not_shared(seen, writers)
    yield from _bad_locks(seen, writers)
    if old_stores := [store for data in answers.values() for store in data.stores]:
        is_one, directory = len(old_stores) == 1, next(iter(answers.values())).directory
        shown = ", ".join(
            f"{store.path} {duration_text(store.age_seconds)} ago ({store.bytes} bytes, owner {store.owner})"
            for store in old_stores[:4]
        )
        more = f" and {len(old_stores) - 4} more" if len(old_stores) > 4 else ""
        yield seen.finding(
            "stale",
            f"{'an old FileStore file is' if is_one else 'old FileStore files are'} in the shared directory",
            f"torch's FileStore wrote {shown}{more}. A new job that uses "
            f"{'this file' if is_one else 'one of these files'} connects to processes that no longer exist, and hangs.",
            evidence={"paths": [store.path for store in old_stores]},
            fix=f"If no running job uses {'the file, remove it' if is_one else 'these files, remove them'}: "
            f"`rm {shlex.join(store.path for store in old_stores[:4])}`. Give every job a file of its own, such as "
            f"{directory}/store-$SLURM_JOB_ID.",
        )
    if answers:
        yield from untested_hosts_finding(seen, MAX_HOSTS, "the shared directory", "tried the shared directory")


def is_usable(seen: Seen[Data]) -> bool:
    """Whether every trial succeeded and no finding is an error, so that file:// may work."""
    return all(map(seen.succeeded, seen.trials)) and not any(f.severity is Severity.ERROR for f in judge(seen))


def _hosts_to_blame(seen: Seen[Data], ranks: Sequence[int], host_count: int) -> tuple[str, tuple[str, ...]]:
    """The hosts of these ranks in words, and the hosts to blame: none if all of several hosts share the cause."""
    names = seen.world.host_names(ranks)
    return ("every host", ()) if len(ranks) == host_count > 1 else (names_text(names), names)


def _unwritable(seen: Seen[Data], answers: Mapping[int, Data]) -> Iterator[Finding]:
    """One finding for each kind of write error, with the hosts that have it."""
    failed = {rank: data.error for rank, data in answers.items() if data.error is not None}
    for error in dict.fromkeys(failed.values()):
        ranks = [rank for rank, code in failed.items() if code == error]
        directory, (where, blamed) = answers[ranks[0]].directory, _hosts_to_blame(seen, ranks, len(answers))
        fix = _FIXES.get(error, _OTHER_FIX)
        repair = fix.format(directory=quote(directory), where=where, host=seen.world.host_name(ranks[0]))
        yield seen.finding(
            "unwritable",
            f"{directory} is not writable on {where}",
            f"Writing a small file to {directory} gave {errno_text(error)}. torch would report it only after five "
            "minutes of silence.",
            hosts=blamed,
            evidence={"error": error, "directory": directory},
            fix=f"{repair} Or {leave_out(blamed) + ', or ' if blamed else ''}give a directory that "
            "every host shares: `--shared-dir DIRECTORY`.",
        )


def _bad_locks(seen: Seen[Data], writers: Mapping[int, Data]) -> Iterator[Finding]:
    """The finding on hosts that cannot lock a file or, if all can, on hosts that got a lock held by the first host."""
    failed = [rank for rank, data in writers.items() if data.lock_error is not None]
    ranks_with_local_lock = [rank for rank, data in writers.items() if data.lock_is_local]
    if not failed and not ranks_with_local_lock:
        return
    if failed:
        where, blamed = _hosts_to_blame(seen, failed, len(writers))
        errors = ", ".join(map(errno_text, sorted({str(writers[rank].lock_error) for rank in failed})))
        reason = f"locking a file with flock gave {errors} on {where}"
    else:
        where, blamed = _hosts_to_blame(seen, ranks_with_local_lock, len(writers) - 1)
        first = seen.world.host_name(min(writers))
        reason = f"{first} held a lock (flock), and {where if blamed else 'every other host'} got the same lock"
        if len(writers) == 2:
            blamed = ()
            reason += ". With two hosts it cannot be decided whose mount is the cause"
    data = writers[(failed or ranks_with_local_lock)[0]]
    yield seen.finding(
        "locks",
        f"file locks do not work in {data.directory}",
        f"In {data.directory}, {reason}. torch's FileStore (file://) needs locks that all hosts share.",
        hosts=blamed,
        evidence={"directory": data.directory},
        fix="Use tcp:// or env:// for the rendezvous; they need no locks. Or, as root, mount the directory with locks "
        "that all hosts share: NFS without `nolock` and `local_lock`, Lustre with `-o flock`.",
    )


def _not_shared(seen: Seen[Data], writers: Mapping[int, Data]) -> Iterator[Finding]:
    """The finding on hosts that do not see every file. Hosts that see other files than most hosts are blamed."""
    unseen = {
        seen.world.host_name(rank): seen.world.host_names(data.missing_ranks)
        for rank, data in writers.items()
        if data.missing_ranks
    }
    if not unseen:
        return
    odd = find_odd_ranks({rank: frozenset(writers) - frozenset(data.missing_ranks) for rank, data in writers.items()})
    blamed = odd.ranks if odd is not None else ()
    rank = next(rank for rank in (*blamed, *writers) if writers[rank].missing_ranks)
    host, data = seen.world.host_name(rank), writers[rank]
    yield seen.finding(
        "not-shared",
        f"{data.directory} is not the same directory on all hosts",
        f"{host} does not see the {'files' if len(data.missing_ranks) > 1 else 'file'} that {names_text(unseen[host])} "
        f"wrote in {data.directory}; it looked for {shared_files.SEARCH_SECONDS:g} s.{no_majority(blamed, 'host')}",
        hosts=seen.world.host_names(blamed),
        links=[f"{seen.world.host_name(other)} -> {host}" for other in data.missing_ranks],
        evidence={host: f"does not see {names_text(others)}" for host, others in unseen.items()},
        fix=f"As root mount the same file system at {data.directory} on every host; `findmnt -T "
        f"{quote(data.directory)}` shows what is mounted. Or give a directory that all hosts share: "
        "`--shared-dir DIRECTORY`.",
    )


CHECK: Check[Data] = Check(__name__, "RDZ006", "shared-directory", Stage.RENDEZVOUS, Scope.HOST, deadline=15)
