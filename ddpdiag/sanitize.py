"""Make text from other machines, files, environments and command lines safe to show: no commands, no secrets."""

import os
import re
from collections.abc import Sequence

# Recordings are sent to other people, so the value of every name that might mean a secret is hidden.
_SECRET = r"TOKEN|SECRET|PASS|PWD|PSK|KEY|CREDENTIAL|AUTH|COOKIE"
_SECRET_NAME = re.compile(_SECRET, re.IGNORECASE)
HIDDEN = "***"
_VALUE = r"(?!\s)(?:\"[^\"]*\"|'[^']*'|(?:(?:Bearer|Basic)\s+)?[^\s,;]+)"
# Matches "--api-key VALUE" and "PGPASSWORD=VALUE", but not a path such as /opt/keys/run.py.
_ASSIGNED = re.compile(
    rf"((?<![\w/.-])--?[\w-]{{0,64}}(?:{_SECRET})[\w-]{{0,64}}\s+|"
    rf"(?<![\w.-])[\w.-]{{0,64}}(?:{_SECRET})[\w.-]{{0,64}}=){_VALUE}",
    re.IGNORECASE,
)
# Matches "password: VALUE", but not "KeyError: 'RANK'", which is the reason of a failure.
_LABELLED = re.compile(
    rf"((?:PASSWORD|PASSWD|PASSPHRASE|PWD|PSK|SECRET|TOKEN|API[_-]?KEY|AUTHORIZATION)[\"']?:\s?){_VALUE}", re.IGNORECASE
)
_BEARER = re.compile(r"\b(Bearer|Basic)\s+[\w+/=.~-]{8,}", re.IGNORECASE)
# Matches http://user:password@host, also with "@" or "/" in the password, and http://token@host.
_URL = re.compile(r"(?<=://)(?:[^\s/@:\"']{0,256}:[^\s\"']{0,256}|[^\s/@\"']{1,256})@")
# A text without any of these words has no secret; most lines of a log have none.
_WORDS = (*_SECRET.lower().split("|"), "bearer", "basic", "://")
_NOT_ASCII = re.compile(r"[^ -~\n]")
# GitHub Actions runs such lines of a step's output as commands (actions/runner, src/Runner.Common/ActionCommand.cs).
_COMMAND = re.compile(r"(?:^|\r)[^\S\n]*:(?=:)|##(?=\[)", re.MULTILINE)


def is_secret(name: str) -> bool:
    """Whether a variable or option with this name may hold a secret."""
    return _SECRET_NAME.search(name) is not None


def without_secrets(text: str) -> str:
    """`text` with "***" in place of each value whose name may mean a secret, and of each credential in a URL."""
    lowered = text.lower()
    if not any(word in lowered for word in _WORDS):
        return text
    text = _LABELLED.sub(rf"\1{HIDDEN}", _ASSIGNED.sub(rf"\1{HIDDEN}", _URL.sub(f"{HIDDEN}@", text)))
    return _BEARER.sub(rf"\1 {HIDDEN}", text)


def words_without_secrets(words: Sequence[str]) -> tuple[str, ...]:
    """A command line without secrets. The word after an option such as --password is hidden, even if it has spaces."""
    return tuple(
        HIDDEN if before.startswith("-") and "=" not in before and is_secret(before) else without_secrets(word)
        for before, word in zip(("", *words), words, strict=False)
    )


def printable(text: str) -> str:
    """`text` with invisible characters as escapes ("\\x1b"). Newlines stay; other white space becomes spaces."""
    if text.isascii() and text.isprintable():
        return text
    return _NOT_ASCII.sub(_visible, text.expandtabs(4))


def _visible(found: re.Match[str]) -> str:
    character = found[0]
    if character.isprintable():
        return character
    if character.isspace() and not character.isascii():
        return " "
    return character.encode("unicode_escape").decode()


def without_commands(text: str) -> str:
    """`text` changed so that GitHub Actions runs no line of it as a command; unchanged if GITHUB_ACTIONS is not set."""
    return _COMMAND.sub(r"\g<0> ", text) if os.environ.get("GITHUB_ACTIONS") else text
