"""Findings as boxes: who, what was seen, what was expected, and what to do."""

from collections.abc import Iterable, Sequence

from ddpdiag.model import Finding, Scalar, Severity
from ddpdiag.render.exports import shell_line
from ddpdiag.render.hosts import fold_hosts, fold_ranks
from ddpdiag.render.html.page import Fact, FindingBox, Listed, paragraphs, words
from ddpdiag.render.page import one_line, printable
from ddpdiag.render.units import count, label, quantity

# Boxes of one code, and in all; the others are named in one line.
SAME_SHOWN, ALL_SHOWN = 12, 120
# Names of one kind, items of one list.
_NAMES_SHOWN, _ITEMS_SHOWN = 24, 48
_ORDER = (Severity.ERROR, Severity.WARNING, Severity.INFO)
# As the terminal: how the run was asked for or ended, where there is nobody to look for.
_OF_THE_RUN = (".unsupported", ".unmeasured", ".budget", ".told")
# Evidence that is the yardstick, not what was seen.
_YARDSTICKS = frozenset({"expected", "usual", "source", "least", "limit", "deadline", "possible", "baseline", "of"})


def boxes(findings: Sequence[Finding]) -> tuple[tuple[FindingBox, ...], tuple[str, ...]]:
    """The findings, errors first, and a sentence for each code of which some are left out."""
    groups: dict[tuple[Severity, str], list[Finding]] = {}
    for finding in sorted(findings, key=lambda finding: _ORDER.index(finding.severity)):
        groups.setdefault((finding.severity, finding.code), []).append(finding)
    shown: list[FindingBox] = []
    more: list[str] = []
    for group in groups.values():
        most = min(SAME_SHOWN, max(1, ALL_SHOWN - len(shown)))
        shown += map(_box, group[:most])
        if rest := group[most:]:
            names = "; ".join(f"{fact.name} {fact.value}" for fact in _who(rest)) or "nobody can be blamed"
            head = f"{len(rest):,} more {one_line(group[0].code)} ({group[0].severity.value})"
            more.append(words(f"{head}: {names}. The JSON report has all of them."))
    return tuple(shown), tuple(more)


def _box(finding: Finding) -> FindingBox:
    info = finding.severity is Severity.INFO
    who = _who((finding,))
    silent = bool(who) or info or finding.code.endswith(_OF_THE_RUN)
    plain = {name: value for name, value in finding.evidence.items() if not _is_list(value)}
    return FindingBox(
        severity=finding.severity.value,
        code=words(finding.code),
        title=words(finding.title),
        message=paragraphs(finding.message),
        who=who,
        about="About" if info else "Blamed",
        nobody="" if silent else "nobody: the evidence points at no single rank, host, GPU or link",
        expected=_facts(plain, yardstick=True),
        facts=_facts(plain, yardstick=False),
        lists=tuple(_listed(name, value) for name, value in finding.evidence.items() if isinstance(value, list)),
        remedy=paragraphs(finding.remedy),
        commands="\n".join(printable(shell_line(name, value)) for name, value in finding.env.items()),
    )


def _is_list(value: Scalar | list[Scalar]) -> bool:
    return isinstance(value, list)


def _facts(evidence: dict[str, Scalar | list[Scalar]], *, yardstick: bool) -> tuple[Fact, ...]:
    return tuple(
        Fact(words(label(name)), words(_value(name, value)))
        for name, value in evidence.items()
        if (name.partition("_")[0] in _YARDSTICKS) is yardstick
    )


def _value(name: str, value: Scalar | list[Scalar]) -> str:
    return "not known" if value is None else quantity(name, value)


def _listed(name: str, value: list[Scalar]) -> Listed:
    items = [words(_value(name, item)) for item in value[:_ITEMS_SHOWN]]
    if left := len(value) - len(items):
        items.append(f"+{left:,} more, in the JSON report")
    return Listed(words(label(name)), tuple(items))


def _who(findings: Iterable[Finding]) -> tuple[Fact, ...]:
    """Ranks, hosts, GPUs and links of some findings, each kind folded."""
    kept = list(findings)
    ranks = {rank for finding in kept for rank in finding.ranks}
    nodes = dict.fromkeys(node for finding in kept for node in finding.nodes)
    gpus = tuple(dict.fromkeys(gpu for finding in kept for gpu in finding.gpus))
    links = tuple(dict.fromkeys(link for finding in kept for link in finding.links))
    kinds = (
        ("rank", len(ranks), fold_ranks(ranks, limit=_NAMES_SHOWN)),
        ("host", len(nodes), fold_hosts(nodes, limit=_NAMES_SHOWN)),
        ("GPU", len(gpus), _names(gpus)),
        ("link", len(links), _names(links)),
    )
    return tuple(Fact(count(number, noun).split()[-1], words(names)) for noun, number, names in kinds if number)


def _names(names: Sequence[str]) -> str:
    left = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" +{left:,} more" if left > 0 else "")
