"""Cards: error texts of other programs, and what each means; they are read from cards/*.toml."""

import re
import tomllib
from collections.abc import Mapping
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Literal

from msgspec import Struct, convert, structs

PLACEHOLDER = re.compile(r"(?<![$\w])\{([a-z_]{1,30})\}")
# Logs are text of other machines, so a value that is put into a command has no character that a shell obeys.
_FILLED = ("meaning", "confirm", "fix")
_PLAIN = re.compile(r"[\w.:/,@+=\[\] -]{1,100}")


class Role(Enum):
    """The meaning of a text for the failure, in the order in which texts explain it.

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

    `anchor` is a text that every such line contains exactly; it is searched for first, which is fast. `pattern` is a
    regular expression that the line must fit, too. Its groups have a meaning: `rank` and `host` printed the line,
    `other` is a second rank that the line is about, `missing` are ranks that were waited for in vain, `work` is the
    number of a collective, `operation` and `elements` what this collective is, and `group` the group in which it is
    counted. Each `kind` has its own sighting.

    `meaning`, `confirm` and `fix` may name further groups in braces: "{port}" becomes the port of the first line. If
    that line has none, it becomes the one in `defaults`, or the name in capitals (PORT). A value with a character that
    a shell obeys is not used.

    `code` is the check, the finding or the lint rule whose page explains the text. `example` is a real line, and
    `source` is where such a line is printed or was seen. `in_table`: a line of torchrun's table of failures, which
    names rank and host in the lines before. `waiting_rank` is the rank that waits if the line names none. If the log
    has a text of a card in `echo_of`, this text is an echo. If ranks name different collectives of one number, the card
    `mismatch` replaces this one. `is_retried`: the program tries again, so beside another failure it is a note.

    `vague`: the text shows only which library failed, or only that a process ended. `fallback`: the card is tried if no
    other card fits the line, and quotes the first unknown line of its kind. Known texts win over it, except vague ones
    that are printed later. A fallback with the role "hint" is a warning; it becomes the failure if the log shows that
    the job failed, and at most which library failed. `in_traceback`: the card is matched against the last line of each
    Python traceback. `action` is what the GPU or NVSwitch of a line of the kernel's log needs: a cause with an action
    is a fault of that device, a cause without an action is a fault of a program.
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
    is_retried: bool = False
    defaults: dict[str, str] = {}
    vague: Literal["", "library", "process"] = ""
    fallback: bool = False
    in_traceback: bool = False
    action: Literal["", "monitor", "reset", "reboot", "isolate"] = ""

    def filled(self, values: Mapping[str, str]) -> "Card":
        """The card with the values of a line in place of its placeholders."""
        known = self.defaults | {name: value for name, value in values.items() if _PLAIN.fullmatch(value)}
        texts = {
            name: PLACEHOLDER.sub(lambda match: known.get(match[1], match[1].upper()), getattr(self, name))
            for name in _FILLED
        }
        return structs.replace(self, **texts)


# In the order in which their cards are tried: the first one that fits a line is taken.
_FILES = (
    "kernel", "xid", "slurm", "slurm_start", "mpi", "kubernetes", "containers", "launchers", "programs", "elastic",
    "memory", "cuda", "ib", "nccl", "torch_nccl", "c10d", "ddp", "python", "files", "training", "torchrun", "unknown",
)  # fmt: skip


@cache
def all_cards() -> tuple[Card, ...]:
    """Every card of cards/*.toml, in the order in which they are tried."""
    folder = Path(__file__).with_name("cards")
    return tuple(card for name in _FILES for card in read_cards((folder / f"{name}.toml").read_text("utf-8")))


def read_cards(toml: str) -> tuple[Card, ...]:
    """The cards of a TOML text; msgspec.ValidationError for a field that is unknown, missing or of another type."""
    return convert([dict(name=name, **card) for name, card in tomllib.loads(toml).items()], tuple[Card, ...])
