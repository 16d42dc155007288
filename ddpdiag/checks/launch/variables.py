"""Variables and NCCL configuration files, which should be the same on every rank.

Ranks whose NCCL_*, TORCH_* or GLOO_* variables differ may choose different algorithms, networks or time-outs: they
hang, crash, or run as slowly as the slowest of them. NCCL also reads ~/.nccl.conf (or $NCCL_CONF_FILE) and
/etc/nccl.conf, where an old workaround is easily forgotten. A name that neither NCCL nor torch knows is ignored without
a message; the names that they know are constants in their libraries. Only names on an allow-list are recorded, and
none that might hold a secret.

Findings:

Causes: a shell start-up file of one host, `mpirun` without `-x`, a container image that contains settings. Fix: set
variables in the job script and let the launcher pass them on; compare the files of the named hosts.

Confirm by hand: On each host, inside the job, `env | grep -E '^(NCCL|TORCH|GLOO|CUDA)' | sort`, and `cat
~/.nccl.conf /etc/nccl.conf`; diff the results. `strings -n 5 libnccl.so.2 | grep NAME` shows whether NCCL reads NAME.

Sources: NCCL user guide, environment variables (docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html);
torch/csrc/distributed/c10d/debug.cpp (the values of TORCH_DISTRIBUTED_DEBUG); NCCL's src/misc/utils.cc (NCCL_HOSTID).
"""

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from ddpdiag.checks.api import Check, Scope, Seen, Stage
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.hosts import names_text, odd_text, ranks_text
from ddpdiag.checks.odd import odd_finding
from ddpdiag.model import Finding
from ddpdiag.model.trial import Context
from ddpdiag.probes.host.environment import nccl_files, recorded_variables
from ddpdiag.probes.host.library_names import unread_variables
from ddpdiag.stats import find_odd_ranks
from ddpdiag.text import count

FINDINGS = {
    "variable": FindingSpec.warning("a variable differs between ranks."),
    "process-group": FindingSpec.warning(
        "ranks open different classes of process groups for NCCL (TORCH_DIST_USE_NCCL2). With torch 2.15 and newer "
        "they hang then, since the two exchange different keys; older ones have one class only."
    ),
    "file": FindingSpec.warning("a setting in one of NCCL's configuration files differs between hosts."),
    "host-id": FindingSpec.warning(
        "NCCL_HOSTID is set: NCCL treats ranks of one host that have different values as ranks of different hosts, and "
        "uses neither P2P nor shared memory between them."
    ),
    "set": FindingSpec.note("NCCL's choices are replaced by variables or lines of files that all ranks have."),
    "unread": FindingSpec.warning(
        "a variable has no effect, because its name is in none of the libraries that the job loads (libnccl, its "
        "plugins, libtorch): it is misspelt, or this version no longer has it. The nearest existing name is given."
    ),
    "ignored-fault": FindingSpec.warning(
        "a variable NCCL_IGNORE_* makes NCCL continue after a fault that it would report; jobs then hang or are slow."
    ),
    "debug-level": FindingSpec.error("TORCH_DISTRIBUTED_DEBUG has a value that `import torch` refuses."),
}

# Variables that differ between ranks on purpose, or that other code checks: LCH001 sizes, `judge` NCCL_HOSTID.
RANK_SPECIFIC = frozenset(
    {
        "RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
        "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "NCCL_HOSTID",
        "NCCL_DEBUG_FILE", "NCCL_TOPO_DUMP_FILE", "NCCL_GRAPH_DUMP_FILE",
        "TORCHELASTIC_ERROR_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE",
    }
)  # fmt: skip
# Prefixes of NCCL variables that change no choice of NCCL: these variables only turn on output, or name a file.
OBSERVING_PREFIXES = ("NCCL_DEBUG", "NCCL_RAS", "NCCL_TOPO_DUMP", "NCCL_GRAPH_DUMP", "NCCL_PROFILER", "NCCL_CONF_FILE")
# No job sets so many variables. In a damaged recording with more names only the first ones are compared.
_MAX_NAMES = 4_096
# The variable that selects the class of NCCL process groups (torch/distributed/distributed_c10d.py): "0" selects the
# older class, any other value the newer one.
GROUP_CLASS_VARIABLE, OLDER_CLASS = "TORCH_DIST_USE_NCCL2", "0"
# The values that torch accepts while it is imported; any other value makes the import fail.
DEBUG_LEVELS = ("OFF", "INFO", "DETAIL")

# For each finding the expectation and the fix, with fields for the file, the name, and the commands to set or unset it.
_TEXTS = {
    "variable": (
        "Ranks with different values may hang, crash or be slow, so every rank needs the same value.",
        "Set the variable once in the job script, for all ranks: {export}. Or remove it everywhere: {unset}. If one "
        "host still differs, look in its shell start-up files (`grep -r {name} ~/.bashrc /etc/profile.d`).",
    ),
    "file": (
        "NCCL reads this file on each host, so it must be the same everywhere.",
        "Make {path} the same on every host, or remove it. Or set the variable in the job script, for all ranks; it "
        "overrides the file: {export}.",
    ),
    "process-group": (
        "With torch 2.15 or newer the value 0 selects another class of NCCL process group. Ranks of different classes "
        "wait for each other forever when the group is created.",
        "Run {unset} in the job script before the launcher, on every host. Or give every rank the same value.",
    ),
}


# Variables that hide a fault, unless they are "0", with the consequence and the fix. NCCL_IGNORE_CPU_AFFINITY is not
# among them: it only changes on which cores NCCL's threads run. Sources: NCCL's src/init.cc and src/graph/paths.cc.
HIDDEN_FAULTS = {
    "NCCL_IGNORE_NET_MISMATCH": (
        "If one rank has fewer usable network adapters than another, NCCL starts, and the first collective hangs "
        "(NCCL issue 2428)",
        "Make the same adapters usable on every host (`ibv_devinfo` inside the job), or list the common ones in "
        "NCCL_IB_HCA; then `export NCCL_IGNORE_NET_MISMATCH=0`.",
    ),
    "NCCL_IGNORE_DISABLED_P2P": (
        "If the driver has disabled P2P between GPUs that NVLink connects, which mostly is a hardware fault, NCCL "
        "starts without P2P, or with the value 2 over the faulty path",
        "Run `nvidia-smi topo -p2p r` and have the GPUs repaired that it does not show as OK; then `unset "
        "NCCL_IGNORE_DISABLED_P2P`.",
    ),
}


class Data(Struct, frozen=True, omit_defaults=True):
    """The environment variables of a rank, by name, and the variables that NCCL's configuration files set, by path.

    `unread` has the variables that no library of the job reads, each with the nearest name that one reads, or "".
    """

    variables: dict[str, str]
    files: dict[str, dict[str, str]]
    unread: dict[str, str] = {}


def measure(ctx: Context) -> Data:
    variables, files = recorded_variables(os.environ), nccl_files(os.environ)
    names = dict.fromkeys(name for settings in (variables, *files.values()) for name in settings)
    return Data(variables, files, unread_variables(names, os.environ))


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    for kind, settings in _settings_by_kind(seen).items():
        yield from _differences(seen, kind, settings)
    yield from _common_settings(seen)
    # NCCL hashes this id in place of the host's name: with different ids it uses no P2P or shared memory (nccl#879).
    if ranks_with_id := tuple(rank for rank, data in seen.by_rank.items() if "NCCL_HOSTID" in data.variables):
        yield seen.finding(
            "host-id",
            "NCCL_HOSTID is set",
            f"NCCL_HOSTID is set on {ranks_text(ranks_with_id)}. NCCL treats ranks with different values as ranks of "
            "different hosts: even on one host they then use the network instead of NVLink, PCIe or shared memory.",
            ranks=ranks_with_id,
            fix="Remove it from the job script, and run `unset NCCL_HOSTID` before the launcher.",
        )
    yield from _unread_findings(seen)
    yield from _hidden_fault_findings(seen)
    levels = {rank: data.variables.get("TORCH_DISTRIBUTED_DEBUG", "") for rank, data in seen.by_rank.items()}
    # torch accepts upper and lower case.
    for level in sorted(value for value in {*levels.values()} if value and value.upper() not in DEBUG_LEVELS):
        ranks = tuple(rank for rank, value in levels.items() if value == level)
        yield seen.finding(
            "debug-level",
            "torch refuses this value of TORCH_DISTRIBUTED_DEBUG",
            f"TORCH_DISTRIBUTED_DEBUG is {level!r} on {ranks_text(ranks)}. torch accepts only OFF, INFO and DETAIL; "
            "with any other value `import torch.distributed` fails.",
            ranks=ranks,
            fix="Run `unset TORCH_DISTRIBUTED_DEBUG` in the job script, or choose a level: `export "
            "TORCH_DISTRIBUTED_DEBUG=DETAIL`.",
        )


def _settings_by_kind(seen: Seen[Data]) -> dict[str, dict[int, dict[str, str]]]:
    """The settings of each rank by kind, "variable" or "file". The name of a setting in a file is "path: name"."""
    files = {
        rank: {f"{path}: {name}": value for path, settings in data.files.items() for name, value in settings.items()}
        for rank, data in seen.by_rank.items()
    }
    return {"variable": {rank: data.variables for rank, data in seen.by_rank.items()}, "file": files}


def _compared_names(settings: Mapping[int, Mapping[str, str]]) -> list[str]:
    """The sorted names that at least one rank has, without RANK_SPECIFIC; the first _MAX_NAMES of them."""
    return sorted({name for row in settings.values() for name in row} - RANK_SPECIFIC)[:_MAX_NAMES]


def _differences(seen: Seen[Data], kind: str, settings: Mapping[int, Mapping[str, str]]) -> Iterator[Finding]:
    """One finding for each name whose values differ between ranks. `kind` is "variable" or "file"."""
    for name in _compared_names(settings):
        word, values = kind, {rank: row.get(name) for rank, row in settings.items()}
        if name == GROUP_CLASS_VARIABLE:
            word = "process-group"
            values = {rank: OLDER_CLASS if value == OLDER_CLASS else "not 0" for rank, value in values.items()}
        odd = find_odd_ranks(values)
        if odd is None:
            continue
        path, _, variable = name.rpartition(": ")
        quoted = shlex.quote(variable)
        value = odd.majority if isinstance(odd.majority, str) and shlex.quote(odd.majority) == odd.majority else "VALUE"
        expectation, fix = _TEXTS[word]
        subject = f"{variable} in {path}" if path else variable
        yield odd_finding(
            seen,
            word,
            odd,
            f"{subject} differs between ranks",
            f"{subject} is {odd_text(odd, missing='unset')}. {expectation}",
            fix=fix.format(path=path, export=f"`export {quoted}={value}`", unset=f"`unset {quoted}`", name=quoted),
        )


def _common_settings(seen: Seen[Data]) -> Iterator[Finding]:
    """The finding that lists the settings that all ranks share and that change NCCL's choices; none over gloo."""
    common = []
    unread = {name for data in seen.by_rank.values() for name in data.unread}
    for settings in _settings_by_kind(seen).values():
        for name in _compared_names(settings):
            path, _, variable = name.rpartition(": ")
            values = {row.get(name) for row in settings.values()}
            is_read = variable.startswith("NCCL_") and variable not in unread
            if is_read and not variable.startswith(OBSERVING_PREFIXES) and len(values) == 1:
                common.append(f"{variable}={values.pop()}{f' in {path}' if path else ''}")
    if common and seen.world.backend != "gloo":
        yield seen.finding(
            "set",
            f"{count(len(common), 'setting')} of NCCL {'replaces' if len(common) == 1 else 'replace'} its own choice",
            f"All ranks have {', '.join(common)}.",
            fix="Keep what this cluster needs, such as NCCL_SOCKET_IFNAME and NCCL_IB_HCA, and remove the rest. To see "
            "what a setting costs, compare `ddpdiag allreduce-bench` with and without it.",
        )


def _unread_findings(seen: Seen[Data]) -> Iterator[Finding]:
    """One finding for each set of ranks, with the variables that have no effect there."""
    ranks_by_name: dict[str, tuple[int, ...]] = {}
    for rank, data in seen.by_rank.items():
        for name in data.unread:
            ranks_by_name[name] = (*ranks_by_name.get(name, ()), rank)
    nearest = {name: near for data in seen.by_rank.values() for name, near in data.unread.items()}
    for ranks in dict.fromkeys(ranks_by_name.values()):
        names = sorted(name for name in ranks_by_name if ranks_by_name[name] == ranks)
        subjects = [f"{name} (nearest: {nearest[name]})" if nearest[name] else name for name in names]
        similar = [nearest[name] for name in names if nearest[name]]
        is_one = len(names) == 1
        yield seen.finding(
            "unread",
            f"{names_text(names)} {'has' if is_one else 'have'} no effect",
            f"{names_text(subjects)} {'is' if is_one else 'are'} set on {ranks_text(ranks)}. Neither NCCL nor torch "
            f"contains {'this name' if is_one else 'these names'}, so they ignore the value.",
            ranks=_odd(seen, ranks),
            is_about_run=not _odd(seen, ranks),
            evidence={"variables": [*names], "nearest": [*similar]},
            fix=f"Run `unset {' '.join(map(shlex.quote, names))}` in the job script before the launcher, or remove the "
            "line from NCCL's configuration file"
            f"{f'; set {names_text(similar)} if that was meant' if similar else ''}.",
        )


def _hidden_fault_findings(seen: Seen[Data]) -> Iterator[Finding]:
    """One finding for each variable that makes NCCL continue after a fault."""
    for name, (consequence, fix) in HIDDEN_FAULTS.items():
        values = {
            rank: value.strip()
            for rank, data in seen.by_rank.items()
            for settings in (*data.files.values(), data.variables)
            if (value := settings.get(name)) is not None
        }
        if ranks := tuple(rank for rank, value in values.items() if value not in ("", "0")):
            yield seen.finding(
                "ignored-fault",
                f"{name} hides a fault",
                f"{name}={values[ranks[0]]} is set on {ranks_text(ranks)}. {consequence}.",
                ranks=_odd(seen, ranks),
                is_about_run=not _odd(seen, ranks),
                fix=fix,
            )


def _odd(seen: Seen[Data], ranks: Sequence[int]) -> Sequence[int]:
    """The ranks to blame: none if all ranks have the variable, since the job sets it then."""
    return ranks if len(ranks) < len(seen.by_rank) else ()


CHECK: Check[Data] = Check(__name__, "LCH002", "variables", Stage.LAUNCH, Scope.RANK)
