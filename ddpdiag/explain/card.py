"""Cards: error texts of other programs and their meanings, read from cards/*.toml."""

import re
import tomllib
from collections.abc import Mapping
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Literal

from msgspec import Struct, convert, structs

PLACEHOLDER = re.compile(r"(?<![$\w])\{([a-z_]{1,30})\}")
# Logs come from other machines, so a value that is put into these texts may have no character that a shell interprets.
_TEMPLATE_FIELDS = ("meaning", "confirm", "fix")
_SAFE_VALUE = re.compile(r"[\w.:/,@+=\[\] -]{1,100}")


class Role(Enum):
    """The meaning of a text for the failure of a job. Roles are ordered from the best explanation to the weakest.

    A cause names what is wrong. A failure shows that the rank itself failed, but not why. A hint is not a failure, but
    often the reason for a later one. A wait shows only that another rank is missing. An echo shows only that another
    process has failed. A note is printed in healthy jobs, too.
    """

    CAUSE = "cause"
    FAILURE = "failure"
    HINT = "hint"
    WAIT = "wait"
    ECHO = "echo"
    NOTE = "note"


class Card(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An error text of another program and its meaning: one table of cards/*.toml, whose title is the card's name.

    A line has the card's text if it contains `anchor` exactly and fits the regular expression `pattern`. The groups of
    the pattern are: `rank` and `host`, which printed the line; `other`, a second rank that the line is about;
    `missing`, ranks that were waited for in vain; `work`, the number of a collective, with its `operation`, its
    `elements` and the process `group` that counts it; `reporter`, the rank that reported a time-out first; `world`, the
    number of ranks that should print the line; and `kind`: lines of different kinds are counted apart.

    `meaning`, `confirm` and `fix` may have placeholders for further groups: "{port}" becomes the port in the first
    line. If that line has no port, or one with a character that a shell interprets, the value in `defaults` replaces
    the placeholder, or else its name in capitals (PORT).

    `code` is the check, finding or lint rule whose page explains the text. `example` is a real line; `source` says
    which program prints it, or where it was found. `also` has words by which users look it up, besides those of its
    texts. `in_table` marks a line of torchrun's table of failures, whose rank and host are in the lines above;
    `is_root_cause` marks one that counts only in the last part of that table. `waiting_rank` is the rank that waits, if
    the line names no rank. The text counts as an echo if the log also has the text of a card in `echo_of`. If ranks
    name different collectives under one number, the card `mismatch_card` replaces this one. A note whose pattern has
    the group `world` becomes a wait if the log ends there and ranks are absent. `is_retried` marks a text after which
    the program tries again: it counts as a note if the log has another reason for the failure.

    `shows_only` is "library" or "process" if the text shows only which library failed, or only that a process ended.
    `is_fallback` marks a card for lines that no other card knows. Such a card quotes the first line of each kind. If it
    has the role "hint", it is a warning: the warning counts as the failure if the log shows a failure, but no better
    reason for that failure. One that `is_last_resort` counts only if nothing else but notes is known of the log. A
    card `in_traceback` is matched against the last line of each Python traceback. `action` is what must be done with
    the GPU or NVSwitch that a line of the kernel's log names. A cause with an action is a fault of that device; a cause
    without an action is a fault of a program.
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
    also: tuple[str, ...] = ()
    in_table: bool = False
    is_root_cause: bool = False
    waiting_rank: int | None = None
    echo_of: tuple[str, ...] = ()
    mismatch_card: str = ""
    is_retried: bool = False
    defaults: dict[str, str] = {}
    shows_only: Literal["", "library", "process"] = ""
    is_fallback: bool = False
    is_last_resort: bool = False
    in_traceback: bool = False
    action: Literal["", "monitor", "reset", "reboot", "isolate"] = ""

    def with_values(self, values: Mapping[str, str]) -> "Card":
        """The card with its placeholders replaced by the values of a line's groups, or by their defaults."""
        usable_values = self.defaults | {name: value for name, value in values.items() if _SAFE_VALUE.fullmatch(value)}
        texts = {
            name: PLACEHOLDER.sub(lambda match: usable_values.get(match[1], match[1].upper()), getattr(self, name))
            for name in _TEMPLATE_FIELDS
        }
        return structs.replace(self, **texts)


# The files in the order in which their cards are tried: the first card that fits a line is used.
_CARD_FILES = (
    "kernel", "xid", "slurm", "slurm_start", "mpi", "kubernetes", "containers", "launchers", "programs", "elastic",
    "memory", "cuda", "nccl_diagnostics", "ib", "nccl", "torch_nccl", "c10d", "ddp", "python", "files", "training",
    "torchrun", "engines", "frameworks", "unknown",
)  # fmt: skip


@cache
def all_cards() -> tuple[Card, ...]:
    """All cards of cards/*.toml, in the order in which they are tried."""
    folder = Path(__file__).with_name("cards")
    return tuple(card for name in _CARD_FILES for card in read_cards((folder / f"{name}.toml").read_text("utf-8")))


def read_cards(toml: str) -> tuple[Card, ...]:
    """Parse cards in TOML. Raises msgspec.ValidationError if a field is unknown, missing or of a wrong type."""
    return convert([dict(name=name, **card) for name, card in tomllib.loads(toml).items()], tuple[Card, ...])
