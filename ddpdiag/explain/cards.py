"""Texts that others print when a job fails, and where they were seen."""

from enum import Enum

from msgspec import Struct


class Role(Enum):
    """What a text tells of the failure, in the order in which texts explain it.

    A cause names what is wrong. A failure is the first sign of one on its own rank, and does not say why. A hint is no
    failure, and often the reason of what follows. Who waits in vain knows only that somebody did not come; an echo
    that somebody else has failed. A note is printed in jobs that go well, too.
    """

    CAUSE = "cause"
    FAILURE = "failure"
    HINT = "hint"
    WAIT = "wait"
    ECHO = "echo"
    NOTE = "note"


class Symptom(Struct, frozen=True, kw_only=True):
    """A text, and what it means.

    `anchor` are words that every such line holds as they stand here, `pattern` is a regular expression for the rest of
    the line. Its group `missing` names ranks that were waited for in vain, `rank` the one that speaks, `work` is
    the number of a collective. `code` is the
    check, or the finding, whose page explains it. `example` is a real line, `source` where it is printed or was seen.
    """

    name: str
    role: Role
    anchor: str
    code: str
    says: str
    confirm: str
    todo: str
    example: str
    source: str
    pattern: str = ""


class Sighting(Struct, frozen=True, kw_only=True):
    """A symptom in a log: how often, in which lines, and who printed it.

    `ranks`, `tasks` (of `srun -l`), `local_ranks` (of torchrun's own prefix) and `hosts` are those that the lines name.
    `missing` are ranks that others waited for; `works` the ranks whose last collective had each number. `line` is the
    first line, `excerpt` what it says.
    """

    symptom: Symptom
    count: int
    line: int
    last_line: int
    excerpt: str
    ranks: tuple[int, ...] = ()
    local_ranks: tuple[int, ...] = ()
    tasks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    missing: tuple[int, ...] = ()
    works: dict[int, tuple[int, ...]] = {}


class Explanation(Struct, frozen=True, kw_only=True):
    """What a text or a log says: the sightings, the one that explains the others first; `lines` were read."""

    sightings: tuple[Sighting, ...]
    lines: int
    source: str
