"""Long names of hosts without what all of them share: "ip-10-0-12-30" of "ip-10-0-12-30.eu-central-1.compute.internal".

In a table each character of a name is taken from a figure. What was left out is said once, beside the table.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

from ddpdiag.render.page import Page, one_line

# Longer names take the room of two figures.
LONG = 16
_ADDRESS = re.compile(r"[\d.]+")
# Where a name can be cut so that what is left is still a name.
_CUT = re.compile(r".*[-_.]")


class Short(NamedTuple):
    """What stands for each whole name; `rule` is what "*" is put into to have it back, empty if nothing is left out."""

    names: Mapping[str, str]
    rule: str = ""

    @property
    def longest(self) -> int:
        """Characters of the longest one."""
        return max(map(len, self.names.values()), default=0)


def write_hosts_rule(page: Page, rule: str) -> None:
    """What stands for "*" in a table's names."""
    if rule:
        page.write(one_line(rule), lead="hosts: ", style="dim", lead_style="dim")


def shortened(names: Iterable[str]) -> Short:
    """The names as they are where they are short, else without their domain, else without their beginning as well."""
    every = [*shorter(names)]
    return next((short for short in every if short.longest <= LONG), every[-1])


def shorter(names: Iterable[str]) -> Iterator[Short]:
    """First whole, then ever shorter, as far as they stay different and nothing is left empty."""
    whole = [*dict.fromkeys(names)]
    yield Short({name: name for name in whole})
    domain = _domain(whole)
    heads = [name.removesuffix(domain) for name in whole]
    if domain:
        yield Short(dict(zip(whole, heads, strict=True)), f"*{domain}")
    if prefix := _prefix(heads):
        yield Short({name: head[len(prefix) :] for name, head in zip(whole, heads, strict=True)}, f"{prefix}*{domain}")


def _domain(names: Sequence[str]) -> str:
    """The labels behind the first dot that all names end in, such as ".example.org"."""
    if not names or any(_ADDRESS.fullmatch(name) for name in names):
        return ""
    shared: list[str] = []
    for labels in zip(*(reversed(name.split(".")[1:]) for name in names), strict=False):
        if len(set(labels)) > 1:
            break
        shared.append(f".{labels[0]}")
    domain = "".join(reversed(shared))
    return domain if all(name != domain for name in names) else ""


def _prefix(names: Sequence[str]) -> str:
    """What all of several names begin with, up to its last separator."""
    if len(names) < 2:
        return ""
    # What the first and the last in order begin with, all between them do.
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(min(names), max(names), strict=False))
    match = _CUT.match("".join(letter for letter, _ in shared))
    return match[0] if match and all(len(name) > len(match[0]) for name in names) else ""
