"""Rendezvous over tcp, env and file.

Before any collective the processes must find each other: through a TCP store on a given address (`tcp://`), through the
variables of the launcher (`env://`, what most scripts use, and under torchrun the agent's own store) or through a file
that all can see (`file://`). Each is tried alone, with the group opened, one barrier passed and the group closed.
The table of ranks shows when each of them came, counted from rank 0's own start.

Causes of failure: a name that resolves to another address on some host, a firewall that lets only some ports through, a
port that another job holds, a directory that is not shared or has no locks, a rank that never came.

Fix: the method that works is named; use it, or mend the one that the job needs.
"""

from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from ddpdiag.blame import blamed
from ddpdiag.check import Check, Context, Scope, Seen, Stage, new_trial
from ddpdiag.model import Finding, Kind, Scalar, Severity, Trial
from ddpdiag.world import World

METHODS = ("tcp", "env", "file")


class Data(Struct, frozen=True):
    """Seconds from the gate until the group stood on this rank."""

    method: str
    seconds: float


def measure(ctx: Context) -> Data:
    """Meet once."""
    from ddpdiag.workloads.rendezvous import meet

    method = str(ctx.trial.params["method"])
    return Data(method, meet(ctx, method, str(ctx.trial.params["backend"])))


def plan(seen: Seen[Data]) -> Sequence[Trial]:
    """One method after the other, `repeat` times each; two failures in a row say enough."""
    methods = _methods(seen.world)
    repeat = int(seen.number("repeat"))
    done = len(seen.trials)
    if done >= len(methods) * repeat or (done >= 2 and not any(map(seen.went_well, seen.trials[-2:]))):
        return ()
    agent = any(arrival.agent_store for arrival in seen.world.arrivals.values())
    method = methods[done // repeat]
    params: dict[str, str | bool] = {"method": method, "backend": "gloo"}
    return (new_trial(seen, params=params | ({"agent_store": agent} if method == "env" else {})),)


def _methods(world: World) -> tuple[str, ...]:
    """A file on one host needs no shared directory."""
    return METHODS if len(world.hosts) == 1 or world.options.shared_dir else METHODS[:2]


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    """Failed methods beside one that works are this check's finding; who failed is RUN003's."""
    tried = {str(t.params["method"]): seen.went_well(t) for t in seen.trials}
    if seen.trials and "file" not in tried and "file" not in _methods(seen.world):
        yield seen.finding(
            "file",
            Severity.INFO,
            "file:// was not tried",
            "file:// was not tried: on several hosts it needs a directory that all of them share.",
            remedy="Give one with --shared-dir if the job uses file://.",
        )
    failed = [method for method, well in tried.items() if not well]
    works = [method for method, well in tried.items() if well]
    if failed and works:
        excused = all(map(seen.is_excused, seen.trials))
        gloo = f" gloo was used, and {seen.world.backend}, which the job takes, works." if excused else ""
        reason = _reason(seen, failed[0])
        yield seen.finding(
            "method",
            Severity.WARNING if excused else Severity.ERROR,
            f"{failed[0]}:// does not work here",
            f"The ranks met over {', '.join(works)} but not over {', '.join(failed)}: {reason}.{gloo}",
            evidence={"works": list(works), "fails": list(failed)},
            remedy=f"Start the job with init_method {works[0]}://, or mend what {failed[0]}:// needs.",
        )


def _reason(seen: Seen[Data], method: str) -> str:
    numbers = {t.number for t in seen.trials if t.params["method"] == method}
    outcomes = [o for o in seen.outcomes if o.trial in numbers]
    blame = blamed(outcomes)
    errors = [o.error for o in outcomes if o.error and (blame is None or not blame.ranks or o.rank in blame.ranks)]
    return errors[0].splitlines()[0] if errors else "it did not end before its deadline"


def figures(seen: Seen[Data]) -> Mapping[str, Scalar]:
    """The slowest rank's seconds for each method, fastest trial."""
    seconds: dict[str, list[float]] = {}
    for trial in seen.trials:
        own = [row.data.seconds for row in seen.rows if row.trial is trial]
        if own:
            seconds.setdefault(str(trial.params["method"]), []).append(max(own))
    return {f"rendezvous.{method}_seconds": min(values) for method, values in seconds.items()}


def columns(seen: Seen[Data]) -> Mapping[int, Mapping[str, Scalar]]:
    """When each rank came, in seconds after rank 0 began to wait: a slow file server or a late host shows here."""
    return {rank: {"arrival_seconds": arrival.seconds} for rank, arrival in seen.world.arrivals.items()}


CHECK = Check(
    "RDZ001",
    "rendezvous",
    Stage.RENDEZVOUS,
    Scope.WORLD,
    manual=__doc__ or "",
    judge=judge,
    data=Data,
    measure=measure,
    plan=plan,
    columns=columns,
    figures=figures,
    kind=Kind.TORCH,
    deadline=10,
    settings={"repeat": 1},
)
