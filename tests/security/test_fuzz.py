"""No file, however it is damaged, ends in anything but a verdict or one sentence. Mutations are seeded by their number.

In the default tier some 300, in this process. `-m long`: 200,000, in child processes of which each may take 1 GB, and
10 s for a file.
"""

import contextlib
import faulthandler
import io
import os
import random
import resource
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from mutations import mutated
from readers import READERS

from ddpdiag.errors import UserError

USUAL, LONG, BATCH = 40, 25_000, 1_000  # for each reader
FILE_SECONDS, MEMORY_BYTES = 10, 1 << 30

sound = cache(lambda name: READERS[name].sound())


def read_mutation(name: str, number: int, folder: Path) -> None:
    """Any exception but those that explain themselves."""
    rng = random.Random(f"{name} {number}")
    path = folder / ("train.py" if name == "lint" else "file")
    path.write_bytes(mutated(rng.choice(sound(name)), rng))
    silent = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with silent[0], silent[1], contextlib.suppress(UserError):
        READERS[name].read(path)


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_judged_or_explained(name: str, tmp_path: Path) -> None:
    for number in range(USUAL):
        try:
            read_mutation(name, number, tmp_path)
        except Exception as error:
            error.add_note(f"mutation {number} of {name}")
            raise


@pytest.mark.parametrize("name", READERS)
def test_a_sound_file_is_read(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for data in sound(name):
        path = tmp_path / ("train.py" if name == "lint" else "file")
        path.write_bytes(data)
        READERS[name].read(path)


@pytest.mark.long
@pytest.mark.parametrize("name", READERS)
def test_many_damaged_files_end_within_time_and_memory(name: str) -> None:
    failed = []
    for first in range(0, LONG, BATCH):
        done = subprocess.run([sys.executable, __file__, name, str(first)], capture_output=True, text=True, check=False)
        if done.returncode:
            failed.append(f"{name} from {first}: exit {done.returncode}, {done.stderr[-3000:]}")
    assert not failed, "\n".join(failed)


def _batch(name: str, first: int) -> None:
    """A child's part; the number of a mutation that kills it is the last on standard error."""
    sound(name)
    used = int(Path("/proc/self/statm").read_text().split()[5]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    with TemporaryDirectory() as folder:
        for number in range(first, first + BATCH):
            os.write(2, f"{number} ".encode())
            faulthandler.dump_traceback_later(FILE_SECONDS, exit=True)
            read_mutation(name, number, Path(folder))


if __name__ == "__main__":
    _batch(sys.argv[1], int(sys.argv[2]))
