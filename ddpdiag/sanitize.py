"""Make text of other machines, files, environments and command lines safe to show: no commands, no secrets."""

import os
import re
from collections.abc import Sequence

# Recordings are sent to other people, so the value of every name that might mean a secret is hidden.
_SECRET = r"TOKEN|SECRET|PASS|PWD|PSK|KEY|CREDENTIAL|AUTH|COOKIE"
_NAME = re.compile(_SECRET, re.IGNORECASE)
_HIDDEN = "***"
_VALUE = r"(?!\s)(?:\"[^\"]*\"|'[^']*'|(?:(?:Bearer|Basic)\s+)?[^\s,;]+)"
# "--api-key VALUE", "PGPASSWORD=VALUE"; a path such as /opt/keys/run.py names no secret.
_ASSIGNED = re.compile(
    rf"((?<![\w/.-])--?[\w-]{{0,64}}(?:{_SECRET})[\w-]{{0,64}}\s+|"
    rf"(?<![\w.-])[\w.-]{{0,64}}(?:{_SECRET})[\w.-]{{0,64}}=){_VALUE}",
    re.IGNORECASE,
)
# "password: VALUE"; but not "KeyError: 'RANK'", which is the reason of a failure.
_LABELLED = re.compile(
    rf"((?:PASSWORD|PASSWD|PASSPHRASE|PWD|PSK|SECRET|TOKEN|API[_-]?KEY|AUTHORIZATION)[\"']?:\s?){_VALUE}", re.IGNORECASE
)
_BEARER = re.compile(r"\b(Bearer|Basic)\s+[\w+/=.~-]{8,}", re.IGNORECASE)
# http://user:password@host, also with an "@" or "/" in the password; and http://token@host.
_URL = re.compile(r"(?<=://)(?:[^\s/@:\"']{0,256}:[^\s\"']{0,256}|[^\s/@\"']{1,256})@")
_NOT_PLAIN = re.compile(r"[^ -~\n]")
# What GitHub Actions takes for a command in the output of a step: actions/runner, src/Runner.Common/ActionCommand.cs.
_COMMAND = re.compile(r"(?:^|\r)[^\S\n]*:(?=:)|##(?=\[)", re.MULTILINE)


def is_secret(name: str) -> bool:
    """Whether the value of a variable or option with this name may be a secret."""
    return _NAME.search(name) is not None


def without_secrets(text: str) -> str:
    """`text` with "***" in place of values whose names may mean a secret, and of credentials in addresses."""
    text = _LABELLED.sub(rf"\1{_HIDDEN}", _ASSIGNED.sub(rf"\1{_HIDDEN}", _URL.sub(f"{_HIDDEN}@", text)))
    return _BEARER.sub(rf"\1 {_HIDDEN}", text)


def words_without_secrets(words: Sequence[str]) -> tuple[str, ...]:
    """A command line without secrets. A word after an option such as --password is hidden, even if it has spaces."""
    return tuple(
        _HIDDEN if before.startswith("-") and "=" not in before and is_secret(before) else without_secrets(word)
        for before, word in zip(("", *words), words, strict=False)
    )


def printable(text: str) -> str:
    """`text` with invisible characters as escapes ("\\x1b"). Line ends stay, tabs and odd spaces become spaces."""
    if text.isascii() and text.isprintable():
        return text
    return _NOT_PLAIN.sub(_visible, text.expandtabs(4))


def _visible(found: re.Match[str]) -> str:
    character = found[0]
    if character.isprintable():
        return character
    if character.isspace() and not character.isascii():
        return " "
    return character.encode("unicode_escape").decode()


def without_commands(text: str) -> str:
    """`text` changed so that GitHub Actions obeys no line of it; unchanged if GITHUB_ACTIONS is not set."""
    return _COMMAND.sub(r"\g<0> ", text) if os.environ.get("GITHUB_ACTIONS") else text
