"""Decide which hosts may train: the settings in `--rdzv-conf`, and the decision of a host after a check.

Every function is pure. All hosts decide from the same verdict, so they agree without further messages.
"""

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from msgspec import Struct, field

from ddpdiag.errors import ExitCode, UsageError, did_you_mean
from ddpdiag.model import Report, Severity
from ddpdiag.text import listed

E = TypeVar("E", bound=Enum)

# The settings of torch's c10d rendezvous, which --rdzv-conf may have as well (dynamic_rendezvous.create_handler and
# c10d_rendezvous_backend.create_backend of torch 2.6 to 2.15).
_TORCH_SETTINGS = (
    *("join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout", "keep_alive_interval"),
    *("keep_alive_max_attempt", "cas_backoff_max_seconds", "store_type", "read_timeout", "is_host", "timeout", "rank"),
)
_SETTINGS = ("check", "budget", "on_unfit", "on_unknown", "on_warning")
_TITLES_SHOWN = 3
_MIN_BUDGET = 5.0  # as --budget of `ddpdiag check`


class Scope(Enum):
    """The checks that run before the job. HOST: each host alone. QUICK and STANDARD: also the world, at this depth."""

    NONE = "none"
    HOST = "host"
    QUICK = "quick"
    STANDARD = "standard"


class OnUnfit(Enum):
    """The reaction to UNFIT. LEAVE: blamed hosts leave. STOP: the job stops. WARN: the job starts nevertheless."""

    LEAVE = "leave"
    STOP = "stop"
    WARN = "warn"


class OnUnknown(Enum):
    """The reaction to UNKNOWN: the job starts (GO) or stops (STOP)."""

    GO = "go"
    STOP = "stop"


class OnWarning(Enum):
    """The reaction to FIT with warnings. GO: the job starts. LEAVE: hosts that warnings blame leave, if enough stay."""

    GO = "go"
    LEAVE = "leave"


class Settings(Struct, frozen=True, kw_only=True):
    """The settings of `--rdzv-conf`. `budget` is the time of the check of the world in seconds."""

    check: Scope = Scope.QUICK
    budget: float = 30.0
    on_unfit: OnUnfit = OnUnfit.LEAVE
    on_unknown: OnUnknown = OnUnknown.GO
    on_warning: OnWarning = OnWarning.GO


class WorldVerdict(Struct, frozen=True):
    """The result of a check, as the agent of rank 0 sends it to the others.

    `failing` maps node ranks to host names; in a world that is FIT, `warned` does so for the hosts that warnings blame.
    """

    exit_code: int
    sentence: str
    failing: dict[int, str] = field(default_factory=dict)
    warned: dict[int, str] = field(default_factory=dict)


class Action(Enum):
    """GO: train. AGAIN: meet again without the hosts that leave. LEAVE: this host leaves. STOP: the job stops."""

    GO = "go"
    AGAIN = "again"
    LEAVE = "leave"
    STOP = "stop"


def read_settings(conf: Mapping[str, str]) -> Settings:
    """Read the settings. UsageError for an unknown name, and for a value that its setting does not have."""
    for name in conf:
        if name not in (*_SETTINGS, *_TORCH_SETTINGS):
            known = listed(_SETTINGS, None)
            suggestion = did_you_mean(name, (*_SETTINGS, *_TORCH_SETTINGS))
            raise UsageError(f"--rdzv-conf {name}: expected {known}, or a setting of torch's c10d{suggestion}")
    return Settings(
        check=_word(conf, "check", Settings().check),
        budget=_seconds(conf, "budget", Settings().budget),
        on_unfit=_word(conf, "on_unfit", Settings().on_unfit),
        on_unknown=_word(conf, "on_unknown", Settings().on_unknown),
        on_warning=_word(conf, "on_warning", Settings().on_warning),
    )


def _word(conf: Mapping[str, str], name: str, default: E) -> E:
    text = conf.get(name, default.value)
    words = [each.value for each in type(default)]
    if text not in words:
        raise UsageError(f"--rdzv-conf {name}={text}: expected {', '.join(words[:-1])} or {words[-1]}")
    return type(default)(text)


def _seconds(conf: Mapping[str, str], name: str, default: float) -> float:
    text = conf.get(name, str(default))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not _MIN_BUDGET <= seconds < float("inf"):
        raise UsageError(f"--rdzv-conf {name}={text}: expected a number of seconds, {_MIN_BUDGET:g} or more")
    return seconds


def world_verdict(report: Report, ranks_per_host: int) -> WorldVerdict:
    """The verdict for the agents. A host has the number that its ranks show, because hosts may share a name."""
    names = {
        rank // ranks_per_host: host
        for row in report.ranks
        if isinstance(rank := row.get("rank"), int) and isinstance(host := row.get("host"), str)
    }
    failing = {number: name for number, name in names.items() if name in report.hosts.failing}
    warnings = [each for each in report.findings if each.severity is Severity.WARNING and not each.is_about_run]
    if report.exit_code != ExitCode.FIT or not warnings:
        return WorldVerdict(report.exit_code, report.sentence, failing)
    # A warning that blames all hosts leaves them in the list of healthy hosts.
    warned = {number: name for number, name in names.items() if name not in report.hosts.healthy}
    titles = "; ".join([*dict.fromkeys(each.title for each in warnings)][:_TITLES_SHOWN])
    return WorldVerdict(report.exit_code, f"{report.sentence} Warnings: {titles}.", failing, warned)


def too_few_text(left: int, min_nodes: int) -> str:
    """The end of a sentence about the hosts that are left."""
    return f"only {left} of at least {min_nodes} hosts (--nnodes) {'is' if left == 1 else 'are'} left."


def decide(
    verdict: WorldVerdict, settings: Settings, *, node_rank: int, node_count: int, min_nodes: int
) -> tuple[Action, str]:
    """Decide for the host `node_rank`. Returns the action and its reason."""
    sentence, leaving = verdict.sentence, verdict.failing
    if verdict.exit_code == ExitCode.FIT:
        leaving = verdict.warned if settings.on_warning is OnWarning.LEAVE else {}
        if not leaving or node_count - len(leaving) < min_nodes:  # training with warnings is better than none
            return Action.GO, sentence
    elif verdict.exit_code in (ExitCode.INTERRUPTED, ExitCode.TERMINATED):  # the others do not wait for its host
        return Action.AGAIN, sentence
    elif verdict.exit_code != ExitCode.UNFIT:
        return (Action.GO if settings.on_unknown is OnUnknown.GO else Action.STOP), sentence
    elif settings.on_unfit is not OnUnfit.LEAVE:
        return (Action.GO if settings.on_unfit is OnUnfit.WARN else Action.STOP), sentence
    if not leaving:
        return Action.STOP, f"{sentence} No host is blamed, so none can leave."
    left = node_count - len(leaving)
    if left < min_nodes:
        return Action.STOP, f"{sentence} Without {listed([*leaving.values()], None)}, {too_few_text(left, min_nodes)}"
    return (Action.LEAVE if node_rank in leaving else Action.AGAIN), sentence
