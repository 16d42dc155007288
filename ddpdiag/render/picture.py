"""Where a run stands, from the news so far; and that in words. Pure: whoever holds a picture has the clock."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from ddpdiag.model.news import (
    CheckBegan,
    Gathered,
    Happened,
    Joined,
    News,
    Pending,
    Progressed,
    Seeking,
    StageBegan,
    StageEnded,
    Started,
    TrialBegan,
    Waiting,
)
from ddpdiag.render.hosts import fold_hosts, fold_ranks
from ddpdiag.render.page import one_line
from ddpdiag.render.units import count

# Who finds rank 0, or is found, sooner than this need not be talked about.
PATIENCE_SECONDS = 3.0
_RANKS_SHOWN = 4
_HOSTS_SHOWN = 2
_IMPORT = "its first step is the import of torch"


@dataclass(frozen=True)
class Doing:
    """What runs now: a check with its latest trial, or only a stage. Times are those of the holder's clock."""

    title: str
    since: float
    ends: float | None = None
    far: str = ""
    pending: Pending | None = None

    def clock(self, now: float) -> str:
        """ "2.3 s of 36 s": how long it has run, and when its trial ends at the latest."""
        spent = f"{now - self.since:.1f} s"
        return spent if self.ends is None else f"{spent} of {self.ends - self.since:.0f} s"


@dataclass(frozen=True)
class Picture:
    """Where the run stands. `waiting` and `seeking` stand with the time at which they were told."""

    began: float
    budget_seconds: float | None = None
    stages: Mapping[str, StageEnded] = field(default_factory=dict)
    doing: Doing | None = None
    waiting: tuple[Waiting, float] | None = None
    seeking: tuple[Seeking, float] | None = None
    happened: tuple[str, ...] = ()

    def after(self, news: News, now: float) -> "Picture":
        """The picture with this in it."""
        match news:
            case Started(budget_seconds=budget):
                return replace(self, budget_seconds=budget)
            case Waiting():
                return replace(self, waiting=(news, now))
            case Gathered():
                return replace(self, waiting=None)
            case StageEnded():
                return replace(self, doing=None, stages={**self.stages, news.name: _together(self.stages, news)})
            case Happened(text=text):
                return replace(self, happened=(*self.happened, one_line(text)))
            case Seeking():
                return replace(self, seeking=(news, now))
            case Joined():
                return replace(self, seeking=None)
            case _:
                return replace(self, doing=_done_now(self.doing, news, now))

    def clock(self, now: float) -> str:
        """ "12 s of 60 s"."""
        spent = f"{now - self.began:.0f} s"
        return spent if self.budget_seconds is None else f"{spent} of {self.budget_seconds:.0f} s"

    def wait(self, now: float) -> Iterator[str]:
        """Who is waited for, and how long: a few short lines; none while that is not worth a word."""
        if now - self.began < PATIENCE_SECONDS:
            return
        if self.waiting is not None:
            news, told = self.waiting
            yield f"waiting for ranks, {_left(news.left_seconds, told, now)}"
            came = f"{news.came:,} of {news.came + len(news.missing):,} came"
            yield f"{came}, {len(news.missing):,} missing ({ranks_words(news.missing)})"
        if self.seeking is not None:
            seek, told = self.seeking
            yield f"rank {seek.rank} looks for rank 0 at {one_line(seek.host)}, {_left(seek.left_seconds, told, now)}"


def _together(stages: Mapping[str, StageEnded], news: StageEnded) -> StageEnded:
    """One that ran in two parts stands there once, with the worse status; what was skipped says nothing about it."""
    before = stages.get(news.name)
    if before is None:
        return news
    order = ("skipped", "done", "cut short", "failed")
    return StageEnded(
        name=news.name,
        status=max(before.status, news.status, key=order.index),
        seconds=before.seconds + news.seconds,
        failed=(*before.failed, *news.failed),
        more=news.more,
    )


def _done_now(doing: Doing | None, news: News, now: float) -> Doing | None:
    match news:
        case StageBegan(name=name):
            return Doing(name, now)
        case CheckBegan(code=code, name=name):
            return Doing(one_line(f"{code} {name}"), now)
        case TrialBegan(deadline_seconds=seconds, importing=importing) if doing is not None:
            return replace(doing, ends=now + seconds, far=_IMPORT if importing else "", pending=None)
        case Pending() if doing is not None:
            return replace(doing, pending=news)
        case Progressed(text=text) if doing is not None:
            return replace(doing, far=one_line(text))
        case _:
            return doing


def ranks_words(ranks: tuple[int, ...]) -> str:
    """ "rank 3", "ranks 3,7-9", "ranks 1,3,5,7 +40 more"."""
    return f"rank{'' if len(ranks) == 1 else 's'} {fold_ranks(ranks, limit=_RANKS_SHOWN)}"


def pending_words(pending: Pending) -> str:
    """ "3 of 4 ranks done, waiting for rank 3 on n1"; for whom is left out where it is everybody."""
    text = f"{pending.done:,} of {count(pending.ranks, 'rank')} done"
    if not pending.awaited or len(pending.awaited) == pending.ranks:
        return text
    hosts = f" on {one_line(fold_hosts(pending.nodes, limit=_HOSTS_SHOWN))}" if pending.nodes else ""
    return f"{text}, waiting for {ranks_words(pending.awaited)}{hosts}"


def gathered_words(news: Gathered) -> str:
    """ "2 ranks on 1 host"; who never came, too."""
    text = f"{count(news.ranks, 'rank')} on {count(news.hosts, 'host')}"
    return f"{text}; {ranks_words(news.missing)} did not come" if news.missing else text


def stage_words(news: StageEnded) -> str:
    """ "collective failed in COL001"."""
    codes = f" in {', '.join(dict.fromkeys(news.failed))}" if news.failed else ""
    return f"{news.name} {news.status}{codes}"


def _left(seconds: float, told: float, now: float) -> str:
    return f"{max(0.0, seconds - (now - told)):.0f} s left"
