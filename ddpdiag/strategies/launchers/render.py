"""Ways of starting a training, for people and for scripts."""

from collections.abc import Iterable, Sequence

import msgspec

from ddpdiag.codec import encode
from ddpdiag.model.train import Ended
from ddpdiag.render.page import Column, Page, draw, one_line, pieces
from ddpdiag.strategies.launchers.model import LauncherRow, LaunchersReport, Way
from ddpdiag.text import count, seconds

_STYLES = {Ended.WORKS: "green", Ended.FAILS: "bold red", Ended.HANGS: "bold red", Ended.UNFINISHED: "bold yellow"}
_WORDS = {Ended.UNFINISHED: "unknown"}
_VERDICTS = {0: "bold green", 1: "bold red"}


def as_json(report: LaunchersReport) -> str:
    """The whole report, indented, with a newline at the end."""
    return msgspec.json.format(encode(report), indent=2).decode() + "\n"


def render(report: LaunchersReport, *, color: bool, width: int) -> str:
    """The table, what explains it, and the verdict, as text of `width` columns."""
    page = Page(color=color, width=width)
    page.write(_head(report), lead="ddpdiag: ", lead_style="bold")
    page.write(_what(report), style="dim")
    page.blank()
    _table(page, report.rows)
    _reasons(page, report.rows)
    for sentence in report.explained:
        page.write(one_line(sentence))
    if report.explained:
        page.blank()
    page.write(one_line(report.sentence), style=_VERDICTS.get(report.exit_code, "bold yellow"))
    return page.text()


def _head(report: LaunchersReport) -> str:
    torch = f"torch {report.torch_version}" if report.torch_version else ""
    who = f"{count(report.asked.ranks, 'rank')} on {report.host} ({count(report.cores, 'core')})"
    parts = (who, report.backend or report.asked.backend, report.device or "", torch)
    told = ", ".join(one_line(part) for part in parts if part)
    return f"{told}; {seconds(report.seconds)} of {seconds(report.asked.budget_seconds)}"


def _what(report: LaunchersReport) -> str:
    asked = report.asked
    return (
        f"The same training, started in each way: {count(asked.steps, 'step')} of {count(asked.batch_size, 'image')} "
        f"over all ranks in DistributedDataParallel; the best of up to {count(asked.rounds, 'round')}. start: from the "
        "command to the group of all ranks; launcher: until the last rank runs its first line; step: the median of the "
        "slowest rank; x: times torchrun's; threads: of each rank."
    )


def _table(page: Page, rows: Sequence[LauncherRow]) -> None:
    def column(header: str, shown: Iterable[str | None]) -> Column:
        return Column(header, tuple(text or "-" for text in shown), right=True)

    names = (
        Column("started by", tuple(row.way.value for row in rows), right=False),
        Column(
            "",
            tuple(_WORDS.get(row.ended, row.ended.value) for row in rows),
            right=False,
            styles=tuple(_STYLES.get(row.ended, "") for row in rows),
        ),
    )
    figures = (
        column("start", (_shown(row.start_seconds, "{:.2f} s") for row in rows)),
        column("x", (_shown(row.start_ratio, "{:.2f}") for row in rows)),
        column("launcher", (_shown(row.launcher_seconds, "{:.2f} s") for row in rows)),
        column("step", (_shown(row.step_seconds, "{:.1f} ms", 1e3) for row in rows)),
        column("x", (_shown(row.step_ratio, "{:.2f}") for row in rows)),
        column("threads", (_threads(row.threads) for row in rows)),
    )
    for piece in pieces(names, figures, width=page.width, gap=1):
        page.table(draw((*names, *piece), len(rows), 1))
        page.blank()


def _shown(value: float | None, form: str, scale: float = 1.0) -> str | None:
    return None if value is None else form.format(value * scale)


def _threads(threads: Sequence[int]) -> str | None:
    if not threads:
        return None
    least, most = min(threads), max(threads)
    return str(most) if least == most else f"{least}-{most}"


def _reasons(page: Page, rows: Sequence[LauncherRow]) -> None:
    """Why, of those that do not work, and how one that is alone with its reason would be typed."""
    alike: dict[tuple[Ended, str], list[LauncherRow]] = {}
    for row in rows:
        if row.ended is not Ended.WORKS:
            alike.setdefault((row.ended, row.reason), []).append(row)
    for (ended, reason), those in alike.items():
        lead = f"{', '.join(row.way.value for row in those)} {ended.value}: "
        if len(those) == 1:
            page.write(one_line(reason), lead=lead, lead_style=_STYLES.get(ended, ""))
            page.write(one_line(those[0].command), indent=4, style="dim")
        else:
            page.write(lead + one_line(reason))
    deprecated = [row.way for row in rows if row.ended is Ended.WORKS and row.way in (Way.LAUNCH, Way.LAUNCH_USE_ENV)]
    if deprecated:
        page.write("torch.distributed.launch is deprecated in favour of torchrun.", style="dim")
    if alike or deprecated:
        page.blank()
