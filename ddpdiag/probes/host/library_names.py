"""Names of environment variables in the libraries that the job loads, to find variables that no library reads.

NCCL and torch ignore a variable whose name they do not know: a misspelt name, or one that a newer version removed. Each
name that a library reads is a string constant in it. An ELF file has its constants in the section .rodata, 1 to 30 MB
of a library of up to 1 GB, so only this section is read. torch is found without an import.
"""

import mmap
import re
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

# Each prefix with a name that all versions of its library have. Without this name the library was not found, as in a
# CPU build of torch, and names with the prefix are not judged.
_MARKS = {
    "NCCL_": "NCCL_BUFFSIZE",
    "TORCH_NCCL_": "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
    "TORCH_FR_": "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
    "GLOO_": "GLOO_SOCKET_IFNAME",
}
_LIBRARIES = ("libtorch_*.so", "lib[nr]ccl.so*", "libnccl-*.so*")
_SYSTEM_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/local/lib")
# Names that images and builds set for themselves, and those of plugins and of NCCL's tests.
_OTHER_READERS = re.compile(
    r"NCCL_(VERSION|HOME|ROOT|DIR|PREFIX|PATH|INCLUDE|INC|LIB|LIBRARY|LIBRARIES|SRC|BUILD|INSTALL|TESTS?"
    r"|OFI|FASTRAK|GPUDIRECTTCPX|SHIMNET|INSPECTOR|PROFILER?|TUNER|UCX|SHARP|CTRAN)(_.*)?"
)
# The rest of a name at the end of a constant. Names inside of messages do not count.
_TAIL = re.compile(rb"[A-Z0-9_]+(?=\0)")
MAX_SECTION_BYTES = 64 << 20
# difflib's ratio. Between names of one library it is often 0.7 although they have nothing to do with each other.
_MIN_SIMILARITY = 0.85


def unread_variables(names: Iterable[str], env: Mapping[str, str]) -> dict[str, str]:
    """Those of the variables `names` that no library of the job reads, with the nearest name that one reads (or "")."""
    candidates = [name for name in names if name.startswith(tuple(_MARKS)) and not _OTHER_READERS.fullmatch(name)]
    if not candidates:
        return {}
    known = sorted({name for path in libraries(env) for name in names_in(path)})
    prefixes = tuple(prefix for prefix, mark in _MARKS.items() if mark in known)
    return {
        name: next(iter(get_close_matches(name.upper(), known, n=1, cutoff=_MIN_SIMILARITY)), "")
        for name in sorted(candidates)
        if name.startswith(prefixes) and name not in known
    }


def libraries(env: Mapping[str, str]) -> tuple[Path, ...]:
    """The libraries of torch and NCCL, with NCCL's plugins, in all places from which the job may load them."""
    search_path = env.get("LD_LIBRARY_PATH", "").split(":")
    folders = [*filter(None, search_path), *_package_folders(), str(Path(sys.prefix, "lib")), *_SYSTEM_FOLDERS]
    plugins = [value for name, value in env.items() if re.fullmatch(r"NCCL_\w+_PLUGIN", name) and "/" in value]
    preloaded = [name for name in env.get("LD_PRELOAD", "").replace(":", " ").split() if "nccl" in name]
    found = [path for folder in folders for pattern in _LIBRARIES for path in Path(folder).glob(pattern)]
    paths = (*map(Path, plugins), *map(Path, preloaded), *found)
    return tuple(dict.fromkeys(path.resolve() for path in paths if path.is_file()))


def _package_folders() -> Iterator[str]:
    """The folders of the libraries in the packages torch and nvidia-nccl."""
    spec = find_spec("torch")
    for torch in spec.submodule_search_locations or () if spec is not None else ():
        yield str(Path(torch, "lib"))
        yield str(Path(torch).parent / "nvidia" / "nccl" / "lib")


def names_in(path: Path) -> frozenset[str]:
    """The names with one of the prefixes in a library's constants. Empty if it cannot be read, or is no 64-bit ELF."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as image:
            constants = _read_only_data(image)
    except (OSError, ValueError, IndexError, OverflowError, struct.error):
        return frozenset()
    return frozenset(name for prefix in ("NCCL_", "TORCH_FR_", "GLOO_") for name in _names_with(prefix, constants))


def _names_with(prefix: str, constants: bytes) -> Iterator[str]:
    # split() finds the prefix some ten times faster than a regular expression does.
    before, *pieces = constants.split(prefix.encode())
    for piece in pieces:
        if tail := _TAIL.match(piece):
            torch = "TORCH_" if before.endswith(b"TORCH_") else ""
            yield f"{torch}{prefix}{tail[0].decode()}"
        before = piece


def _read_only_data(image: mmap.mmap) -> bytes:
    """The sections .rodata of an ELF file (elf(5), Elf64_Ehdr and Elf64_Shdr), of each the first MAX_SECTION_BYTES."""
    if image[:5] != b"\x7fELF\x02" or sys.byteorder != "little":
        return b""
    (headers,), (size, number, names_index) = struct.unpack_from("<Q", image, 40), struct.unpack_from("<HHH", image, 58)
    sections = [struct.unpack_from("<I20xQQ", image, headers + index * size) for index in range(number)]
    names = sections[names_index][1]
    data = b""
    for name, offset, length in sections:
        if image[names + name : names + name + 7] == b".rodata":
            data += image[offset : offset + min(length, MAX_SECTION_BYTES)]
    return data
