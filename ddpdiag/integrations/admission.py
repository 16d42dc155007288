"""Decide which hosts may train: the settings in `--rdzv-conf`, and the decision of a host after a check.

Every function is pure. All hosts decide from the same verdict, so they agree without further messages.
"""

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from msgspec import Struct, field

from ddpdiag.errors import ExitCode, UsageError, did_you_mean
from ddpdiag.model import Report
from ddpdiag.text import listed

E = TypeVar("E", bound=Enum)

# The settings of torch's c10d rendezvous, which --rdzv-conf may have as well (dynamic_rendezvous.create_handler and
# c10d_rendezvous_backend.create_backend of torch 2.6 to 2.15).
_TORCH_SETTINGS = (
    *("join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout", "keep_alive_interval"),
    *("keep_alive_max_attempt", "store_type", "read_timeout", "is_host", "timeout", "rank"),
)
_SETTINGS = ("check", "budget", "on_unfit", "on_unknown")
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


class Settings(Struct, frozen=True, kw_only=True):
    """The settings of `--rdzv-conf`. `budget` is the time of the check of the world in seconds."""

    check: Scope = Scope.QUICK
    budget: float = 30.0
    on_unfit: OnUnfit = OnUnfit.LEAVE
    on_unknown: OnUnknown = OnUnknown.GO


class WorldVerdict(Struct, frozen=True):
    """The result of a check, as the agent of rank 0 sends it to the others. `failing` maps node ranks to host names."""

    exit_code: int
    sentence: str
    failing: dict[int, str] = field(default_factory=dict)


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
    """The verdict for the agents. A failing host has the number that its ranks show: hosts may share a name."""
    failing = {
        rank // ranks_per_host: host
        for row in report.ranks
        if isinstance(rank := row.get("rank"), int)
        and isinstance(host := row.get("host"), str)
        and host in report.hosts.failing
    }
    return WorldVerdict(report.exit_code, report.sentence, failing)


def too_few_text(left: int, min_nodes: int) -> str:
    """The end of a sentence about the hosts that are left."""
    return f"only {left} of at least {min_nodes} hosts (--nnodes) {'is' if left == 1 else 'are'} left."


def decide(
    verdict: WorldVerdict, settings: Settings, *, node_rank: int, node_count: int, min_nodes: int
) -> tuple[Action, str]:
    """Decide for the host `node_rank`. Returns the action and its reason."""
    if verdict.exit_code == ExitCode.FIT:
        return Action.GO, verdict.sentence
    if verdict.exit_code != ExitCode.UNFIT:
        return (Action.GO if settings.on_unknown is OnUnknown.GO else Action.STOP), verdict.sentence
    match settings.on_unfit:
        case OnUnfit.WARN:
            return Action.GO, verdict.sentence
        case OnUnfit.STOP:
            return Action.STOP, verdict.sentence
    left = node_count - len(verdict.failing)
    if not verdict.failing:
        return Action.STOP, f"{verdict.sentence} No host is blamed, so none can leave."
    if left < min_nodes:
        names = listed([*verdict.failing.values()], None)
        return Action.STOP, f"{verdict.sentence} Without {names}, {too_few_text(left, min_nodes)}"
    return (Action.LEAVE if node_rank in verdict.failing else Action.AGAIN), verdict.sentence
