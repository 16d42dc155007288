"""Variables and NCCL configuration files, alike on every rank.

Ranks whose NCCL_*, TORCH_* or GLOO_* variables differ may choose different algorithms, networks or time-outs: they
hang, crash, or run as slowly as the worst of them. NCCL also reads ~/.nccl.conf (or $NCCL_CONF_FILE) and
/etc/nccl.conf, where an old workaround is easily forgotten. Only names on an allow-list are recorded, and none that
might hold a secret.

Findings:

Causes: a start-up file of one host, `mpirun` without `-x`, a container that carries settings. Fix: set variables in the
job script and let the launcher pass them on; compare the named hosts' files.

Confirm by hand: On each host, inside of the job, `env | grep -E '^(NCCL|TORCH|GLOO|CUDA)' | sort`, and `cat
~/.nccl.conf /etc/nccl.conf`; diff the results.

Sources: NCCL user guide, environment variables (docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html);
torch/csrc/distributed/c10d/debug.cpp (the values of TORCH_DISTRIBUTED_DEBUG); NCCL's src/misc/utils.cc (NCCL_HOSTID).
"""

import os
from collections.abc import Iterator, Mapping

from msgspec import Struct

from ddpdiag.checks.api import Check, Scope, Seen, Stage
from ddpdiag.checks.findings import Explained
from ddpdiag.checks.hosts import odd_text, ranks_text
from ddpdiag.checks.launch.settings import setting
from ddpdiag.model import Finding
from ddpdiag.model.context import Context
from ddpdiag.model.setting import Setting
from ddpdiag.probes.host.environment import nccl_files, recorded_variables
from ddpdiag.stats import odd_ones_out

FINDINGS = {
    "variable": Explained.warning("a variable differs between ranks."),
    "file": Explained.warning("a setting in a file of NCCL's differs between hosts."),
    "host-id": Explained.warning(
        "NCCL_HOSTID is set: NCCL takes neighbours for strangers, and uses neither P2P nor shared memory."
    ),
    "debug-level": Explained.error("TORCH_DISTRIBUTED_DEBUG has a value that `import torch` refuses."),
}

# These tell ranks apart on purpose (sizes are judged by LCH001, NCCL_HOSTID below).
OWN = frozenset(
    {
        "RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
        "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "NCCL_HOSTID",
        "NCCL_DEBUG_FILE", "NCCL_TOPO_DUMP_FILE", "NCCL_GRAPH_DUMP_FILE",
        "TORCHELASTIC_ERROR_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE",
    }
)  # fmt: skip
# Read by torch while it is imported; anything else raises there.
DEBUG_LEVELS = ("OFF", "INFO", "DETAIL")


class Data(Struct, frozen=True):
    """Recorded variables by name, and NCCL's configuration files as variables by path."""

    variables: dict[str, str]
    files: dict[str, dict[str, str]]


def measure(ctx: Context) -> Data:
    return Data(recorded_variables(os.environ), nccl_files(os.environ))


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    yield from _differences(seen, {rank: data.variables for rank, data in seen.by_rank.items()}, "variable")
    yield from _differences(seen, {rank: settings(data) for rank, data in seen.by_rank.items()}, "file")
    yield from _host_ids(seen)
    yield from _debug_levels(seen)


def settings(data: Data) -> dict[str, str]:
    """Lines of configuration files, by path and name."""
    return {f"{path}: {name}": value for path, rows in data.files.items() for name, value in rows.items()}


def _differences(seen: Seen[Data], settings: Mapping[int, Mapping[str, str]], word: str) -> Iterator[Finding]:
    for name in sorted({name for own in settings.values() for name in own} - OWN):
        odd = odd_ones_out({rank: own.get(name) for rank, own in settings.items()})
        if odd is None:
            continue
        said = odd_text(odd, missing="unset")
        yield seen.finding(
            word,
            f"{name} differs between ranks",
            f"{name}: {said}; one value on every rank is expected" + ("." if odd.ranks else " (no majority)."),
            ranks=odd.ranks,
            evidence={ranks_text(ranks): None if value is None else str(value) for value, ranks in odd.groups.items()},
            fix=f"Set {name} alike on every rank, in the job script, or unset it everywhere."
            if word == "variable"
            else "Make the file alike on every host, or remove it.",
        )


def _host_ids(seen: Seen[Data]) -> Iterator[Finding]:
    # NCCL hashes it in place of the host's name, so ranks with different ids never use P2P or shared memory (nccl#879).
    ids = {r: d.variables["NCCL_HOSTID"] for r, d in seen.by_rank.items() if "NCCL_HOSTID" in d.variables}
    if ids:
        yield seen.finding(
            "host-id",
            "NCCL_HOSTID is set",
            f"NCCL_HOSTID is set on {ranks_text(tuple(ids))}, unset expected: ranks of one host with different values "
            "talk over the network, not over NVLink, PCIe or shared memory.",
            ranks=tuple(ids),
            fix="Unset NCCL_HOSTID.",
        )


def _debug_levels(seen: Seen[Data]) -> Iterator[Finding]:
    levels = {rank: data.variables.get("TORCH_DISTRIBUTED_DEBUG", "") for rank, data in seen.by_rank.items()}
    for level in sorted(set(levels.values())):
        # torch upper-cases the value before it compares.
        if level and level.upper() not in DEBUG_LEVELS:
            ranks = tuple(rank for rank, own in levels.items() if own == level)
            yield seen.finding(
                "debug-level",
                "TORCH_DISTRIBUTED_DEBUG has a value that torch refuses",
                f"TORCH_DISTRIBUTED_DEBUG={level!r} on {ranks_text(ranks)}; OFF, INFO or DETAIL expected, "
                "`import torch.distributed` fails with anything else.",
                ranks=ranks,
                fix="Set TORCH_DISTRIBUTED_DEBUG to OFF, INFO or DETAIL, or unset it.",
            )


def runs_with(seen: Seen[Data]) -> Iterator[Setting]:
    """Every name that some rank has, but for those that tell ranks apart on purpose: variables, then lines of files."""
    rows = seen.by_rank
    yield from _all("variable", {rank: own.variables for rank, own in rows.items()})
    yield from _all("file", {rank: settings(own) for rank, own in rows.items()})


def _all(kind: str, rows: Mapping[int, Mapping[str, str]]) -> Iterator[Setting]:
    for name in sorted({name for own in rows.values() for name in own} - OWN):
        yield from setting(kind, name, {rank: own.get(name) for rank, own in rows.items()})


CHECK = Check(
    "LCH002",
    "variables",
    Stage.LAUNCH,
    Scope.RANK,
    manual=__doc__ or "",
    findings=FINDINGS,
    measure=measure,
    judge=judge,
    data=Data,
    runs_with=runs_with,
)
