"""The evidence of this host: a report of `ddpdiag host`, outputs of commands, and whether it is a container."""

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import msgspec

from ddpdiag.codec import decode
from ddpdiag.model import Report
from ddpdiag.probes.host.kernel import proc_root, read_pairs, read_text, sys_root
from ddpdiag.probes.host.programs import python_command, run_until, with_package_path
from ddpdiag.sanitize import without_secrets

# The last part of a ticket's host test: importing torch may take that long on a network file system.
_HOST_BUDGET_SECONDS, _HOST_SECONDS = 30, 45.0
_CONTAINER_FILES = {".dockerenv": "Docker", "run/.containerenv": "Podman"}
_CONTAINER_VARIABLES = {"KUBERNETES_SERVICE_HOST": "Kubernetes", "APPTAINER_NAME": "Apptainer"}


def output_of(command: Sequence[str], seconds: float) -> str | None:
    """The output of a command without secrets, or a sentence if it does not end. None if there is no such command."""
    if shutil.which(command[0]) is None:
        return None
    result = run_until(command, time.monotonic() + seconds)
    if result is None:
        return f"It did not end within {seconds:.0f} s."
    text = result.stdout.decode(errors="replace").strip() or result.stderr.strip()
    return without_secrets(text + (f"\nexit code {result.code}" if result.code else ""))


def host_report() -> Report | None:
    """The report of `ddpdiag host` in a child process; None if it made none."""
    options = [*(["--torch"] if find_spec("torch") is not None else []), "--budget", str(_HOST_BUDGET_SECONDS)]
    command = python_command("ddpdiag", "host", *options, "--json", "-", "--quiet")
    result = run_until(command, time.monotonic() + _HOST_SECONDS, env=with_package_path(os.environ))
    try:
        return decode(result.stdout, Report) if result is not None else None
    except msgspec.DecodeError:
        return None


def machine_text(env: Mapping[str, str], root: Path = Path("/")) -> str:
    """Describe this machine: its container, and the virtual or physical machine with its maker."""
    containers = [name for path, name in _CONTAINER_FILES.items() if (root / path).exists()]
    containers += [name for variable, name in _CONTAINER_VARIABLES.items() if env.get(variable)]
    is_virtual = "hypervisor" in read_pairs(proc_root(env) / "cpuinfo", ":").get("flags", "").split()
    dmi = sys_root(env) / "class" / "dmi" / "id"
    model = " ".join(filter(None, (read_text(dmi / name) for name in ("sys_vendor", "product_name"))))
    container = f"container ({', '.join(containers)})" if containers else "no sign of a container"
    return (
        f"{container}; {'virtual machine' if is_virtual else 'no sign of a virtual machine'}{model and f' ({model})'}"
    )
