"""Hostile files are read in bounded processor time and memory, those of one kind in one child process.

In the default tier 100 kB of each; `-m long` 10 MB (logs: 5 MB).
"""

import contextlib
import os
import random
import resource
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet
from hostile_files import RECORDINGS

from ddpdiag.cli import judge
from ddpdiag.cli.outputs import Outputs
from ddpdiag.errors import UserError
from ddpdiag.evidence.dumps import read_dump
from ddpdiag.explain.card import all_cards
from ddpdiag.explain.matcher import explain_log
from ddpdiag.explain.render import log_blocks, render
from ddpdiag.text import fold_hosts

MEMORY_BYTES = 1 << 30
HUGE = (1 << 36).to_bytes(8, "little")
# Opcodes of pickle: https://github.com/python/cpython/blob/main/Lib/pickletools.py
PICKLES: dict[str, Callable[[int], bytes]] = {
    "a far memo": lambda _size: b"\x80\x02]r\xff\xff\xff\x0f.",
    "a huge bytearray": lambda _size: b"\x96" + HUGE,
    "huge bytes": lambda _size: b"\x8e" + HUGE,
    "a huge frame": lambda _size: b"\x80\x04\x95" + HUGE,
    "lists": lambda size: b"]" * size,
    "sets": lambda size: b"\x8f" * size,
    "memos": lambda size: b"N" + b"\x94" * size,
    "a deep list": lambda size: b"(l" * (size // 2),
    "a long number": lambda size: b"\x8b" + size.to_bytes(4, "little") + b"\x01" * size,
}


def names_of(kind: str, size: int) -> list[str]:
    rng = random.Random(0)
    match kind:
        case "four numbers":
            places = ((rng.randrange(1000), rng.randrange(1000), rng.randrange(1000)) for _ in range(size // 16))
            return [f"r{a}c{b}-{c}n{at}" for at, (a, b, c) in enumerate(places)]
        case "a hundred numbers":
            return ["".join(f"a{rng.randrange(10)}" for _ in range(100)) for _ in range(size // 200)]
        case _:
            return [f"{rng.randbytes(90).hex()}x" for _ in range(size // 181)]


# Repeated until the log is long enough; most nearly match a card, a prefix or a traceback, or a terminal obeys them.
LOGS = {
    "endless": b"x",
    "brackets": b"[",
    "tags": b"[1,1]<stderr>:",
    "empty lines": b"\n",
    "carriage returns": b"CUDA error: \r",
    "near errors": b"CUDA error: \nNCCL WARN\n",
    "bare errors": b"Error: \n",
    "metrics": b"MeanSquaredError: 0.01\n",
    "tracebacks": b"Traceback (most recent call last)\n",
    "frames": b'Traceback (most recent call last):\n  File "a", line 1\n',
    "mixed ranks": b"[rank0]: Traceback (most recent call last)\n[rank1]:   x\n",
    "NUL": b"\0",
    "no UTF-8": b"\xff\xfe",
    "escape codes": b"\x1b[31m\x1b]0;title\x07",
    "open escape codes": b"\x1b[1;1;1;1;1;1;1;1;1;1;1;1;1;1;1;1;1;1;1",
    "open JSON": b'{"log":"',
    "JSON backslashes": b'{"log":"\\\\',
    "JSON": b'{"message": "Error: x\\n\\u00e9", "a": 1}\n',
    "ranks": b"[rank1]: NCCL WARN a\n",
    "networks": b"NET/OFI x\n",
    "anchors on lines": b"".join(card.anchor.encode() + b"\n" for card in all_cards()),
    "anchors on one line": b" ".join(card.anchor.encode() for card in all_cards()),
    "examples": b"".join(card.example.encode() + b"\n" for card in all_cards()),
}


def judge_recording(name: str, size: int) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        path.write_bytes(RECORDINGS[name](size))
        with contextlib.suppress(UserError):
            judge.run([str(path)], Outputs(details=True, json=f"{folder}/json", markdown=f"{folder}/markdown"))


def load_pickle(name: str, size: int) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace_0"
        path.write_bytes(b"\x80\x04" + PICKLES[name](size))
        with contextlib.suppress(OSError):
            assert read_dump(path) is None
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10 < MEMORY_BYTES


def read_log(name: str, size: int) -> None:
    piece = LOGS[name] * ((1 << 16) // len(LOGS[name]) + 1)
    found = explain_log((piece for _ in range(size // 2 // len(piece) + 1)), "job.log")
    assert not set(render(log_blocks(found), width=80, color=False)) & {"\x00", "\x1b", "\x07", "\r"}


def fold_names(name: str, size: int) -> None:
    assert fold_hosts(names_of(name, size), limit=8)


# The reader, the names, and the bytes and seconds that each may take.
KINDS: dict[str, tuple[Callable[[str, int], None], Iterable[str], int | None, int]] = {
    "recordings": (judge_recording, RECORDINGS, MEMORY_BYTES, 20),
    "pickles": (load_pickle, PICKLES, None, 20),  # their reader takes a MemoryError for a damaged file
    "logs": (read_log, LOGS, 300_000_000, 30),
    "names": (fold_names, ("four numbers", "a hundred numbers", "no two alike"), MEMORY_BYTES, 20),
}


def read_hostile(kind: str, size: int) -> None:
    """In a child: read each of a kind; a name that takes too long or too much is the last on standard error."""
    read, names, memory, seconds = KINDS[kind]
    used = int(Path("/proc/self/statm").read_text().split()[5]) * os.sysconf("SC_PAGE_SIZE")
    if memory is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (used + memory, used + memory))
    for name in names:
        sys.stderr.write(f"{name}\n")
        begun = resource.getrusage(resource.RUSAGE_SELF)
        # The kernel ends the process by SIGXCPU.
        resource.setrlimit(resource.RLIMIT_CPU, (int(begun.ru_utime + begun.ru_stime) + 1 + seconds, -1))
        read(name, size)


@pytest.mark.parametrize("size", [100_000, pytest.param(10_000_000, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", KINDS)
def test_hostile_files_are_read_in_bounded_time_and_memory(kind: str, size: int) -> None:
    done = subprocess.run([sys.executable, __file__, kind, str(size)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("numbers", [1, 2, 3, 5])
@pytest.mark.parametrize("form", ["{}", "{:02}", "{:03}"])
def test_many_names_are_folded_into_the_same_names(numbers: int, form: str) -> None:
    rng = random.Random(f"{numbers}{form}")
    for most in (3, 12, 150):
        names = {"x" + "-".join(form.format(rng.randrange(most)) for _ in range(numbers)) for _ in range(200)}
        assert set(NodeSet(fold_hosts(sorted(names)), resolver=RESOLVER_NOGROUP)) == names


def test_a_box_of_hosts_is_one_name() -> None:
    names = [f"r{r}c{c}n{n:02}" for r in range(4) for c in range(8) for n in range(16)]
    assert fold_hosts(reversed(names)) == "r[0-3]c[0-7]n[00-15]"


if __name__ == "__main__":
    read_hostile(sys.argv[1], int(sys.argv[2]))
