"""Record faults of the gallery, each run for real: what tests of the report's readability read.

    python tests/tools/record_failures.py [FAULT ...]

Needs root, for the hosts. Writes tests/recordings/failures/FAULT.jsonl without what tells of the machine; without
names, all that lie there are made anew.
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

TESTS = Path(__file__).parents[1]
FOLDER = TESTS / "recordings" / "failures"
sys.path += [str(TESTS / name) for name in ("processes", "hosts", "faults", "gpu")]

from anonymise import anonymise  # noqa: E402
from runs import faults, run  # noqa: E402


def record(name: str, folder: Path) -> None:
    """One fault: run it, and keep what rank 0 wrote down."""
    fault, recording = faults()[name], folder / f"{name}.jsonl"
    result = run(name, replace(fault, options=(*fault.options, "--record", str(recording))), folder / name)
    if result.skipped or result.flaws or not recording.exists():
        raise SystemExit(
            f"{name}: {result.skipped or '; '.join(result.flaws) or 'nothing was recorded'}\n{result.told}"
        )
    lines = recording.read_text().splitlines()
    (FOLDER / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in anonymise(lines)))
    print(f"{name}: {len(lines)} lines, {result.seconds:.1f} s")


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    names = sys.argv[1:] or sorted(path.stem for path in FOLDER.glob("*.jsonl"))
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            record(name, Path(folder))


if __name__ == "__main__":
    main()
