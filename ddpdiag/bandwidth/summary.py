"""What several collectives come to in one sentence: those that are held back by the same thing are said together."""

from collections.abc import Iterator, Sequence

from ddpdiag.bandwidth.text import rate_text
from ddpdiag.model.bench import Series

# So many sentences; of more, how many there are.
MOST_SAID = 3
_NOT_KNOWN = "what this hardware should reach is not known."


def summary(found: Sequence[Series]) -> str:
    """The sentence of a benchmark: that of its one series, or one for each thing that holds several back."""
    said = list(dict.fromkeys(_sentences(found)))
    left = len(said) - MOST_SAID
    rest = [f"{left} more {'result is' if left == 1 else 'results are'} in the report."] if left > 0 else []
    return " ".join((*said[:MOST_SAID], *rest)) or "Nothing was measured."


def _sentences(found: Sequence[Series]) -> Iterator[str]:
    groups: dict[tuple[str, str], list[Series]] = {}
    for one in found:
        groups.setdefault((one.backend, held_back(one) or one.sentence), []).append(one)
    for (_, what), own in groups.items():
        # The same sentence of several is about a rank or the machine, not about a collective.
        yield own[0].sentence if len({one.sentence for one in own}) == 1 else _together(own, what)


def held_back(one: Series) -> str:
    """What a series' sentence says of it before the numbers: "is bound by PCIe"; nothing if that is not its subject."""
    head, _, told = one.sentence.partition(f"{one.collective} over {one.backend}")
    if head:
        return ""
    if told.startswith(": "):
        return _NOT_KNOWN if told.endswith(_NOT_KNOWN) else ""
    return told.strip().partition(": ")[0]


def _together(found: Sequence[Series], what: str) -> str:
    """ "all_reduce and broadcast over gloo: each is bound by PCIe, 1.2 to 2.4 GB/s busbw, 80 to 90 % of what ..."."""
    collectives = tuple(dict.fromkeys(one.collective for one in found))
    names = " and ".join(filter(None, (", ".join(collectives[:-1]), collectives[-1])))
    many = f" ({len(found)} series)" if len(found) > len(collectives) else ""
    rates = sorted(one.peak_busbw_bytes_per_s for one in found)
    busbw = f"{_span(rate_text(rates[0]), rate_text(rates[-1]))} busbw"
    if what == _NOT_KNOWN:
        return f"{names} over {found[0].backend}{many}: {busbw}; {what}"
    shares = sorted(one.share for one in found if one.share is not None)
    reached = ""
    if len(shares) == len(found):
        reached = f", {_span(f'{shares[0] * 100:.0f} %', f'{shares[-1] * 100:.0f} %')} of what is expected"
    return f"{names} over {found[0].backend}{many}: each {what}, {busbw}{reached}."


def _span(low: str, high: str) -> str:
    """ "580 MB/s to 2.06 GB/s", or "1.2 to 2.4 GB/s"."""
    if low == high:
        return low
    number, _, unit = low.partition(" ")
    return f"{number if high.endswith(f' {unit}') else low} to {high}"
