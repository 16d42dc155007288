"""Why the watched command failed, from what it wrote: the known text that explains the others.

What passed through a pipe is read, and what files hold since the start; what went to a terminal cannot be.
"""

import os
import signal
import threading
from collections.abc import Iterable
from itertools import chain

from ddpdiag.checks.hosts import ranks_text
from ddpdiag.checks.known_errors import as_known, first_reason
from ddpdiag.watch.model import Failure, Judged
from ddpdiag.watch.output import Sink

# A file system may not respond.
_READ_SECONDS = 5.0


def read_failure(sinks: Iterable[Sink], status: int) -> Failure | None:
    """Why a command with this wait status failed; None where it did not, or no known text in time gives the reason."""
    if status == 0:
        return None
    found: list[Failure | None] = []
    written = chain.from_iterable(sink.written() for sink in sinks)
    reader = threading.Thread(target=lambda: found.append(failure_of(written, status)), daemon=True)
    reader.start()
    reader.join(_READ_SECONDS)
    return found[0] if found else None


def failure_of(written: Iterable[bytes], status: int) -> Failure | None:
    """The reason that `written` gives for the end of a command with this wait status."""
    if (sighting := first_reason(written)) is None:
        return None
    code = os.waitstatus_to_exitcode(status)
    ended = f"exit code {code}" if code > 0 else signal.Signals(-code).name
    return Failure(ended=ended, known=as_known(sighting), ranks=sighting.ranks, missing=sighting.missing)


def judged(failure: Failure) -> Judged:
    """What the text means. Ranks that wait are not named, but those for which they wait."""
    known = failure.known
    who = f"{ranks_text(failure.ranks)}: " if failure.ranks else ""
    awaited = f" It waited for {ranks_text(failure.missing)}." if failure.missing else ""
    return Judged(
        named=failure.missing if known.is_wait else failure.ranks,
        title=f"{who}{known.title}",
        message=f'{known.more}{awaited} The command printed "{known.quote}".'.strip(),
        fix=known.fix,
    )
