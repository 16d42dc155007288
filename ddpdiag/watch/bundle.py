"""Looks that were saved with `--bundle`, and looks of several hosts at one silence as one look."""

import io
import os
import socket
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import structs

from ddpdiag.checks.hosts import names_text, ranks_text
from ddpdiag.codec import decode, encode, read_bytes, readable
from ddpdiag.errors import UsageError
from ddpdiag.watch.look import Failure, Look

_MOST_HOSTS = 16
# A look takes up to 5 s, and clocks of hosts differ by a second or two.
_SLACK_SECONDS = 10.0


class Bundle:
    """A new file in an existing directory: every look is one line."""

    def __init__(self, folder: str) -> None:
        where = readable(folder)
        if not Path(folder).is_dir():
            raise UsageError(f"--bundle {where}: no such directory on {socket.gethostname()}")
        self.path = Path(folder) / f"watch-{readable(socket.gethostname())}-{os.getpid()}.jsonl"
        self._descriptor: int | None = None
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UsageError(f"--bundle {where}: the directory is not writable")

    def keep(self, look: Look) -> None:
        """Add a look."""
        if self._descriptor is None:
            self._descriptor = self._created()
        with os.fdopen(os.dup(self._descriptor), "wb") as file:
            file.write(encode(look) + b"\n")

    def _created(self) -> int:
        """Create the file; an existing one may be a pipe, or another user's: the new one then has a random suffix."""
        try:
            return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            descriptor, name = tempfile.mkstemp(".jsonl", f"{self.path.stem}-", self.path.parent)
            self.path = Path(name)
            return descriptor


def read_bundle(path: str) -> list[Look]:
    """The looks in a file, the last of which may be cut off."""
    where = readable(path)
    try:
        data = read_bytes(path)
    except OSError as error:
        raise UsageError(f"cannot read {where}: {error.strerror or error}") from error
    looks: list[Look] = []
    reason = "it is empty"
    for number, row in enumerate(io.BytesIO(data), 1):
        if row == b"\n":
            continue
        try:
            looks.append(decode(row, Look))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            reason = f"line {number}: {error}"
            break
    if not looks:
        raise UsageError(f"{where}: not a file that ddpdiag watch saved with --bundle: {reason}")
    return looks


# Looks of several hosts ----------------------------------------------------------------------------------------------


def merged(looks: Sequence[Look]) -> Look:
    """The last look of each host at the newest silence, together; UsageError if two hosts both have a rank.

    A host is known by its name. Processes have numbers of their own on each, so GPUs are left out. A host that has no
    look at the newest silence is left out, and a note says so.
    """
    known = [look for look in looks if not look.guessed] or looks
    newest = max(known, key=lambda look: look.unix_seconds)
    joined = [newest]
    if not newest.guessed:
        # Looks at the same silence: each lies in the other's time.
        close = [look for look in known if _is_within(newest, look.unix_seconds)]
        joined = _joined([look for look in close if _is_within(look, newest.unix_seconds)])
    notes = (*dict.fromkeys(note for look in joined for note in look.notes), *_left_out(looks, joined))
    if len(joined) == 1:
        return structs.replace(newest, notes=notes)
    hosts = {look.host for look in joined}
    first = min(joined, key=lambda look: look.silent_seconds)
    return structs.replace(
        first,
        failure=_first_failure(joined),
        host=f"{len(hosts)} hosts" if len(hosts) > 1 else first.host,
        ranks=tuple(sorted((seen for look in joined for seen in look.ranks), key=lambda seen: seen.rank)),
        gpus=(),
        gpus_unseen="",
        notes=(*notes, *_places(joined)) if len(hosts) > 1 else notes,
    )


def _first_failure(looks: Sequence[Look]) -> Failure | None:
    """The failure of the first host whose command did not fail by waiting, with the age of the newest look at ranks."""
    failed = [(look.failure.known.is_wait, look.unix_seconds, look.failure) for look in looks if look.failure]
    if not failed:
        return None
    ages = [look.failure.look_seconds or 0.0 if look.failure else 0.0 for look in looks]
    seen = [look.unix_seconds - age for look, age in zip(looks, ages, strict=True) if look.ranks]
    _, end, failure = min(failed, key=lambda row: row[:2])
    return structs.replace(failure, look_seconds=max(0.0, end - max(seen)) if seen else None)


def _is_within(look: Look, unix_seconds: float) -> bool:
    """Whether a time is between the begin of a look's silence and the time at which the next look was due.

    A host looks at a silence once, and again after twice, four times ... the patience: had the silence continued, there
    would be that look.
    """
    begin = look.unix_seconds - look.silent_seconds
    due = begin + max(2 * look.silent_seconds, look.stall_seconds)
    return begin - _SLACK_SECONDS <= unix_seconds <= due + _SLACK_SECONDS


def _joined(looks: Sequence[Look]) -> list[Look]:
    """The newest look at each rank; a host may have several watches, which see different ranks."""
    owners: dict[int, str] = {}
    joined: list[Look] = []
    for look in sorted(looks, key=lambda look: look.unix_seconds, reverse=True):
        taken = {seen.rank: owners[seen.rank] for seen in look.ranks if seen.rank in owners}
        other = next((rank for rank, host in taken.items() if host != look.host), None)
        if other is not None:
            hosts = " and on ".join(sorted((taken[other], look.host)))
            raise UsageError(f"rank {other} was on {hosts}: give the files of one training")
        if not taken and (look.ranks or all(one.host != look.host for one in joined)):
            joined.append(look)
            owners |= {seen.rank: look.host for seen in look.ranks}
    return joined


def _left_out(looks: Sequence[Look], joined: Sequence[Look]) -> Iterator[str]:
    """Sentences on hosts of which no look was taken, and why."""
    newest = {look.host: look for look in sorted(looks, key=lambda look: (not look.guessed, look.unix_seconds))}
    out = [look for host, look in newest.items() if all(other.host != host for other in joined)]
    if nameless := [look.host for look in out if look.guessed]:
        yield f"Left out: {names_text(nameless)}, where no variable names the ranks."
    by_age: dict[str, list[str]] = {}
    for look in out:
        if not look.guessed:
            by_age.setdefault(f"{joined[0].unix_seconds - look.unix_seconds:.0f}", []).append(look.host)
    for age, hosts in by_age.items():
        which = f"{names_text(hosts)}, with a look {age} s earlier"
        yield f"Left out: {which}: it belongs to another silence, or a clock is wrong."


def _places(looks: Sequence[Look]) -> Iterator[str]:
    """A sentence on the ranks that each host has."""
    ordered = sorted((look for look in looks if look.ranks), key=lambda look: look.ranks[0].rank)
    places = [f"{ranks_text([seen.rank for seen in look.ranks])} on {look.host}" for look in ordered]
    more = f" and {len(places) - _MOST_HOSTS} more hosts" if len(places) > _MOST_HOSTS else ""
    yield f"{'; '.join(places[:_MOST_HOSTS])}{more}."
