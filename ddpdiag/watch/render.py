"""A look at a silent training, for people."""

import time
from collections.abc import Sequence

from ddpdiag.render.hosts import fold_ranks
from ddpdiag.render.page import Page, one_line
from ddpdiag.render.units import byte_count, percent
from ddpdiag.watch.model import GpuUse, Judged, RankSeen, Stall

_MOST_LINES = 24
_MOST_FRAMES = 24
_MOST_THREADS = 8


def render(stall: Stall, judged: Judged, *, color: bool, width: int, stacks: bool = False) -> str:
    """Who stands where, for whom the others wait, and what to do, as text of `width` columns.

    Stacks are shown at the first look at a silence, to who asks, and if `stacks` says so.
    """
    page = Page(color=color, width=width)
    page.write(_head(stall, judged), lead="ddpdiag watch: ", lead_style="bold red" if judged.named else "bold yellow")
    page.write(one_line(judged.message), indent=4)
    if judged.remedy:
        page.write(one_line(judged.remedy), indent=4, lead="Fix: ", lead_style="bold")
    _standings(page, judged)
    if stall.looks <= 1 or stall.asked or stacks:
        _stacks(page, judged)
        _threads(page, stall.ranks)
    elif judged.stacks:
        page.write("stacks: as told at the first look, or ask for them with SIGUSR1", indent=4, style="dim")
    _gpus(page, stall)
    for note in judged.notes:
        page.write(one_line(note), indent=4, lead="note: ")
    return page.text()


def _head(stall: Stall, judged: Judged) -> str:
    when = time.strftime("%H:%M:%S", time.localtime(stall.unix_seconds))
    why = "asked" if stall.asked else f"nothing new for {stall.silent_seconds:.0f} s"
    return f"{one_line(stall.host)} {when}, {why}: {one_line(judged.title)}"


def _standings(page: Page, judged: Judged) -> None:
    for standing in judged.standings[:_MOST_LINES]:
        word = "rank" if len(standing.ranks) == 1 else "ranks"
        page.write(one_line(standing.text), indent=4, lead=f"{word} {fold_ranks(standing.ranks, limit=8)}: ")
    if len(judged.standings) > _MOST_LINES:
        page.write(f"and {len(judged.standings) - _MOST_LINES} more ways to stand", indent=4)


def _stacks(page: Page, judged: Judged) -> None:
    for who, frames in judged.stacks.items():
        page.write(f"stack of {who}, innermost first:", indent=4, style="dim")
        for frame in frames[:_MOST_FRAMES]:
            page.write(one_line(frame), indent=6, style="dim")
        if len(frames) > _MOST_FRAMES:
            page.write(f"... and {len(frames) - _MOST_FRAMES} more frames", indent=6, style="dim")


def _threads(page: Page, ranks: Sequence[RankSeen]) -> None:
    for seen in [seen for seen in ranks if seen.no_stack and seen.threads][:_MOST_THREADS]:
        page.write(", ".join(map(one_line, seen.threads)), indent=4, lead=f"threads of rank {seen.rank}: ", style="dim")


def _gpus(page: Page, stall: Stall) -> None:
    if stall.gpus:
        page.write(", ".join(map(_gpu, stall.gpus)), indent=4, lead="GPUs: ", style="dim")
    elif stall.gpus_unseen:
        page.write(one_line(stall.gpus_unseen), indent=4, lead="GPUs: ", style="dim")


def _gpu(use: GpuUse) -> str:
    watts = "" if use.power_watts is None else f" {use.power_watts:.0f} W"
    return f"{use.index}: {percent(use.busy_share)}{watts} {byte_count(use.memory_bytes)}"
