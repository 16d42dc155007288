"""Cards: error texts of other programs, what each means, and where it stood in a log."""

import tomllib
from enum import Enum
from functools import cache
from pathlib import Path

from msgspec import Struct, convert


class Role(Enum):
    """What a text tells of the failure, in the order in which texts explain it.

    A cause names what is wrong. A failure is the first sign of one on its own rank, and does not say why. A hint is no
    failure, and often the reason of what follows. A wait in vain shows only that another rank is missing; an echo,
    that another process has failed. A note is printed in jobs that go well, too.
    """

    CAUSE = "cause"
    FAILURE = "failure"
    HINT = "hint"
    WAIT = "wait"
    ECHO = "echo"
    NOTE = "note"


class Card(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A text, and what it means. cards.toml has one table for each; the table's title is the card's name.

    `anchor` are words that every such line holds as they stand here; they are searched for first, which is fast.
    `pattern` is a regular expression that the line must fit, too. Its groups have a meaning: `rank` and `host` printed
    the line, `missing` are ranks that were waited for in vain, `work` is the number of a collective, and of each `kind`
    there is a sighting of its own.

    `code` is the check, the finding or the lint rule whose page explains the text. `example` is a real line, and
    `source` says where it is printed or was seen. `in_table`: a line of torchrun's table of failures, which names rank
    and host in the lines before. `waiting_rank` is the rank that waits where the line names none.
    """

    name: str
    role: Role
    anchor: str
    code: str
    meaning: str
    confirm: str
    fix: str
    example: str
    source: str
    pattern: str = ""
    in_table: bool = False
    waiting_rank: int | None = None


class Sighting(Struct, frozen=True, kw_only=True):
    """A card's text in a log: how often, in which lines, and who printed it.

    `ranks`, `tasks` (of `srun -l`), `local_ranks` (of torchrun's own prefix) and `hosts` are those that the lines name.
    `missing` are ranks that others waited for; `works` the ranks whose last collective had each number. `line` is the
    first line, `excerpt` what it says.
    """

    card: Card
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

    @property
    def is_explained(self) -> bool:
        """Does any of it say more than that another process failed?"""
        return any(one.card.role not in (Role.ECHO, Role.NOTE) for one in self.sightings)


@cache
def all_cards() -> tuple[Card, ...]:
    """Every card of cards.toml, in its order."""
    return read_cards(Path(__file__).with_name("cards.toml").read_text("utf-8"))


def read_cards(toml: str) -> tuple[Card, ...]:
    """The cards of a TOML text; msgspec.ValidationError for a field that is unknown, missing or of another type."""
    return convert([dict(name=name, **card) for name, card in tomllib.loads(toml).items()], tuple[Card, ...])
