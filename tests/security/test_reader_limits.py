"""Hostile files are read within 20 s of processor time and 1 GB, each in a process of its own.

In the default tier 1 MB of each; `-m long` 10 MB.
"""

import os
import random
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet
from hostile_files import RECORDINGS, read

from ddpdiag.text import fold_hosts
from ddpdiag.watch.evidence import load_trace

SECONDS, MEMORY_BYTES = 20, 1 << 30
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


NAMES = ("four numbers", "a hundred numbers", "no two alike")
KINDS = {"recording": RECORDINGS, "pickle": PICKLES, "names": NAMES}
CASES = [f"{kind}:{name}" for kind, names in KINDS.items() for name in names]


def read_hostile(case: str, size: int) -> None:
    """In a child: read it, with all that this may take."""
    kind, _, name = case.partition(":")
    with TemporaryDirectory() as folder:
        data = PICKLES[name](size) if kind == "pickle" else b""
        names = names_of(name, size) if kind == "names" else []
        used = int(Path("/proc/self/statm").read_text().split()[5]) * os.sysconf("SC_PAGE_SIZE")
        if kind != "pickle":  # whose reader takes a MemoryError for a damaged file
            resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY_BYTES, used + MEMORY_BYTES))
        begun = resource.getrusage(resource.RUSAGE_SELF)
        # The kernel ends the process by SIGXCPU.
        resource.setrlimit(resource.RLIMIT_CPU, (int(begun.ru_utime + begun.ru_stime) + 1 + SECONDS, -1))
        match kind:
            case "recording":
                read(name, size, Path(folder))
            case "pickle":
                assert load_trace(data) is None
                assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10 < MEMORY_BYTES
            case _:
                assert fold_hosts(names, limit=8)


@pytest.mark.parametrize("size", [200_000, pytest.param(10_000_000, marks=pytest.mark.long)])
@pytest.mark.parametrize("case", CASES)
def test_it_is_read_in_bounded_time_and_memory(case: str, size: int) -> None:
    done = subprocess.run([sys.executable, __file__, case, str(size)], capture_output=True, text=True, check=False)
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
