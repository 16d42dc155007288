"""The options of `ddpdiag history`, which finds recurring faults and slow changes in the reports of many runs."""

from dataclasses import dataclass
from datetime import UTC, datetime

from ddpdiag.cli.options import DISPLAY, FILES, TESTS, DisplayArgs, option
from ddpdiag.errors import UsageError


def _parse_time(text: str) -> float:
    """Convert a date or time in ISO 8601 (UTC unless it has an offset) to seconds since 1970."""
    try:
        time = datetime.fromisoformat(text)
        if not 1970 < time.year < 9999:
            raise ValueError(text)
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise UsageError("expected a date or time such as 2026-05-31 or 2026-05-31T12:00") from None


@dataclass(frozen=True, kw_only=True)
class HistoryArgs(DisplayArgs):
    """The options of `ddpdiag history`."""

    days: float = option(30.0, "Judge the runs of this many days.", metavar="N", panel=TESTS, min=1.0, max=3650.0)
    until: float | None = option(
        None, "The end of these days (default: now).", metavar="TIME", panel=TESTS, variable=False, parse=_parse_time
    )
    host: str | None = option(
        None, "Show the runs, findings and changes of this host.", metavar="NAME", panel=TESTS, variable=False
    )
    index: str | None = option(
        None,
        "Keep what was read in this file, so that the next call reads new files only.",
        metavar="FILE",
        panel=FILES,
    )
    parquet: str | None = option(
        None, "All runs as Parquet files in this folder.", metavar="DIR", panel=FILES, variable=False
    )
    json: str | None = option(
        None, "The answers as JSON ('-': standard output).", metavar="FILE", panel=FILES, variable=False
    )
    html: str | None = option(None, "The answers as one HTML page.", metavar="FILE", panel=FILES, variable=False)
    markdown: str | None = option(None, "The answers as Markdown.", metavar="FILE", panel=FILES, variable=False)
    prometheus: str | None = option(
        None, "Prometheus metrics (text format).", metavar="FILE", panel=FILES, variable=False
    )
    write_failing_hosts: str | None = option(
        None,
        "The recurring hosts, one per line (sbatch -x ./FILE, if not empty).",
        metavar="FILE",
        panel=FILES,
        variable=False,
    )
    details: bool = option(False, "Show lists in full, and each day.", panel=DISPLAY)
