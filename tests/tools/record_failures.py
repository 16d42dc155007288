"""Record faults of the gallery, each run for real: what tests of the report's readability read.

    python tests/tools/record_failures.py [NAME ...]

Needs root, for the hosts. Writes tests/recordings/failures/FAULT.jsonl, and those of PAGES, without what tells of the
machine; without names, all that lie there are made anew.
"""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

TESTS = Path(__file__).parents[1]
FOLDER = TESTS / "recordings"
sys.path += [str(TESTS / name) for name in ("processes", "hosts", "faults", "gpu")]

from anonymise import anonymise  # noqa: E402
from runs import faults, run  # noqa: E402

# Recordings of whole pages: the fault, and what is looked at.
PAGES = {"slow-host-3-ranks": ("host_is_slow", ("--stage", "rendezvous,collective,fabric"))}


def record(name: str, options: Sequence[str], kept: Path, folder: Path) -> None:
    """One fault: run it, and keep what rank 0 wrote down."""
    fault, recording = faults()[name], folder / f"{kept.stem}.jsonl"
    result = run(name, replace(fault, options=(*options, "--record", str(recording))), folder / kept.stem)
    if result.skipped or result.flaws or not recording.exists():
        raise SystemExit(
            f"{name}: {result.skipped or '; '.join(result.flaws) or 'nothing was recorded'}\n{result.told}"
        )
    lines = recording.read_text().splitlines()
    kept.write_text("".join(f"{line}\n" for line in anonymise(lines)))
    print(f"{kept.stem}: {len(lines)} lines, {result.seconds:.1f} s")


def main() -> None:
    names = sys.argv[1:] or [*sorted(path.stem for path in (FOLDER / "failures").glob("*.jsonl")), *PAGES]
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            fault, options = PAGES.get(name) or (name, faults()[name].options)
            place = FOLDER if name in PAGES else FOLDER / "failures"
            record(fault, options, place / f"{name}.jsonl", Path(folder))


if __name__ == "__main__":
    main()
