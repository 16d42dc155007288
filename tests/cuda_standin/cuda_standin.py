"""The CUDA stand-in: built from `src` into a cache folder, with the environment of a run on it.

$DDPDIAG_CUDA_TORCH is the Python of an environment with the CUDA wheel of torch, some 5 GB:

    python -m venv cuda && cuda/bin/pip install torch 'nvidia-cuda-crt==13.2.*'
    DDPDIAG_CUDA_TORCH=cuda/bin/python python -m pytest -m long tests/cuda_standin

nvidia-cuda-crt holds headers that the wheel's own lack. It must be the same minor version of Python as the tests': a
run takes torch from there, and ddpdiag with the rest from here.

`python tests/cuda_standin/cuda_standin.py 2 ddpdiag check` runs a command on it with two GPUs; TORCH_DIST_USE_NCCL2=0
in the environment takes the older class of process groups.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
if __name__ == "__main__":  # pytest has these already
    sys.path[:0] = [str(HERE.parent / "fake_nvml"), str(HERE.parent.parent)]

import fake_nvml  # noqa: E402

import ddpdiag  # noqa: E402

VARIABLE = "DDPDIAG_CUDA_TORCH"
HOW = (
    f"no CUDA wheel of torch: python -m venv V && V/bin/pip install torch 'nvidia-cuda-crt==13.2.*' (5 GB), and "
    f"{VARIABLE}=V/bin/python"
)
LIBRARIES = ("libcudart.so.13", "libcuda.so.1", "libnccl.so.2", "libcupti.so.13")
# The class of torch's process group for NCCL: torchcomms' is the default of torch 2.15.
GROUPS = {"ProcessGroupNCCL2": "1", "ProcessGroupNCCL": "0"}
_ASK = """
import json, pathlib, sys
def first(name):
    return next((str(pathlib.Path(p).absolute()) for p in sys.path if p and (pathlib.Path(p) / name).exists()), None)
version = first("torch/version.py")
about = {}
if version:
    exec((pathlib.Path(version) / "torch/version.py").read_text(), about)
print(json.dumps({
    "site": version, "crt": first("nvidia/cu13/include/crt/host_config.h"), "nccl": first("nvidia/nccl/include/nccl.h"),
    "version": about.get("__version__"), "cuda": about.get("cuda"), "python": sys.version_info[:2],
}))
"""


class Unavailable(Exception):
    """Why there is no stand-in here."""


@dataclass(frozen=True)
class Standin:
    """A stand-in that was built: the Python that runs ddpdiag on it, its libraries, and a folder for what runs need."""

    python: Path
    libraries: Path
    folder: Path
    torch: str

    def variables(self, gpus: int, group: str) -> dict[str, str]:
        """The environment of a run with so many GPUs and the process group of that class."""
        nvml, proc = _driver(self.folder, gpus)
        return {
            "LD_PRELOAD": " ".join(str(self.libraries / name) for name in LIBRARIES),
            "LD_LIBRARY_PATH": str(nvml),
            "DDPDIAG_PROCFS": str(proc),
            "FAKECUDA_DEVICES": str(gpus),
            "TORCH_DIST_USE_NCCL2": GROUPS[group],
            "PYTHONPATH": str(HERE / "hooks"),
        }


def standin() -> Standin:
    """The stand-in, built where it is not yet; Unavailable where it cannot be."""
    python = os.environ.get(VARIABLE)
    if not python:
        raise Unavailable(HOW)
    if not shutil.which("g++"):
        raise Unavailable("no C++ compiler: g++ builds the CUDA stand-in")
    about = json.loads(subprocess.run([python, "-c", _ASK], check=True, capture_output=True, text=True).stdout)
    _look_at(python, about)
    folder = _cache() / f"torch-{about['version']}"
    folder.mkdir(parents=True, exist_ok=True)
    return Standin(_environment(folder, about), _libraries(folder, about), folder, about["version"])


def _look_at(python: str, about: Mapping) -> None:
    if not about["cuda"] or not about["nccl"]:
        raise Unavailable(f"{python} has torch {about['version']}, which is no CUDA wheel with NCCL")
    if not about["crt"]:
        raise Unavailable(f"{python} lacks headers: pip install 'nvidia-cuda-crt=={about['cuda']}.*'")
    if tuple(about["python"]) != sys.version_info[:2]:
        raise Unavailable(f"{python} is Python {about['python']}, and the tests run in {sys.version_info[:2]}")


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ddpdiag-tests" / "cuda-standin"


def _libraries(folder: Path, about: Mapping) -> Path:
    """Built once for each content of the sources; a minute and a half."""
    sources = sorted([*(HERE / "src").iterdir(), HERE / "build.sh"])
    content = b"\0".join(path.read_bytes() for path in sources)
    home = folder / hashlib.sha256(content).hexdigest()[:16]
    if not home.exists():
        part = home.with_suffix(".part")
        include = str(Path(about["crt"]) / "nvidia/cu13/include")
        command = ["sh", str(HERE / "build.sh"), about["site"], include, str(part)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"build.sh failed:\n{done.stdout}{done.stderr}")
        part.rename(home)
    return home


def _environment(folder: Path, about: Mapping) -> Path:
    """A virtual environment: ddpdiag, the CUDA wheel's packages, and then those of the tests' own environment."""
    root = Path(ddpdiag.__file__).parent.parent
    home = folder / f"environment-{hashlib.sha256(str(root).encode()).hexdigest()[:8]}"  # one for each checkout
    python = home / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    packages = next((home / "lib").glob("python*/site-packages"))
    own = [path for path in sys.path if path.endswith("site-packages")]
    paths = [str(root), about["site"], *own]
    (packages / "cuda_standin.pth").write_text("".join(f"{path}\n" for path in dict.fromkeys(paths)))
    return python


def _driver(folder: Path, gpus: int) -> tuple[Path, Path]:
    """The NVML stand-in with so many GPUs, and a /proc that shows them."""
    host = json.loads((fake_nvml.SICK / "healthy.json").read_text())
    topology = [" ".join(row.split()[:gpus]) for row in host["topology"][:gpus]]
    nvml = fake_nvml.build("healthy", folder / "nvml", {"count": gpus, "topology": topology})
    root = folder / f"gpus-{gpus}"
    if not root.exists():
        root.mkdir()
        fake_nvml.driver(root, gpus)
    return nvml, root / "proc"


def main() -> int:
    """Run a command of ours on the stand-in: GPUS ddpdiag ..., or GPUS and arguments for Python."""
    gpus, *command = sys.argv[1:]
    found = standin()
    older = os.environ.get("TORCH_DIST_USE_NCCL2") == "0"
    variables = found.variables(int(gpus), "ProcessGroupNCCL" if older else "ProcessGroupNCCL2")
    arguments = ["-m", *command] if command[:1] == ["ddpdiag"] else command
    return subprocess.run([found.python, *arguments], env=dict(os.environ) | variables).returncode


if __name__ == "__main__":
    sys.exit(main())
