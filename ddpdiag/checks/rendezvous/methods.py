"""Rendezvous over tcp, env and file.

Before any collective the processes must find each other. With `tcp://` they use a TCP store at an address that the
script names. With `env://`, which most scripts use, the launcher's variables give the address; under torchrun it is
that of the agent's store. With `file://` they use a file that all ranks can see. Each method is tested alone: the group
is opened, passes one barrier and is closed. The table of ranks shows the seconds from rank 0's start to each join.

Findings:

Causes of failure: a name that resolves to another address on some host, a firewall that lets only some ports through, a
port that another job holds, a directory that is not shared or has no locks, a rank that never joined.

A method that is known not to work is not tested, and another finding gives the reason: RDZ005 for env:// if MASTER_PORT
cannot be used, RDZ006 for file:// if the shared directory cannot be used.

Fix: the method that works is named; use it, or repair the one that the job needs.

Confirm by hand: With two shells, `RANK=0 WORLD_SIZE=2 MASTER_ADDR=HOST MASTER_PORT=29500 python -c 'import
torch.distributed as d; d.init_process_group("gloo"); d.barrier()'`, and the same with RANK=1 on the other host.

Sources: torch/distributed/rendezvous.py; torch.distributed documentation, initialization
(docs.pytorch.org/docs/stable/distributed.html).
"""

import os
from collections.abc import Iterator, Sequence

from msgspec import Struct

from ddpdiag.checks.api import Check, Contribution, Scope, Seen, Stage, new_trial
from ddpdiag.checks.blame import find_blame, is_unfinished
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.known_errors import known_error
from ddpdiag.checks.rendezvous import master_port, shared_dir
from ddpdiag.model import Finding, Kind, Severity, Status, Trial
from ddpdiag.model.trial import Context
from ddpdiag.probes.host.shared_files import unusable_url_character

FINDINGS = {
    "method": FindingSpec("this method fails, and another one works."),
    "untested": FindingSpec.note(
        "file:// was not tried: no directory is known that all hosts share, or its name is unfit for a URL."
    ),
    "stale": FindingSpec.warning(
        "another process has opened a process group in torchrun's store before; the job would read its addresses."
    ),
}

METHODS = ("tcp", "env", "file")
# The steps that repair each method, and the call of init_process_group that uses it. `host` is rank 0's host.
_FIXES = {
    "tcp": "As root open TCP ports {ports} for the other hosts in the firewall of {host}, rank 0's host (`nft list "
    "ruleset` shows its rules).",
    "env": "Run `env | grep -E 'MASTER|RANK|WORLD_SIZE'` in every process. MASTER_ADDR, MASTER_PORT and WORLD_SIZE "
    "must be the same everywhere, and RANK different in each.",
    "file": "Give a directory that all hosts share and that has locks: `--shared-dir DIRECTORY`.",
}
_CALLS = {
    "tcp": '`init_process_group(init_method="tcp://{host}:29500", rank=RANK, world_size=WORLD_SIZE)`',
    "env": "`init_process_group()` uses it unless init_method or store is given",
    "file": '`init_process_group(init_method="file:///SHARED_DIRECTORY/FILE", rank=RANK, world_size=WORLD_SIZE)`',
}
# The variable with the last part of the name of the run's folder in the shared directory.
RUN_NONCE = "DDPDIAG_RUN_NONCE"


class Data(Struct, frozen=True):
    """The result of one method on one rank: the seconds from the barrier until the group was ready. `stale_keys` are
    keys that another process had left in the store of torchrun's agent."""

    method: str
    seconds: float
    stale_keys: tuple[str, ...] = ()


def measure(ctx: Context) -> Data:
    """Open a process group by the trial's method, and measure the time until it is ready."""
    from ddpdiag.workloads.group import try_rendezvous

    method = str(ctx.trial.params["method"])
    opened = try_rendezvous(ctx, method, str(ctx.trial.params["backend"]), os.environ.get(RUN_NONCE, ""))
    return Data(method, opened.seconds, stale_keys=opened.stale_keys)


def plan(seen: Seen[Data]) -> Sequence[Trial]:
    """Plan one method after the other, `repeat` times each. After two failures in a row no more methods are tested."""
    methods = _methods_to_test(seen)
    repeat = int(seen.setting("repeat"))
    trial_count = len(seen.trials)
    if trial_count >= len(methods) * repeat or (trial_count >= 2 and not any(map(seen.succeeded, seen.trials[-2:]))):
        return ()
    method = methods[trial_count // repeat]
    params: dict[str, str | bool] = {"method": method, "backend": "gloo"}
    if method == "env":
        params["agent_store"] = any(arrival.agent_store for arrival in seen.world.arrivals.values())
    # The file of a killed worker is removed at the end, with the run's folder in the shared directory.
    uses_shared_dir = method == "file" and seen.options.shared_dir
    env = {RUN_NONCE: seen.world.arrivals[0].nonce} if uses_shared_dir else {}
    return (new_trial(seen, params=params, env=env),)


def _methods_to_test(seen: Seen[Data]) -> tuple[str, ...]:
    """The methods that are not known to fail. On a single host file:// needs no shared directory."""
    directory = seen.options.shared_dir
    is_file_possible = len(seen.world.hosts) == 1
    if directory:
        is_file_possible = shared_dir.is_usable(seen.of(shared_dir.CHECK)) and not unusable_url_character(directory)
    is_possible = {"tcp": True, "env": master_port.is_usable(seen.of(master_port.CHECK)), "file": is_file_possible}
    return tuple(method for method in METHODS if is_possible[method])


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    """Findings on old keys in the store, on a file:// that was not tested, and on methods that fail while another one
    works. RUN003 names the ranks that failed."""
    successes = {str(t.params["method"]): seen.succeeded(t) for t in seen.trials if not _is_inconclusive(seen, t)}
    if stale_keys := [key for row in seen.rows for key in row.data.stale_keys]:
        yield seen.finding(
            "stale",
            "torchrun's store holds the keys of an earlier process",
            f"The store of torchrun's agent holds keys of a process group that another process of this attempt opened: "
            f"{', '.join(dict.fromkeys(stale_keys))}. torch gives the next group the same keys, so the job reads the "
            "addresses of processes that are gone, and fails with 'Connection refused'.",
            fix="Run one training process per torchrun: do not start a script twice in the command that torchrun runs. "
            "ddpdiag uses keys of its own and removes them.",
        )
    reason, directory = "", seen.options.shared_dir
    if (unfit := unusable_url_character(directory or "")) is not None:
        reason = f"the name of the shared directory {directory!r} has {unfit!r}, which torch cannot use in a URL"
    elif seen.trials and "file" not in successes and len(seen.world.hosts) > 1 and not directory:
        reason = "on several hosts it needs a directory that all of them share, and none was given"
    if reason:
        yield seen.finding(
            "untested",
            "file:// was not tested",
            f"The rendezvous over file:// was not tested: {reason}.",
            fix="Nothing to do unless the job uses file://. Then name a directory: `--shared-dir DIRECTORY`.",
        )
    failed = [method for method, succeeded in successes.items() if not succeeded]
    working = [method for method, succeeded in successes.items() if succeeded]
    if failed and working:
        is_harmless = all(seen.is_harmless(trial) for trial in seen.trials if trial.params["method"] in failed)
        is_gloo_only = all(map(seen.is_harmless, seen.trials))
        remark = f" This was tested over gloo; {seen.world.backend}, which the job uses, works." if is_gloo_only else ""
        cause = _failure_cause(seen, failed[0])
        yield seen.finding(
            "method",
            f"the rendezvous over {failed[0]}:// fails",
            f"The rendezvous over {', '.join(failed)} fails, although it works over {', '.join(working)}: "
            f"{cause}.{remark}",
            severity=Severity.WARNING if is_harmless else Severity.ERROR,
            evidence={"works": list(working), "fails": list(failed)},
            fix=f"{_FIXES[failed[0]]} Or start the job over {working[0]}://: {_CALLS[working[0]]}.".format(
                host=seen.world.host_name(0), ports=seen.options.port_range or "32768-60999"
            ),
            known_error=known_error(cause),
        )


def _is_inconclusive(seen: Seen[Data], trial: Trial) -> bool:
    """Whether the trial cannot show that its method works: a rank was lost (RUN002), or was still making progress at
    the deadline (RUN004)."""
    outcomes = [o for o in seen.outcomes if o.trial == trial.number]
    blame = find_blame(outcomes)
    is_lost = any(o.status is Status.UNHEARD for o in outcomes)
    return is_lost or (blame is not None and is_unfinished(trial, blame, outcomes))


def _failure_cause(seen: Seen[Data], method: str) -> str:
    """The first line of the error of a blamed rank (of any rank if none is blamed); else a clause that time ran out."""
    numbers = {t.number for t in seen.trials if t.params["method"] == method}
    outcomes = [o for o in seen.outcomes if o.trial in numbers]
    blame = find_blame(outcomes)
    errors = [o.error for o in outcomes if o.error and (blame is None or not blame.ranks or o.rank in blame.ranks)]
    deadline = max(t.deadline_seconds for t in seen.trials if t.number in numbers)
    return errors[0].splitlines()[0] if errors else f"it had not finished after {deadline:.0f} s"


def report(seen: Seen[Data]) -> Contribution:
    """Contribute to the report the seconds of each method (those of the slowest rank, in the method's fastest trial),
    and a column with the seconds from rank 0's start until each rank joined, which shows late hosts."""
    slowest: dict[str, list[float]] = {}
    for trial in seen.trials:
        if seconds := [row.data.seconds for row in seen.rows if row.trial is trial]:
            slowest.setdefault(str(trial.params["method"]), []).append(max(seconds))
    return Contribution(
        columns={rank: {"arrival_seconds": arrival.seconds} for rank, arrival in seen.world.arrivals.items()},
        figures={f"rendezvous.{method}_seconds": min(values) for method, values in slowest.items()},
    )


SETTINGS = {"repeat": 1}
CHECK: Check[Data] = Check(__name__, "RDZ001", "rendezvous", Stage.RENDEZVOUS, Scope.WORLD, Kind.TORCH, deadline=10)
