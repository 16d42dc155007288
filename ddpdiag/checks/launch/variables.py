"""Variables and NCCL configuration files, which should be the same on every rank.

Ranks whose NCCL_*, TORCH_* or GLOO_* variables differ may choose different algorithms, networks or time-outs: they
hang, crash, or run as slowly as the slowest of them. NCCL also reads ~/.nccl.conf (or $NCCL_CONF_FILE) and
/etc/nccl.conf, where an old workaround is easily forgotten. Only names on an allow-list are recorded, and none that
might hold a secret.

TORCH_DIST_USE_NCCL2=0 selects the older of the two classes of process groups that torch has for NCCL since 2.15. The
two exchange different keys while a group is opened, so ranks with different values wait for each other forever.

Findings:

Causes: a shell start-up file of one host, `mpirun` without `-x`, a container image that contains settings. Fix: set
variables in the job script and let the launcher pass them on; compare the files of the named hosts.

Confirm by hand: On each host, inside the job, `env | grep -E '^(NCCL|TORCH|GLOO|CUDA)' | sort`, and `cat
~/.nccl.conf /etc/nccl.conf`; diff the results.

Sources: NCCL user guide, environment variables (docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html);
torch/csrc/distributed/c10d/debug.cpp (the values of TORCH_DISTRIBUTED_DEBUG); NCCL's src/misc/utils.cc (NCCL_HOSTID).
"""

import os
from collections.abc import Iterator, Mapping
from itertools import islice

from msgspec import Struct

from ddpdiag.checks.api import Check, Scope, Seen, Stage
from ddpdiag.checks.findings import Explained
from ddpdiag.checks.hosts import odd_text, ranks_text
from ddpdiag.model import Finding
from ddpdiag.model.report import Setting, Value
from ddpdiag.model.trial import Context
from ddpdiag.probes.host.environment import nccl_files, recorded_variables
from ddpdiag.stats import odd_ones_out

FINDINGS = {
    "variable": Explained.warning("a variable differs between ranks."),
    "process-group": Explained.warning(
        "ranks open different classes of process groups for NCCL. With torch 2.15 and newer they hang then; older ones "
        "have one class only."
    ),
    "file": Explained.warning("a setting in one of NCCL's configuration files differs between hosts."),
    "host-id": Explained.warning(
        "NCCL_HOSTID is set: NCCL treats ranks of one host that have different values as ranks of different hosts, and "
        "uses neither P2P nor shared memory between them."
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
# Values of one setting, and ranks of one value, that are listed: more are counted only.
MOST_VALUES, MOST_RANKS = 8, 16
# The class of the process group (torch/distributed/distributed_c10d.py): "0" is the older one, all else the newer.
NCCL_CLASS, OLDER_CLASS = "TORCH_DIST_USE_NCCL2", "0"
# Read by torch while it is imported; anything else raises there.
DEBUG_LEVELS = ("OFF", "INFO", "DETAIL")


class Data(Struct, frozen=True):
    """Recorded variables by name, and NCCL's configuration files as variables by path."""

    variables: dict[str, str]
    files: dict[str, dict[str, str]]


def measure(ctx: Context) -> Data:
    return Data(recorded_variables(os.environ), nccl_files(os.environ))


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    for kind, rows in _by_kind(seen).items():
        yield from _differences(seen, kind, rows)
    yield from _process_groups(seen)
    # NCCL hashes it in place of the host's name, so ranks with different ids never use P2P or shared memory (nccl#879).
    if ids := tuple(rank for rank, data in seen.by_rank.items() if "NCCL_HOSTID" in data.variables):
        yield seen.finding(
            "host-id",
            "NCCL_HOSTID is set",
            f"NCCL_HOSTID is set on {ranks_text(ids)}, but should be unset: ranks of one host with different "
            "values communicate over the network, not over NVLink, PCIe or shared memory.",
            ranks=ids,
            fix="Unset NCCL_HOSTID.",
        )
    levels = {rank: data.variables.get("TORCH_DISTRIBUTED_DEBUG", "") for rank, data in seen.by_rank.items()}
    # torch upper-cases the value before it compares.
    for level in sorted(own for own in {*levels.values()} if own and own.upper() not in DEBUG_LEVELS):
        ranks = tuple(rank for rank, own in levels.items() if own == level)
        yield seen.finding(
            "debug-level",
            "TORCH_DISTRIBUTED_DEBUG has a value that torch refuses",
            f"TORCH_DISTRIBUTED_DEBUG={level!r} on {ranks_text(ranks)}; OFF, INFO or DETAIL expected. "
            "With any other value `import torch.distributed` fails.",
            ranks=ranks,
            fix="Set TORCH_DISTRIBUTED_DEBUG to OFF, INFO or DETAIL, or unset it.",
        )


def _by_kind(seen: Seen[Data]) -> dict[str, dict[int, dict[str, str]]]:
    """Each rank's variables, then the lines of its configuration files, by path and name."""
    files = {
        rank: {f"{path}: {name}": value for path, own in data.files.items() for name, value in own.items()}
        for rank, data in seen.by_rank.items()
    }
    return {"variable": {rank: data.variables for rank, data in seen.by_rank.items()}, "file": files}


def _names(rows: Mapping[int, Mapping[str, str]]) -> list[str]:
    """Every name that some rank has, but for those that tell ranks apart on purpose."""
    return sorted({name for own in rows.values() for name in own} - OWN)


def _differences(seen: Seen[Data], kind: str, rows: Mapping[int, Mapping[str, str]]) -> Iterator[Finding]:
    for name in _names(rows):
        odd = odd_ones_out({rank: own.get(name) for rank, own in rows.items()})
        if odd is None or name == NCCL_CLASS:
            continue
        yield seen.finding(
            kind,
            f"{name} differs between ranks",
            f"{name}: {odd_text(odd, missing='unset')}; one value on every rank is expected"
            + ("." if odd.ranks else " (no majority, so no rank is blamed)."),
            ranks=odd.ranks,
            evidence={ranks_text(ranks): None if value is None else str(value) for value, ranks in odd.groups.items()},
            fix=f"Set {name} to one value on every rank, in the job script, or unset it everywhere."
            if kind == "variable"
            else "Make the file the same on every host, or remove it.",
        )


def _process_groups(seen: Seen[Data]) -> Iterator[Finding]:
    """Ranks that open another class of process group for NCCL than others."""
    odd = odd_ones_out({rank: data.variables.get(NCCL_CLASS) == OLDER_CLASS for rank, data in seen.by_rank.items()})
    if odd is None:
        return
    older, newer = odd.groups[True], odd.groups[False]
    yield seen.finding(
        "process-group",
        f"{NCCL_CLASS} differs between ranks",
        f"{NCCL_CLASS} is {OLDER_CLASS} on {ranks_text(older)} and unset or another value on {ranks_text(newer)}; one "
        f"value on every rank is expected. With torch 2.15 or newer, ranks with {OLDER_CLASS} open an older class of "
        "process group for NCCL than the other ranks, and all of them hang while the group is opened.",
        ranks=odd.ranks,
        evidence={ranks_text(older): OLDER_CLASS, ranks_text(newer): None},
        fix=f"Set {NCCL_CLASS} to one value on every rank, in the job script, or unset it everywhere.",
    )


def runs_with(seen: Seen[Data]) -> Iterator[Setting]:
    """Variables, then lines of files."""
    for kind, rows in _by_kind(seen).items():
        for name in _names(rows):
            yield from setting(kind, name, {rank: own.get(name) for rank, own in rows.items()})


def setting(kind: str, name: str, values: Mapping[int, str | None]) -> Iterator[Setting]:
    """The setting with its most frequent value first; nothing where no rank has it."""
    ranks: dict[str | None, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    if ranks.keys() <= {None}:
        return
    groups = sorted(ranks.items(), key=lambda group: (-len(group[1]), group[0] or ""))
    shown = tuple(
        Value(value=value, count=len(own), ranks=tuple(islice(sorted(own), MOST_RANKS)))
        for value, own in groups[:MOST_VALUES]
    )
    yield Setting(kind=kind, name=name, values=shown, more=max(0, len(groups) - MOST_VALUES))


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
