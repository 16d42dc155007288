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
from collections.abc import Iterator, Mapping, Sequence

from ddpdiag.checks.api import Check, Nothing, Scope, Seen, Stage
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.gpu import devices
from ddpdiag.checks.gpu.cards import Action, Card, Fault, Watch, by_model, card_findings, cards_of, finding_of, usual
from ddpdiag.checks.gpu.signs import numbers_text, totals
from ddpdiag.checks.hosts import names_text
from ddpdiag.model import Finding, Severity
from ddpdiag.probes.gpu.links import JOINED
from ddpdiag.text import count

FINDINGS = {
    "down": FindingSpec(
        "links are down that most GPUs of that model have up: a bridge not seated, a bad link, a switch or its "
        "partition. An error if these GPUs have joined an NVSwitch fabric, otherwise a warning: a card may just have "
        "no bridge."
    ),
    "uneven": FindingSpec.warning(
        "links that only half of the GPUs have up: no majority shows which GPUs are wrong, so none is blamed."
    ),
    "untold": FindingSpec.warning("NVML reports no link state of a GPU, but does for most GPUs of its model."),
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
    # MIG takes the links down.
    whole = [card for card in cards if not card.health.mig]
    known = [card for card in whole if card.health.nvlinks]
    # GPUs that do not even report the links' state, where most of their model do.
    for card in whole if 2 * len(known) > len(whole) else ():
        if not card.health.nvlinks:
            title = "the NVLink state of a GPU cannot be read"
            said = f"NVML reports no NVLink state. It does for {count(len(known), 'other GPU')} of this model"
            watch = Watch("nvidia-smi nvlink -s -i {gpu}", "it shows no link")
            yield finding_of(seen, card, Fault("untold", title, said, Action.MONITOR, watch=watch))
    up = {card: {link.number for link in card.health.nvlinks if link.up} for card in known}
    switched = 2 * sum(card.health.fabric.state == JOINED for card in known) > len(known)
    counts = Counter(number for own in up.values() for number in own)
    common = {number for number, ups in counts.items() if 2 * ups > len(up)}
    # Bridges of other cards may sit on links of other numbers, so the number of links must be lower, too.
    expected = int(usual([len(own) for own in up.values()]) or 0)
    for card, own in up.items():
        missing = sorted(link.number for link in card.health.nvlinks if not link.up and link.number in common)
        if missing and len(own) < expected:
            it, are = ("it", "is") if len(missing) == 1 else ("they", "are")
            # Behind NVSwitches every GPU must have its links; cards of one model may have bridges or not. Drivers
            # report a fabric from Hopper on; modules on a board (A100-SXM4, V100-SXM2) have no bridges either.
            fixed = switched or "SXM" in (card.health.name or "")
            fault = Fault(
                "down",
                "an NVLink of a GPU is down" if len(missing) == 1 else "NVLinks of a GPU are down",
                f"{numbers_text(missing)} {are} down ({len(own)} of {expected} are up). On most GPUs of that "
                f"model {it} {are} up",
                Action.RESET if fixed else Action.MONITOR,
                f"If {it} {'stays' if it == 'it' else 'stay'} down, have the links inspected."
                if fixed
                else "Nothing to do for a card that has no NVLink bridge.",
                {"links_down": [*missing], "links_up": len(own), "links_expected": expected},
                severity=Severity.ERROR if switched else Severity.WARNING,
                watch=Watch("nvidia-smi nvlink -s -i {gpu}", "the card has a bridge and a link is still inactive"),
            )
            yield finding_of(seen, card, fault)
    yield from _uneven(seen, up, switched=switched)


def _uneven(seen: Seen[Nothing], up: Mapping[Card, set[int]], *, switched: bool) -> Iterator[Finding]:
    """Links that only half of the GPUs have up (behind switches: or fewer); no majority shows which are wrong."""
    counts = Counter(number for own in up.values() for number in own)
    known = Counter(link.number for card in up for link in card.health.nvlinks)
    odd = {n for n, ups in counts.items() if 2 * ups == known[n] or (switched and 2 * ups < known[n])}
    # As many links on every GPU: bridges on other numbers.
    if not odd or len({len(own) for own in up.values()}) == 1:
        return
    without = [card for card in up if any(not link.up and link.number in odd for link in card.health.nvlinks)]
    hosts = list(dict.fromkeys(card.host.name for card in without))
    yield seen.finding(
        "uneven",
        "NVLinks are down on some GPUs of one model",
        f"{without[0].health.name}: {numbers_text(sorted(odd))} {'is' if len(odd) == 1 else 'are'} down on "
        f"{len(without)} of {len(up)} GPUs ({names_text([card.label for card in without], 4)}). No majority shows "
        "which state is right.",
        evidence={
            "links": [*sorted(odd)],
            "down_on": [card.health.uuid for card in without],
            "up_on": [card.health.uuid for card in up if card not in without],
        },
        fix=f"Run `nvidia-smi nvlink -s` on {names_text(hosts)}. If the GPUs have an NVLink bridge or NVSwitches, all "
        "links should be up: end all processes on the GPUs and run `nvidia-smi --gpu-reset` there as root.",
    )


skip = devices.skip
# GCM tolerates none; DCGM fails for one more within its watch (dcgm_gpu_hardware_limits.h).
SETTINGS = {"link_errors": 0}
CHECK: Check[Nothing] = Check(__name__, "GPU006", "nvlink", Stage.GPU, Scope.HOST)
