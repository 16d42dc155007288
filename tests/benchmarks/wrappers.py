"""Ranks of one host that a wrapper makes different: do they share one import of torch, and is the verdict the same?

    python tests/benchmarks/wrappers.py [--only NAME,...]     (root, for namespaces and capabilities)

torchrun starts two ranks; the wrapper changes rank 1 only. A row shows whether the ranks shared a fork server
(`import.ranks` in the report's measurements), the verdict with the ranks and codes that it blames, and the same for a
run in which an additional variable forbids sharing. The bars: a rank that differs shares with no other one, and both
runs end with the same verdict and the same blamed ranks.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path
from typing import NamedTuple

SCRIPT = 'if [ "$LOCAL_RANK" = 1 ]; then {prefix} {python} "$@"; else {other} exec python "$@"; fi'
ARGUMENTS = ("-m", "ddpdiag", "check", "--select", "LCH,HST,COL001", "--budget", "60", "--json")
# Rank 0 gets the one and rank 1 the other: a variable that differs is never shared.
APART = ("ALIKE=no", "ALIKE=never")


class Wrapper(NamedTuple):
    """What stands before rank 1's command; `shared` is whether it should share nevertheless."""

    prefix: str
    python: str = "python"
    shared: bool = False


WRAPPERS = {
    "none": Wrapper("exec", shared=True),
    "NCCL_DEBUG": Wrapper("NCCL_DEBUG=WARN exec", shared=True),
    "CUDA_VISIBLE_DEVICES": Wrapper("CUDA_VISIBLE_DEVICES=0 exec", shared=True),
    "another interpreter": Wrapper("exec", "$FOLDER/same/bin/copied"),
    "venv with the same torch": Wrapper("exec", "$FOLDER/same/bin/python"),
    "venv without torch": Wrapper("exec", "$FOLDER/bare/bin/python"),
    "flag -O": Wrapper("exec", "python -O"),
    "PYTHONPATH": Wrapper("PYTHONPATH=/tmp exec"),
    "sitecustomize": Wrapper("PYTHONPATH=$FOLDER/site exec"),
    "LD_PRELOAD": Wrapper("LD_PRELOAD=$LIBRARY exec"),
    "OMP_NUM_THREADS": Wrapper("OMP_NUM_THREADS=2 exec"),
    "locale": Wrapper("LC_ALL=C.UTF-8 exec"),
    "chroot": Wrapper("mount --rbind / $FOLDER/root && exec unshare --root=$FOLDER/root --wd=$PWD"),
    "mount namespace": Wrapper("exec unshare --mount"),
    "IPC namespace": Wrapper("exec unshare --ipc"),
    "UTS namespace": Wrapper("exec unshare --uts"),
    "cgroup namespace": Wrapper("exec unshare --cgroup"),
    "PID namespace": Wrapper("exec unshare --pid --fork --mount-proc --kill-child"),
    "limit of the stack": Wrapper("ulimit -s 9000; exec"),
    "limit of open files": Wrapper("ulimit -n 10000; exec"),
    "affinity": Wrapper("exec taskset -c 0"),
    "priority": Wrapper("exec nice -n 1"),
    "capabilities": Wrapper("exec setpriv --bounding-set=-net_raw --inh-caps=-net_raw"),
    "no new privileges": Wrapper("exec setpriv --no-new-privs"),
    "umask": Wrapper("umask 077; exec"),
    "working directory": Wrapper("cd / && exec"),
    "another group": Wrapper("exec setpriv --groups 12345"),
}


def prepare(folder: Path) -> dict[str, str]:
    """Interpreters, environments and folders that the wrappers name."""
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("")
    installed = [
        str(Path(entry)) for entry in sys.path if "site-packages" in entry or (Path(entry) / "ddpdiag").is_dir()
    ]
    for name in ("same", "bare"):
        venv.create(folder / name)
        base = {"base": folder / name, "platbase": folder / name}
        own = Path(sysconfig.get_path("purelib", vars=base))
        if name == "same":
            (own / "others.pth").write_text("\n".join(installed))
            shutil.copy(os.path.realpath(sys.executable), folder / name / "bin" / "copied")
            continue
        for entry in (entry for path in map(Path, installed) for entry in path.iterdir()):
            if (
                not entry.name.startswith(("torch", ".", "__"))
                and entry.suffix != ".pth"
                and not (own / entry.name).exists()
            ):
                (own / entry.name).symlink_to(entry)
    (folder / "root").mkdir()
    library = next(Path("/usr/lib").glob("*/libm.so.6"))
    return {"FOLDER": str(folder), "LIBRARY": str(library)}


def run(wrapper: Wrapper, variables: dict[str, str], *, apart: bool) -> tuple[bool, str]:
    """Whether the ranks shared an import, and the verdict with what is blamed."""
    other, own = APART if apart else ("", "")
    prefix = wrapper.prefix.replace("exec", f"{own} exec" if apart else "exec", 1)
    script = SCRIPT.format(prefix=prefix, python=wrapper.python, other=other)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        launcher = (
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "--no-python",
        )
        subprocess.run(
            ["unshare", "--mount", *launcher, "bash", "-c", script, "wrapper", *ARGUMENTS, str(file)],
            env=os.environ | variables | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
            capture_output=True,
            check=False,
            timeout=120,
        )
        if not file.exists():
            return False, "no report"
        report = json.loads(file.read_text())
    errors = [finding for finding in report["findings"] if finding["severity"] == "error"]
    blamed = sorted({rank for finding in errors for rank in finding["ranks"]})
    codes = ", ".join(dict.fromkeys(finding["code"] for finding in errors))
    verdict = f"{report['verdict']} {codes} {blamed}" if errors else report["verdict"]
    return report["measurements"].get("import.ranks", 1) > 1, verdict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of wrappers (default: all)")
    names = [name for name in parser.parse_args().only.split(",") if name] or [*WRAPPERS]
    print("| rank 1 has another | shared | verdict | verdict without sharing | |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        variables = prepare(Path(folder))
        for name in names:
            shared, verdict = run(WRAPPERS[name], variables, apart=False)
            alone, other = run(WRAPPERS[name], variables, apart=True)
            right = shared == WRAPPERS[name].shared and not alone and verdict == other
            print(
                f"| {name} | {'yes' if shared else 'no'} | {verdict} | {other} | {'' if right else 'MISSED'} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
