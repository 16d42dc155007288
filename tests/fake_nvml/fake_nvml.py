"""Stand-ins for libnvidia-ml.so.1, one for each JSON file in `sick`, compiled with the C compiler of this machine.

The real pynvml loads such a library where LD_LIBRARY_PATH leads to it, and asks it as it asks NVIDIA's.

Variables say what the driver takes, in seconds; they are not there, or 0, for a driver in persistence mode:

- $FAKE_NVML_OPEN_SECONDS: what the first nvmlInit of a process takes (0.3 s on a host of eight GPUs).
- $FAKE_NVML_GPU_SECONDS: what it takes to start a GPU for its first user on this host (1 to 4 s). Its users are the
  processes that got a handle of it and have neither shut NVML down nor ended; after the last one it is stopped.
- $FAKE_NVML_DRIVER: the folder for what the processes of this host share; the file gpu-N there has a byte for each
  start of GPU N. Without it no start is counted or takes time.

A file describes GPUs by the keys that fake_nvml.c gives out:

- `base`: another file, of which this one is a variant. Of both, objects are joined key by key; the variant wins.
- `count`: how many GPUs; `all`: what is true of each of them; `gpus`: what differs, by index.
- `later`: what differs then, by index, from the start of NVML on that $FAKE_NVML_LATER names; the starts of all
  processes are counted in the file $FAKE_NVML_STARTS.
- `driver`: the driver's version; `codes` and `sleep_seconds` beside it are for functions that ask no GPU.
- `missing`: functions that the library does not have, as in an older driver.
- `topology`: one row for each GPU, as `nvidia-smi topo -m` has it ("X PIX SYS SYS"), but without NVLinks.
- `p2p`: of "read", "write", "nvlink" and "atomics" such rows, as `nvidia-smi topo -p2p` has them ("X OK CNS DR"), or
  one word for all pairs. "-" is not supported.

Of a GPU: `name`, `nvlinks` (`count`, `down`, `speed_mbps`, `errors`: link -> kind -> number, `remotes`: the
index of the GPU at the end of each link, else it is a switch), `processes` and `graphics` ([pid, bytes] each), `codes`
(function -> what it returns), `sleep_seconds` (function -> how long it hangs), and numbers. A number that is null or
not there is not supported; [before, after] is one that changes after it was read.
"""

import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

HERE = Path(__file__).parent
SOURCE = HERE / "fake_nvml.c"
SICK = HERE / "sick"
LIBRARY = "libnvidia-ml.so.1"
# In the order of NVML_NVLINK_ERROR_DL_*; the last is the field of Blackwell.
LINK_ERRORS = ("replay", "recovery", "crc_flit", "crc_data", "ecc_data", "recovery_event")
# nvml.h: nvmlGpuTopologyLevel_t; nvmlGpuP2PStatus_t, and nvmlGpuP2PCapsIndex_t in its order.
LEVELS = {"PSB": 0, "PIX": 10, "PXB": 20, "PHB": 30, "NODE": 40, "SYS": 50}
STATUSES = {"OK": 0, "CNS": 1, "GNS": 2, "TNS": 3, "DR": 4, "NS": 5, "U": 6}
CAPABILITIES = ("read", "write", "nvlink", "atomics")
SWITCH = "00000000:05:00.0"
# Keys of a GPU that are no numbers, or not one number.
OTHERS = {"name", "nvlinks", "processes", "graphics", "codes", "sleep_seconds"}


def compiler() -> str | None:
    """The C compiler, or None if there is none."""
    return shutil.which("cc") or shutil.which("gcc")


def uuid_of(index: int) -> str:
    return f"GPU-{index:08x}-0000-4000-8000-00000000000{index:x}"


def pci_of(index: int) -> str:
    """As sysfs writes it."""
    return f"0000:{0x10 + 0x11 * index:02x}:00.0"


def build(name: str, folder: Path, changes: Mapping[str, object] = MappingProxyType({})) -> Path:
    """The folder in `folder` where the library of that JSON file lies; it is compiled once for each content.

    `changes` are joined with the file, as a variant of it.
    """
    host = _joined(_read(name), dict(changes))
    tables, enums = _tables(host), _enums()
    missing = host.get("missing", [])
    content = "\0".join([SOURCE.read_text(), tables, enums, *missing])
    home = folder / hashlib.sha256(content.encode()).hexdigest()[:16]
    library = home / LIBRARY
    if library.exists():
        return home
    home.mkdir(parents=True, exist_ok=True)
    (home / "names.h").write_text(enums)
    (home / "tables.h").write_text(tables)
    hidden = " ".join(f"{function};" for function in missing)
    (home / "exports.map").write_text(f"{{ global: *; {f'local: {hidden}' if hidden else ''} }};\n")
    command = [str(compiler()), "-shared", "-fPIC", "-O0", "-Wall", "-Werror", f"-I{home}", str(SOURCE)]
    # Moved to its name when it is whole, for tests that run side by side.
    part = home / f"{LIBRARY}.part"
    command += [f"-Wl,--version-script={home}/exports.map", f"-Wl,-soname,{LIBRARY}", "-o", str(part)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    part.rename(library)
    return home


def _read(name: str) -> dict:
    own = json.loads((SICK / f"{name}.json").read_text())
    return _joined(_read(own.pop("base")), own) if "base" in own else own


def _joined(base: dict, variant: dict) -> dict:
    joined = dict(base)
    for key, value in variant.items():
        old = joined.get(key)
        joined[key] = _joined(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return joined


def _functions() -> list[str]:
    return sorted(set(re.findall(r"\b(?:ENTER|ENTER_SYSTEM|NUMBER)\((nvml\w+)", SOURCE.read_text())))


def _keys() -> list[str]:
    source = SOURCE.read_text()
    given = re.findall(r"\bGIVE\([^()]+, (\w+)\)", source) + re.findall(r"\bNUMBER\(\w+, [\w ]+, (\w+)\)", source)
    return sorted(set(given) - {"key"})


def _enums() -> str:
    functions = ", ".join(f"F_{function}" for function in _functions())
    keys = ", ".join(f"K_{key}" for key in _keys())
    return f"enum function {{ {functions}, FUNCTIONS }};\nenum key {{ {keys}, KEYS }};\n"


def _tables(host: dict) -> str:
    others, later = host.get("gpus", {}), host.get("later", {})
    first = [_joined(host["all"], others.get(str(index), {})) for index in range(host["count"])]
    gpus = [_gpu(index, gpu, host) for index, gpu in enumerate(first)]
    later_gpus = [_gpu(index, _joined(gpu, later.get(str(index), {})), host) for index, gpu in enumerate(first)]
    return "\n".join(
        [
            f"#define GPUS {host['count']}",
            f"static const char DRIVER[] = {json.dumps(host['driver'])};",
            f"static const struct answer system_answers[FUNCTIONS] = {{ {_answers(host)} }};",
            f"static const struct gpu first_gpus[GPUS] = {{ {', '.join(gpus)} }};",
            f"static const struct gpu later_gpus[GPUS] = {{ {', '.join(later_gpus)} }};",
            "",
        ]
    )


def _processes(gpu: dict, key: str) -> str:
    return f"{{ {', '.join(f'{{ {pid}u, {used}ull }}' for pid, used in gpu.get(key, []))} }}"


def _gpu(index: int, gpu: dict, host: dict) -> str:
    numbers = {key: value for key, value in gpu.items() if key not in OTHERS}
    if unknown := numbers.keys() - set(_keys()):
        raise ValueError(f"fake_nvml.c gives out no {', '.join(sorted(unknown))}")
    values = ", ".join(f"[K_{key}] = {_value(value)}" for key, value in numbers.items() if value is not None)
    links, allowed = gpu.get("nvlinks") or {"count": 0}, host.get("p2p", {})
    parts = {
        "uuid": json.dumps(uuid_of(index)),
        "name": json.dumps(gpu["name"]),
        "bus_id": json.dumps(_bus_id(index)),
        "values": f"{{ {values} }}",
        "answers": f"{{ {_answers(gpu)} }}",
        "links": links["count"],
        "link": f"{{ {', '.join(_link(number, links) for number in range(links['count']))} }}",
        "processes": len(gpu.get("processes", [])),
        "process": _processes(gpu, "processes"),
        "graphics": len(gpu.get("graphics", [])),
        "drawing": _processes(gpu, "graphics"),
        "levels": _row(host.get("topology"), index, host["count"], LEVELS),
        "p2p": f"{{ {', '.join(_row(allowed.get(of), index, host['count'], STATUSES) for of in CAPABILITIES)} }}",
    }
    return f"{{ {', '.join(f'.{name} = {part}' for name, part in parts.items())} }}"


def _bus_id(index: int) -> str:
    """As NVML writes it."""
    return f"0000{pci_of(index)}".upper()


def _row(rows: list[str] | str | None, index: int, count: int, words: dict[str, int]) -> str:
    """One GPU's row of a matrix of words; not supported where there is none."""
    row = rows[index].split() if isinstance(rows, list) else [rows or "-"] * count
    known = {number: words[word] for number, word in enumerate(row) if word not in ("X", "-") and number != index}
    return f"{{ {', '.join(f'[{number}] = {_value(value)}' for number, value in known.items())} }}"


def _link(number: int, links: dict) -> str:
    errors = links.get("errors", {}).get(str(number), {})
    counters = ", ".join(_value(errors.get(kind, 0)) for kind in LINK_ERRORS)
    state = _value(int(number not in links.get("down", [])))
    remotes = links.get("remotes")
    remote = _bus_id(remotes[number]) if remotes else SWITCH
    return f"{{ {state}, {_value(links['speed_mbps'])}, {{ {counters} }}, {json.dumps(remote)} }}"


def _value(value: int | list[int]) -> str:
    first, later = value if isinstance(value, list) else (value, value)
    return f"{{ 1, {int(first)}ll, {int(later)}ll }}"


def _answers(of: dict) -> str:
    codes, sleeps = of.get("codes", {}), of.get("sleep_seconds", {})
    if unknown := (codes.keys() | sleeps.keys()) - set(_functions()):
        raise ValueError(f"fake_nvml.c has no {', '.join(sorted(unknown))}")
    named = sorted(codes.keys() | sleeps.keys())
    return ", ".join(f"[F_{name}] = {{ {codes.get(name, 0)}, {sleeps.get(name, 0)} }}" for name in named)


def driver_of_eight(folder: Path) -> Path:
    """/proc of this host, with the driver of eight GPUs."""
    return driver(folder, 8)


def driver(folder: Path, count: int) -> Path:
    """/proc of this host in `folder`, with the driver of so many GPUs."""
    root = folder / "proc"
    root.mkdir()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() and entry.name != "driver":
            (root / entry.name).symlink_to(entry)
    for index in range(count):
        gpu = root / "driver" / "nvidia" / "gpus" / pci_of(index)
        gpu.mkdir(parents=True)
        (gpu / "information").write_text(f"Model: \t\t NVIDIA H100\nGPU UUID: \t {uuid_of(index)}\n")
    return root
