"""NVLinks of each GPU.

The right number of links depends on the board (an H100 SXM has 18, an H100 NVL 12, a card without a bridge none), so a
link counts as missing only if other GPUs of the same model have it up: most of them, or half of those on boards. NCCL
then uses fewer links or PCIe (with NVSwitches it may fail to start), and every ring or tree runs at the speed of that
GPU.

Findings and their causes:

Fix: run `nvidia-smi nvlink -s` and `nvidia-smi nvlink -e` on the named host; reset all GPUs of the host, then run the
field diagnostic.

Confirm by hand: `nvidia-smi nvlink -s` on two hosts with the same GPUs, and compare; `nvidia-smi nvlink -e` shows
counts of errors.

Sources: NVML API reference (docs.nvidia.com/deploy/nvml-api), nvmlDeviceGetNvLinkState and
nvmlDeviceGetNvLinkErrorCounter; DCGM's NVLink policy.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from ddpdiag.checks.api import Check, Nothing, Scope, Seen, Stage
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.gpu import cards
from ddpdiag.checks.gpu.cards import Action, Card, Fault, Recheck, by_model, card_findings, cards_of, finding_of, mode
from ddpdiag.checks.gpu.signs import nvlink_text, total_faults
from ddpdiag.model import Finding, Severity
from ddpdiag.probes.gpu.links import FABRIC_JOINED

FINDINGS = {
    "down": FindingSpec(
        "links are down that other GPUs of that model have up: a bridge not seated, a bad link, a switch or its "
        "partition. An error if these GPUs have joined an NVSwitch fabric, otherwise a warning: a card may just have "
        "no bridge."
    ),
    "errors": FindingSpec.warning(
        "replays and recoveries since the driver was loaded: a marginal link. GPU010 shows whether they rose during "
        "the run."
    ),
}


def judge(seen: Seen[Nothing]) -> Iterator[Finding]:
    for _, siblings in by_model(cards_of(seen)):
        yield from _missing_link_findings(seen, siblings)
    yield from card_findings(seen, lambda card: total_faults(seen, card.health))


def _missing_link_findings(seen: Seen[Nothing], siblings: Sequence[Card]) -> Iterator[Finding]:
    """Yield findings about GPUs with fewer links up than others of their model. GPUs with MIG have no links up."""
    up = {
        card: {link.number for link in card.health.nvlinks if link.up}
        for card in siblings
        if card.health.nvlinks and not card.health.mig
    }
    counts = Counter(number for numbers in up.values() for number in numbers)
    is_switched = 2 * sum(card.health.fabric.state == FABRIC_JOINED for card in up) > len(up)
    # Behind NVSwitches every GPU must have its links; cards of one model may have bridges or not. Drivers report a
    # fabric from Hopper on; modules on a board (A100-SXM4, V100-SXM2) have no bridges either.
    needs_links = is_switched or any("SXM" in (card.health.name or "") for card in up)
    common = {n for n, ups in counts.items() if 2 * ups > len(up) or (needs_links and 2 * ups == len(up))}
    # Bridges of other cards may sit on links of other numbers, so the number of links must be lower, too.
    expected = int(mode([len(numbers) for numbers in up.values()]) or 0)
    for card, numbers in up.items():
        missing = sorted(link.number for link in card.health.nvlinks if not link.up and link.number in common)
        if missing and len(numbers) < expected:
            fault = _down_fault(missing, len(numbers), expected, is_switched=is_switched, needs_links=needs_links)
            yield finding_of(seen, card, fault)


def _down_fault(missing: Sequence[int], up_count: int, expected: int, *, is_switched: bool, needs_links: bool) -> Fault:
    return Fault(
        "down",
        "NVLinks of a GPU are down",
        f"down: {nvlink_text(missing)} ({up_count} of {expected} are up). Other GPUs of that model have these links up",
        Action.RESET if needs_links else Action.MONITOR,
        "If that does not help, have the links inspected."
        if needs_links
        else "Nothing to do for a card that has no NVLink bridge.",
        {"links_down": [*missing], "links_up": up_count, "links_expected": expected},
        severity=Severity.ERROR if is_switched else Severity.WARNING,
        recheck=Recheck("nvidia-smi nvlink -s -i {gpu}", "the card has a bridge and a link is still inactive"),
    )


skip = cards.skip
CHECK: Check[Nothing] = Check(__name__, "GPU006", "nvlink", Stage.GPU, Scope.HOST)
