"""Make a recording for the tests: a real run of `ddpdiag check`, without the names of the machine that ran it.

    python tests/tools/make_recording.py tests/recordings/healthy-2-ranks.jsonl --nproc-per-node 2

What follows the file name goes to `ddpdiag check`. The host becomes n0, and its boot id zeros.
"""

import json
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

NO_BOOT = "00000000-0000-0000-0000-000000000000"
_BOOT_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


def anonymous(value, host: str):
    """`value` with the host and the boot id replaced in every string."""
    if isinstance(value, dict):
        return {key: anonymous(item, host) for key, item in value.items()}
    if isinstance(value, list):
        return [anonymous(item, host) for item in value]
    if isinstance(value, str):
        return _BOOT_ID.sub(NO_BOOT, re.sub(rf"(?<![\w-]){re.escape(host)}(?![\w-])", "n0", value))
    return value


def main(target: Path, options: list[str]) -> None:
    """Record a run and write it to `target`; the run's verdict does not matter, its recording does."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "run.jsonl"
        subprocess.run([sys.executable, "-m", "ddpdiag", "check", "--record", str(record), *options], check=False)
        lines = [anonymous(json.loads(line), socket.gethostname()) for line in record.read_text().splitlines()]
    target.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
