"""Rendezvous over tcp, env and file.

Before any collective the processes must find each other: through a TCP store on a given address (`tcp://`), through the
variables of the launcher (`env://`, what most scripts use, and under torchrun the agent's own store) or through a file
that all can see (`file://`). Each is tried alone: the group is opened, passes one barrier and is closed.
The table of ranks shows when each of them joined, counted from rank 0's own start.

Findings:

Causes of failure: a name that resolves to another address on some host, a firewall that lets only some ports through, a
port that another job holds, a directory that is not shared or has no locks, a rank that never joined.

A method that is known not to work is not tried; another finding gives the reason: env:// if RDZ005 found that
MASTER_PORT cannot be used, file:// if RDZ006 found the same of the shared directory.

Fix: the method that works is named; use it, or repair the one that the job needs.

Confirm by hand: With two shells, `RANK=0 WORLD_SIZE=2 MASTER_ADDR=HOST MASTER_PORT=29500 python -c 'import
torch.distributed as d; d.init_process_group("gloo"); d.barrier()'`, and the same with RANK=1 on the other host.

Sources: torch/distributed/rendezvous.py; torch.distributed documentation, initialization
(docs.pytorch.org/docs/stable/distributed.html).
"""

import os
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from ddpdiag.checks.api import Check, Contribution, Scope, Seen, Stage, new_trial
from ddpdiag.checks.blame import blamed, unfinished
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.known_errors import known_error
from ddpdiag.checks.rendezvous import master_port, shared_dir
from ddpdiag.model import Finding, Kind, Scalar, Severity, Status, Trial
from ddpdiag.model.trial import Context
from ddpdiag.probes.host.shared_files import unfit_for_url

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
# The variable that holds the end of the name of the run's folder in the shared directory.
RUN_NONCE = "DDPDIAG_RUN_NONCE"


class Data(Struct, frozen=True):
    """Seconds from the barrier until the group was ready on this rank.

    `stale` are keys that another process had left in the store of torchrun's agent.
    """

    method: str
    seconds: float
    stale: tuple[str, ...] = ()


def measure(ctx: Context) -> Data:
    """Open a group by the trial's method, and time it."""
    from ddpdiag.workloads.group import try_rendezvous

    method = str(ctx.trial.params["method"])
    opened = try_rendezvous(ctx, method, str(ctx.trial.params["backend"]), os.environ.get(RUN_NONCE, ""))
    return Data(method, opened.seconds, stale=opened.stale_keys)


def plan(seen: Seen[Data]) -> Sequence[Trial]:
    """One method after the other, `repeat` times each; two failures in a row are enough."""
    methods = _methods(seen)
    repeat = int(seen.number("repeat"))
    done = len(seen.trials)
    if done >= len(methods) * repeat or (done >= 2 and not any(map(seen.succeeded, seen.trials[-2:]))):
        return ()
    agent = any(arrival.agent_store for arrival in seen.world.arrivals.values())
    method = methods[done // repeat]
    params: dict[str, str | bool] = {"method": method, "backend": "gloo"}
    if method == "env":
        params["agent_store"] = agent
    # Files that a killed worker leaves in the run's own folder are removed with that folder.
    shared = method == "file" and seen.options.shared_dir
    env = {RUN_NONCE: seen.world.arrivals[0].nonce} if shared else {}
    return (new_trial(seen, params=params, env=env),)


def _methods(seen: Seen[Data]) -> tuple[str, ...]:
    """The methods that are not known to fail. On one host file:// needs no shared directory."""
    excluded = set()
    if not master_port.usable(seen.of(master_port.CHECK)):
        excluded.add("env")
    shared = seen.options.shared_dir
    if (len(seen.world.hosts) > 1 and not shared) or (shared and not shared_dir.usable(seen.of(shared_dir.CHECK))):
        excluded.add("file")
    if shared and unfit_for_url(shared):
        excluded.add("file")
    return tuple(method for method in METHODS if method not in excluded)


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    """Findings on methods that fail while another one works, untested ones, and old keys. RUN003 names the ranks."""
    # If a rank was lost (RUN002) or only needed more time (RUN004), the method is not to blame.
    tried = {str(t.params["method"]): seen.succeeded(t) for t in seen.trials if not _is_open(seen, t)}
    if stale := [key for row in seen.rows for key in row.data.stale]:
        yield seen.finding(
            "stale",
            "torchrun's store holds the keys of an earlier process",
            f"The store of torchrun's agent holds keys of a process group that another process of this attempt opened: "
            f"{', '.join(dict.fromkeys(stale))}. torch gives the next group the same keys, so the job reads the "
            "addresses of processes that are gone, and fails with 'Connection refused'.",
            fix="Run one training process per torchrun: do not start a script twice in the command that torchrun runs. "
            "ddpdiag uses keys of its own and removes them.",
        )
    untested = ""
    if (unfit := unfit_for_url(seen.options.shared_dir or "")) is not None:
        name = seen.options.shared_dir
        untested = f"the name of the shared directory {name!r} has {unfit!r}, which torch cannot use in a URL"
    elif seen.trials and "file" not in tried and len(seen.world.hosts) > 1 and not seen.options.shared_dir:
        untested = "on several hosts it needs a directory that all of them share, and none was given"
    if untested:
        yield seen.finding(
            "untested",
            "file:// was not tested",
            f"The rendezvous over file:// was not tested: {untested}.",
            fix="Nothing to do unless the job uses file://. Then name a directory: `--shared-dir DIRECTORY`.",
        )
    failed = [method for method, succeeded in tried.items() if not succeeded]
    works = [method for method, succeeded in tried.items() if succeeded]
    if failed and works:
        failed_trials = [trial for trial in seen.trials if trial.params["method"] in failed]
        excused = all(map(seen.is_harmless, failed_trials))
        is_gloo_beside = all(map(seen.is_harmless, seen.trials))
        note = f" This was tested over gloo; {seen.world.backend}, which the job uses, works." if is_gloo_beside else ""
        cause = _reason(seen, failed[0])
        yield seen.finding(
            "method",
            f"the rendezvous over {failed[0]}:// fails",
            f"The rendezvous over {', '.join(failed)} fails, although it works over {', '.join(works)}: {cause}.{note}",
            severity=Severity.WARNING if excused else Severity.ERROR,
            evidence={"works": list(works), "fails": list(failed)},
            fix=f"{_repair(seen, failed[0])} Or start the job over {works[0]}://: {_start(seen, works[0])}.",
            known=known_error(cause),
        )


def _is_open(seen: Seen[Data], trial: Trial) -> bool:
    """Whether the trial does not show if its method works: a rank was lost, or still made progress at its deadline."""
    outcomes = [o for o in seen.outcomes if o.trial == trial.number]
    blame = blamed(outcomes)
    is_lost = any(o.status is Status.UNHEARD for o in outcomes)
    return is_lost or (blame is not None and unfinished(trial, blame, outcomes))


def _reason(seen: Seen[Data], method: str) -> str:
    numbers = {t.number for t in seen.trials if t.params["method"] == method}
    outcomes = [o for o in seen.outcomes if o.trial in numbers]
    blame = blamed(outcomes)
    errors = [o.error for o in outcomes if o.error and (blame is None or not blame.ranks or o.rank in blame.ranks)]
    deadline = max(t.deadline_seconds for t in seen.trials if t.number in numbers)
    return errors[0].splitlines()[0] if errors else f"it had not finished after {deadline:.0f} s"


def _repair(seen: Seen[Data], method: str) -> str:
    """The fix for a method that fails."""
    match method:
        case "env":
            return (
                "Run `env | grep -E 'MASTER|RANK|WORLD_SIZE'` in every process. MASTER_ADDR, MASTER_PORT and "
                "WORLD_SIZE must be the same everywhere, and RANK different in each."
            )
        case "tcp":
            return (
                f"As root open TCP ports {seen.options.port_range or '32768-60999'} for the other hosts in the "
                f"firewall of {seen.world.host_of(0)}, rank 0's host (`nft list ruleset` shows its rules)."
            )
    return "Give a directory that all hosts share and that has locks: `--shared-dir DIRECTORY`."


def _start(seen: Seen[Data], method: str) -> str:
    """The command that starts a job with a method that works."""
    match method:
        case "env":
            return "`init_process_group()` uses it unless init_method or store is given"
        case "tcp":
            arguments = f'init_method="tcp://{seen.world.host_of(0)}:29500"'
        case _:
            arguments = 'init_method="file:///SHARED_DIRECTORY/FILE"'
    return f"`init_process_group({arguments}, rank=RANK, world_size=WORLD_SIZE)`"


def figures(seen: Seen[Data]) -> Mapping[str, Scalar]:
    """Seconds of the slowest rank in the fastest trial of each method."""
    seconds: dict[str, list[float]] = {}
    for trial in seen.trials:
        seconds_of_ranks = [row.data.seconds for row in seen.rows if row.trial is trial]
        if seconds_of_ranks:
            seconds.setdefault(str(trial.params["method"]), []).append(max(seconds_of_ranks))
    return {f"rendezvous.{method}_seconds": min(values) for method, values in seconds.items()}


def columns(seen: Seen[Data]) -> Mapping[int, Mapping[str, Scalar]]:
    """The column with the seconds after which each rank joined, since rank 0 began to wait: it shows late hosts."""
    return {rank: {"arrival_seconds": arrival.seconds} for rank, arrival in seen.world.arrivals.items()}


def report(seen: Seen[Data]) -> Contribution:
    """All that the check adds to the report."""
    return Contribution(columns=columns(seen), figures=figures(seen))


SETTINGS = {"repeat": 1}
CHECK: Check[Data] = Check(__name__, "RDZ001", "rendezvous", Stage.RENDEZVOUS, Scope.WORLD, Kind.TORCH, deadline=10)
