"""NVLinks of each GPU.

The right number of links depends on the board (an H100 SXM has 18, an H100 NVL 12, a card without a bridge none), so a
link counts as missing only if most other GPUs of the same model have it up. NCCL then uses fewer links or PCIe (with
NVSwitches it may fail to start), and every ring or tree runs at the speed of that GPU.

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
from ddpdiag.checks.gpu import devices
from ddpdiag.checks.gpu.cards import Action, Card, Fault, Watch, by_model, card_findings, cards_of, finding_of, usual
from ddpdiag.checks.gpu.signs import numbers_text, totals
from ddpdiag.checks.hosts import names_text
from ddpdiag.checks.odd import no_majority
from ddpdiag.model import Finding, Severity
from ddpdiag.probes.gpu.links import JOINED

FINDINGS = {
    "down": FindingSpec(
        "links are down that most GPUs of that model have up: a bridge not seated, a bad link, a switch or its "
        "partition. An error if these GPUs have joined an NVSwitch fabric, otherwise a warning: a card may just have "
        "no bridge."
    ),
    "uneven": FindingSpec.warning(
        "links that only half of the GPUs have up: no majority shows which GPUs are wrong, so none is blamed."
    ),
    "errors": FindingSpec.warning(
        "more than `link_errors` replays and recoveries since the driver was loaded: a marginal link. GPU010 shows "
        "whether they rose during the run; CRC errors alone are evidence and no finding, since NVIDIA's limit is 100 a "
        "second."
    ),
}


def judge(seen: Seen[Nothing]) -> Iterator[Finding]:
    for _, cards in by_model(cards_of(seen)):
        yield from _missing(seen, cards)
    yield from card_findings(seen, lambda card: totals(seen, card.health))


def _missing(seen: Seen[Nothing], cards: Sequence[Card]) -> Iterator[Finding]:
    """Findings about GPUs of one model with fewer links than others; MIG takes the links down."""
    up = {card: {link.number for link in card.health.nvlinks if link.up} for card in cards if not card.health.mig}
    up = {card: numbers for card, numbers in up.items() if card.health.nvlinks}
    counts = Counter(number for numbers in up.values() for number in numbers)
    common = {number for number, ups in counts.items() if 2 * ups > len(up)}
    is_switched = 2 * sum(card.health.fabric.state == JOINED for card in up) > len(up)
    # Bridges of other cards may sit on links of other numbers, so the number of links must be lower, too.
    expected = int(usual([len(numbers) for numbers in up.values()]) or 0)
    for card, numbers in up.items():
        missing = sorted(link.number for link in card.health.nvlinks if not link.up and link.number in common)
        if missing and len(numbers) < expected:
            yield finding_of(seen, card, _down(card, missing, len(numbers), expected, is_switched=is_switched))
    # Links that only half of the GPUs have up (behind switches: or fewer).
    known = Counter(link.number for card in up for link in card.health.nvlinks)
    odd = sorted(n for n, ups in counts.items() if 2 * ups == known[n] or (is_switched and 2 * ups < known[n]))
    if odd and len(set(map(len, up.values()))) > 1:
        without = [card for card in up if any(not link.up and link.number in odd for link in card.health.nvlinks)]
        hosts = list(dict.fromkeys(card.host.name for card in without))
        yield seen.finding(
            "uneven",
            "NVLinks are down on some GPUs of one model",
            f"{without[0].health.name}: {numbers_text(odd)} {'is' if len(odd) == 1 else 'are'} down on {len(without)} "
            f"of {len(up)} GPUs ({names_text([card.label for card in without], 4)}).{no_majority((), 'GPU')}",
            evidence={"links": [*odd], "down_on": [card.health.uuid for card in without]},
            fix=f"Run `nvidia-smi nvlink -s` on {names_text(hosts)}. If the GPUs have an NVLink bridge or NVSwitches, "
            "all links should be up: end all processes on the GPUs and run `nvidia-smi --gpu-reset` there as root.",
        )


def _down(card: Card, missing: Sequence[int], number: int, expected: int, *, is_switched: bool) -> Fault:
    # Behind NVSwitches every GPU must have its links; cards of one model may have bridges or not. Drivers report a
    # fabric from Hopper on; modules on a board (A100-SXM4, V100-SXM2) have no bridges either.
    is_fixed = is_switched or "SXM" in (card.health.name or "")
    return Fault(
        "down",
        "NVLinks of a GPU are down",
        f"down: {numbers_text(missing)} ({number} of {expected} are up). Most GPUs of that model have these links up",
        Action.RESET if is_fixed else Action.MONITOR,
        "If that does not help, have the links inspected."
        if is_fixed
        else "Nothing to do for a card that has no NVLink bridge.",
        {"links_down": [*missing], "links_up": number, "links_expected": expected},
        severity=Severity.ERROR if is_switched else Severity.WARNING,
        watch=Watch("nvidia-smi nvlink -s -i {gpu}", "the card has a bridge and a link is still inactive"),
    )


skip = devices.skip
# GCM tolerates none; DCGM fails for one more within its watch (dcgm_gpu_hardware_limits.h).
SETTINGS = {"link_errors": 0}
CHECK: Check[Nothing] = Check(__name__, "GPU006", "nvlink", Stage.GPU, Scope.HOST)
