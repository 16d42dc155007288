"""The table at the end: what was detected, who was blamed, and how long it took."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from runs import Result

FILE = Path(__file__).parent / "scoreboard.json"
_COLUMNS = ("fault", "expected", "detected", "culprit", "innocents", "seconds (budget)")


def row(result: Result) -> tuple[str, ...]:
    """One line of the table."""
    found = next((finding["code"] for finding in result.expected), "no")
    return (
        result.name,
        "|".join(result.fault.expect) or ("a sentence" if result.fault.says else "nothing"),
        found if result.fault.expect and result.is_detected else "yes" if result.is_detected else "NO",
        "right" if result.blames_right else "WRONG",
        ", ".join(result.innocents) or "none",
        " ".join((f"{result.seconds:.1f} ({result.fault.budget:g})", *_remarks(result))),
    )


def _remarks(result: Result) -> list[str]:
    return [word for word, is_so in (("LATE", not result.is_in_time), ("2nd try", result.tries > 1)) if is_so]


def totals(results: Sequence[Result]) -> dict[str, int]:
    """How many faults did well in each respect."""
    return {
        "faults": len(results),
        "whole_check": sum(result.fault.is_whole for result in results),
        "detected": sum(result.is_detected for result in results),
        "culprit_right": sum(result.blames_right for result in results),
        "without_innocents": sum(not result.innocents for result in results),
        "in_time": sum(result.is_in_time for result in results),
        "clean": sum(not result.left and not result.has_traceback for result in results),
        "at_first_try": sum(result.tries == 1 for result in results),
    }


def table(results: Iterable[Result]) -> list[str]:
    """Lines of text, columns aligned."""
    rows = [_COLUMNS, *map(row, results)]
    widths = [max(len(line[column]) for line in rows) for column in range(len(_COLUMNS))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in rows]


def write(results: Sequence[Result], seconds: float) -> None:
    """The same as JSON, for whoever compares versions."""
    lines = [_line(result) for result in results]
    FILE.write_text(json.dumps({"totals": totals(results), "seconds": round(seconds, 1), "faults": lines}, indent=1))


def _line(result: Result) -> Mapping[str, object]:
    return {
        "name": result.name,
        "expected": list(result.fault.expect),
        "found": [[finding["severity"], finding["code"]] for finding in result.findings],
        "whole_check": result.fault.is_whole,
        "detected": result.is_detected,
        "culprit_right": result.blames_right,
        "innocents": list(result.innocents),
        "seconds": round(result.seconds, 1),
        "tries": result.tries,
        "budget_seconds": result.fault.budget,
        "in_time": result.is_in_time,
        "left": list(result.left),
        "traceback": result.has_traceback,
    }
