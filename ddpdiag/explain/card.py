"""Cards: error texts of other programs, and what each means; they are read from cards/*.toml."""

import tomllib
from enum import Enum
from functools import cache
from pathlib import Path

from msgspec import Struct, convert


class Role(Enum):
    """What a text means for the failure, in the order in which texts explain it.

    A cause names what is wrong. A failure is its first sign on its own rank, without the reason. A hint is no failure,
    but often the reason of what follows. A wait shows only that another rank is missing; an echo, that another process
    has failed. A note is printed in healthy jobs, too.
    """

    CAUSE = "cause"
    FAILURE = "failure"
    HINT = "hint"
    WAIT = "wait"
    ECHO = "echo"
    NOTE = "note"


class Card(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A text, and what it means: a table of cards/*.toml, with the card's name as its title.

    `anchor` are words that every such line holds as they stand here; they are searched for first, which is fast.
    `pattern` is a regular expression that the line must fit, too. Its groups have a meaning: `rank` and `host` printed
    the line, `missing` are ranks that were waited for in vain, `work` is the number of a collective, `operation` and
    `elements` what it is, `group` the group in which it is counted, and of each `kind` there is a sighting of its own.

    `code` is the check, the finding or the lint rule whose page explains the text. `example` is a real line, and
    `source` is where it is printed or was seen. `in_table`: a line of torchrun's table of failures, which names rank
    and host in the lines before. `waiting_rank` is the rank that waits where the line names none. Beside a text of a
    card of `echo_of` this one is an echo. The card `mismatch` takes its place where ranks name different collectives of
    one number.
    """

    name: str
    role: Role = Role.CAUSE
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
    echo_of: tuple[str, ...] = ()
    mismatch: str = ""


# In the order in which their cards are tried: the first one that fits a line is taken.
_FILES = (
    "kernel", "xid", "slurm", "slurm_start", "mpi", "kubernetes", "containers", "launchers", "programs", "elastic",
    "memory", "cuda", "ib", "nccl", "torch_nccl", "c10d", "ddp", "python", "files", "training", "torchrun",
)  # fmt: skip


@cache
def all_cards() -> tuple[Card, ...]:
    """Every card of cards/*.toml, in the order in which they are tried."""
    folder = Path(__file__).with_name("cards")
    return tuple(card for name in _FILES for card in read_cards((folder / f"{name}.toml").read_text("utf-8")))


def read_cards(toml: str) -> tuple[Card, ...]:
    """The cards of a TOML text; msgspec.ValidationError for a field that is unknown, missing or of another type."""
    return convert([dict(name=name, **card) for name, card in tomllib.loads(toml).items()], tuple[Card, ...])
