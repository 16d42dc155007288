"""recipes/Dockerfile without a container engine: its instructions run in a chroot, over this machine's file system."""

import json
import os
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from dists import ROOT

# What COPY and RUN change lies in memory, and goes with the mount namespace. pip needs the package index.
BUILD = """set -eu
mount -t tmpfs none {folder}
cd {folder}
mkdir upper work image
mount -t overlay overlay -o lowerdir=/,upperdir=upper,workdir=work image
for kernel in proc sys dev; do mount --rbind /$kernel image/$kernel; done
{steps}
cd /
chroot {folder}/image {python} -c 'import ddpdiag, torch; print(ddpdiag.__file__, torch.__version__)'
chroot {folder}/image {entry} {command} --nproc-per-node 1 --select LCH001,HST001
"""


def step(instruction: str, value: str) -> str:
    """The commands of a COPY or RUN."""
    if instruction == "RUN":
        return f"chroot image /bin/sh -c {shlex.quote(value)}"
    *sources, target = value.split()
    copied = " ".join(shlex.quote(f"{ROOT / source}{'/.' if (ROOT / source).is_dir() else ''}") for source in sources)
    return f"mkdir -p image{target} && cp -r {copied} image{target}"


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="mounts need root on Linux")
def test_the_image_builds_from_a_checkout_and_keeps_its_torch(tmp_path: Path) -> None:
    lines = [line for line in (ROOT / "recipes" / "Dockerfile").read_text().splitlines() if line and line[0] != "#"]
    steps = "\n".join(step(*line.split(maxsplit=1)) for line in lines if line.startswith(("COPY", "RUN")))
    (entry,), (command,) = (json.loads(line.split(maxsplit=1)[1]) for line in lines[-2:])
    script = BUILD.format(folder=tmp_path, steps=steps, python=sys.executable, entry=entry, command=command)
    environ = os.environ | {"PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"}
    done = subprocess.run(["unshare", "-m", "bash", "-c", script], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"site-packages/ddpdiag/__init__.py {version('torch')}" in done.stdout
    assert "FIT: 1 rank on 1 host" in done.stdout
