"""Recordings without what tells whose machine made them, still the same run for every judgement.

    python tests/gpu/anonymise.py recording.jsonl > tests/recordings/NAME.jsonl

Hosts become n0, n1, ...; folders before our own and Python's are left out; UUIDs of GPUs and boots, hardware addresses
and IP addresses (but for the loopback's) become numbered ones, each the same wherever it occurs.
"""

import ipaddress
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_HARDWARE = re.compile(r"(?<![0-9a-fA-F:])(?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}(?![0-9a-fA-F:])")
# Versions of firmware have more parts.
_IPV4 = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w]|\.\d)")
# Folders of the machine before what is ours, or Python's.
_FOLDERS = re.compile(
    r"(?<![\w.])/(?:[^\s/:\"'\\]+/)*?(?=tests/inject|ddpdiag/|site-packages/|lib/python3|torchelastic_)"
)
_IPV6 = re.compile(r"(?<![\w:.])[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,7}(?![\w:])")


class _Numbered:
    """A new name for each old one."""

    def __init__(self, name: Callable[[int], str]) -> None:
        self._name = name
        self._known: dict[str, str] = {}

    def __call__(self, old: str) -> str:
        return self._known.setdefault(old, self._name(len(self._known)))


def anonymise(lines: Sequence[str]) -> Iterator[str]:
    """The lines of one recording, in order."""
    yield from anonymise_with(lines, Texts(hosts_in(lines)))


def anonymise_with(lines: Iterable[str], texts: "Texts") -> Iterator[str]:
    """The same, where several recordings and logs are to agree on their names."""
    for line in lines:
        yield json.dumps(_changed(json.loads(line), texts), separators=(",", ":"))


def hosts_in(lines: Iterable[str]) -> list[str]:
    """Names of hosts in a recording, as ranks and the launcher gave them."""
    found: dict[str, None] = {}
    for value in map(json.loads, lines):
        if value.get("type") == "arrival":
            found.setdefault(value["place"]["host"])
        for name in value.get("layout", ()):
            found.setdefault(name)
    return list(found)


class Texts:
    """Changes names in a text."""

    def __init__(self, names: list[str]) -> None:
        # A name within another one counts where it stands alone; of two, the longer one first.
        spelt = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
        self._names = re.compile(rf"(?<![\w-])(?:{spelt})(?![\w-])") if spelt else None
        self._hosts = {name: f"n{number}" for number, name in enumerate(names)}
        self._uuids = _Numbered("00000000-0000-0000-0000-{:012x}".format)
        self._cards = _Numbered(lambda number: f"02:00:00:00:{number >> 8:02x}:{number & 255:02x}")
        self._addresses = _Numbered(lambda number: f"10.0.{number >> 8}.{(number & 255) + 1}")
        self._addresses_6 = _Numbered(lambda number: f"fd00::{number + 1:x}")

    def __call__(self, text: str) -> str:
        text = _FOLDERS.sub("/", text)
        text = _UUID.sub(lambda found: self._uuids(found[0].lower()), text)
        text = _HARDWARE.sub(lambda found: self._cards(found[0].lower()), text)
        text = _IPV4.sub(lambda found: self._address(found[0], self._addresses), text)
        text = _IPV6.sub(lambda found: self._address(found[0], self._addresses_6), text)
        return self._names.sub(lambda found: self._hosts[found[0]], text) if self._names else text

    def _address(self, text: str, new: _Numbered) -> str:
        try:
            known = ipaddress.ip_address(text)
        except ValueError:
            return text
        return text if known.is_loopback or known.is_unspecified else new(str(known))


def _changed(value: object, texts: Texts) -> object:
    match value:
        case dict():
            return {texts(key): _changed(item, texts) for key, item in value.items()}
        case list():
            return [_changed(item, texts) for item in value]
        case str():
            return texts(value)
    return value


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in anonymise(Path(sys.argv[1]).read_text().splitlines()))
