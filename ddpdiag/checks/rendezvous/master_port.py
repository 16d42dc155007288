"""MASTER_PORT, as the job will use it.

Every rank of a job connects to MASTER_ADDR:MASTER_PORT before anything else. So does one rank of each host in this
check: it looks up MASTER_ADDR and connects. Rank 0 listens on the port meanwhile, and sends a random word, which proves
that rank 0 answered. If torchrun's agent already listens on the port, the ranks connect to the agent.

Findings and their causes, for all of which torch reports "client socket has timed out":

Names that are unknown, or resolve to loopback, are RDZ002's findings.

Fix: open MASTER_PORT between the hosts, or choose another one; derive it from the job's id, so that jobs do not clash:
`export MASTER_PORT=$((20000 + SLURM_JOB_ID % 9000))`.

Confirm by hand: On rank 0's host `ss -ltnp "sport = :$MASTER_PORT"`; from another host `nc -vz $MASTER_ADDR
$MASTER_PORT` while `nc -l $MASTER_PORT` runs there.

Sources: torch/csrc/distributed/c10d/socket.cpp and TCPStore.cpp; torch/distributed/rendezvous.py
(TORCHELASTIC_USE_AGENT_STORE).
"""

import errno
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from shlex import quote

from msgspec import Struct

from ddpdiag.checks.api import Check, Scope, Seen, Stage, new_trial, scope_groups
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.hosts import address_fix, errno_text, leave_out, names_text, untested_hosts_finding
from ddpdiag.model import Finding, Scalar, Severity, Trial
from ddpdiag.model.trial import Context
from ddpdiag.probes.host.programs import port_user
from ddpdiag.probes.net.interfaces import is_local
from ddpdiag.probes.net.tcp_connect import PortCheckResult, PortListener, Reach, check_port, is_answered, is_loopback

FINDINGS = {
    "taken": FindingSpec.error(
        "another process listens on MASTER_PORT on rank 0's host, such as another job with the same default port, or "
        "one that did not end. The process and the port are named; the host is not to blame."
    ),
    "unusable": FindingSpec.error("rank 0 may not listen there (ports below 1024).", same_item=True),
    "elsewhere": FindingSpec.error(
        "rank 0's host does not reach itself under MASTER_ADDR: the address is another host's."
    ),
    "no-agent": FindingSpec.error(
        "torchrun should serve the store (TORCHELASTIC_USE_AGENT_STORE), but no process listens; an outer or an older "
        "launcher set the variable.",
        same_item=True,
    ),
    **dict.fromkeys(
        ("refused", "dropped", "unreachable", "other-process"),
        FindingSpec.error(
            "a host cannot reach rank 0's port: a firewall that rejects or drops, no route, or another machine that "
            "answers under this name. If none of several other hosts can reach it, rank 0's host is blamed (but not "
            "for `other-process`), and also if it cannot even reach itself. Otherwise the failing links are named, and "
            "neither of their ends."
        ),
    ),
    "itself": FindingSpec.error(
        "MASTER_ADDR is also an address of that host, such as docker0's, or a name that /etc/hosts gives to it."
    ),
    "partly": FindingSpec.note("there are so many hosts that not all of them took part."),
}

# The kernel sends a lost first packet again after 1 s and after 3 s: three tries.
_CONNECT_SECONDS = 4.0
# The time from the barrier for which rank 0 waits for the connections of the other hosts.
_ACCEPT_SECONDS = 6.0
# The most hosts that try to connect.
MAX_HOSTS = 1024
# Sent in place of the random word if torchrun's agent listens, which sends no word.
_AGENT = "agent"
_RULES = "`nft list ruleset` or `iptables -L -n` shows"


class Data(Struct, frozen=True, kw_only=True):
    """The result of one host. `name` and `port` are its MASTER_ADDR and MASTER_PORT. `port_check` is the result of its
    connection. `is_own` says whether the connected address belongs to this host (None: no address). If rank 0 cannot
    listen, no rank connects, and `port_check` is None. Rank 0's data then have `error`, the errno's name, and `holder`,
    the process that has the port (None: not known)."""

    name: str
    port: int
    port_check: PortCheckResult | None = None
    error: str | None = None
    holder: str | None = None
    is_own: bool | None = None

    @property
    def address(self) -> str | None:
        """The address to which the host connected, or None."""
        return self.port_check.reached.address if self.port_check else None


def measure(ctx: Context) -> Data:
    """Listen as rank 0 (unless torchrun's agent does), and give the others a random word. If this works, connect."""
    name, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
    if ctx.group_rank > 0 or ctx.trial.params["agent_store"]:
        token = ctx.barrier(_AGENT).offer
        return _connect(ctx, name, port, token) if token else Data(name=name, port=port)
    token = secrets.token_hex(16)
    ctx.step(f"listen on port {port}")
    try:
        listener = PortListener(port, token, {str(rank) for rank in ctx.group})
    except OSError as error:
        code = errno.errorcode.get(error.errno or 0, str(error))
        holder = port_user(port) if error.errno == errno.EADDRINUSE else None
        ctx.barrier("")
        return Data(name=name, port=port, error=code, holder=holder)
    try:
        ctx.barrier(token)
        end = time.monotonic() + _ACCEPT_SECONDS
        data = _connect(ctx, name, port, token)
        ctx.step("wait for the other hosts")
        listener.wait(end - time.monotonic())
    finally:
        listener.close()
    return data


def _connect(ctx: Context, name: str, port: int, token: str) -> Data:
    """Connect to MASTER_ADDR:MASTER_PORT, and check that rank 0 sends `token`; torchrun's agent sends none."""
    ctx.step(f"connect to {name}:{port}")
    word = None if token == _AGENT else token
    answer = check_port(name, port, _CONNECT_SECONDS, caller=str(ctx.place.rank), word=word)
    address = answer.reached.address
    return Data(name=name, port=port, port_check=answer, is_own=None if address is None else is_local(address))


def plan(seen: Seen[Data]) -> Sequence[Trial]:
    """Plan one trial of one group: one rank of each host, up to MAX_HOSTS, rank 0 first. None without rank 0."""
    leaders = [rank for group in scope_groups(Scope.HOST, seen.world) for rank in group]
    if seen.trials or 0 not in leaders:
        return ()
    has_agent_store = any(arrival.agent_store for arrival in seen.world.arrivals.values())
    return (new_trial(seen, groups=(tuple(leaders[:MAX_HOSTS]),), params={"agent_store": has_agent_store}),)


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    """Findings on rank 0's host if it cannot use MASTER_PORT itself, else on the other hosts; also on untested ones."""
    answers = seen.by_rank
    first, first_host = answers.get(0), seen.world.host_name(0)
    if first is not None and first.error is not None:
        yield _not_listening(seen, first_host, first)
    elif first is not None and (own_failure := _failure_word(seen, 0, first)) is not None:
        yield _unreachable_from_itself(seen, first_host, first, own_failure)
    else:
        others = {rank: data.port_check for rank, data in answers.items() if rank != 0 and data.port_check is not None}
        failed = {rank: word for rank in others if (word := _failure_word(seen, rank, answers[rank])) is not None}
        if self_connected := {rank: answers[rank] for rank in failed if answers[rank].is_own}:
            yield _self_connection(seen, first_host, self_connected)
        failed = {rank: word for rank, word in failed.items() if rank not in self_connected}
        reached = sum(map(is_answered, others.values()))
        for word in dict.fromkeys(failed.values()):
            ranks = {rank: answers[rank] for rank in failed if failed[rank] == word}
            yield _failure_finding(seen, ranks, word, reached=reached, total=reached + len(failed))
    if seen.trials:
        yield from untested_hosts_finding(seen, MAX_HOSTS, "MASTER_PORT", "tried to connect to MASTER_PORT")


def is_usable(seen: Seen[Data]) -> bool:
    """Whether the check found no error that keeps a job from using MASTER_PORT."""
    return not any(finding.severity is Severity.ERROR for finding in judge(seen))


def _failure_word(seen: Seen[Data], rank: int, data: Data) -> str | None:
    """The word of the finding on a host that did not reach rank 0's port; None if it did, or if RDZ002 reports why."""
    answer = data.port_check
    if answer is None or is_answered(answer):
        return None
    reached = answer.reached
    if reached.reach in (Reach.UNKNOWN_NAME, Reach.SLOW_NAME):
        return None
    if rank != 0 and reached.address is not None and is_loopback(reached.address):
        return None
    return "other-process" if reached.reach is Reach.ACCEPTED else reached.reach.value


def _not_listening(seen: Seen[Data], host: str, first: Data) -> Finding:
    """The finding if rank 0 could not listen on MASTER_PORT; `first` is its data, `host` its host."""
    other_port = "$((20000 + SLURM_JOB_ID % 9000))" if seen.world.in_slurm else str(max(first.port + 1, 29500))
    fix = f"Choose another port in the job script: `export MASTER_PORT={other_port}`."
    if first.error != "EADDRINUSE":
        return seen.finding(
            "unusable",
            f"rank 0 cannot listen on MASTER_PORT {first.port}",
            f"Rank 0 on {host} cannot listen on port {first.port}: {errno_text(first.error or '')}. Only root may use "
            "ports below 1024.",
            hosts=[host],
            evidence={"port": first.port, "error": first.error},
            fix=fix,
        )
    holder = first.holder or "a process that /proc does not show"
    pid = holder.partition(" (")[0]  # its command line may be long
    kill = f" Or end the process on {host}, if it is left over from an old job of yours: `kill {quote(pid[4:])}`."
    return seen.finding(
        "taken",
        f"MASTER_PORT {first.port} on {host} is taken by {pid}",
        f"Port {first.port} on {host}, rank 0's host, is held by {holder}. Rank 0 must be able to listen on "
        "MASTER_PORT.",
        evidence={"port": first.port, "holder": first.holder, "host": host},
        fix=fix + (kill if pid.startswith("pid ") else ""),
        is_about_run=True,
    )


def _unreachable_from_itself(seen: Seen[Data], host: str, first: Data, failure: str) -> Finding:
    """The finding on rank 0's host if it cannot connect to MASTER_ADDR:MASTER_PORT itself; `first` is its data."""
    target = f"{first.name}:{first.port}{_address_text(first)}"
    if seen.trials[-1].params.get("agent_store") and failure == Reach.REFUSED.value:
        word, title = "no-agent", "no torchrun serves the store of env://"
        message = f"TORCHELASTIC_USE_AGENT_STORE is set, but no process serves torchrun's store at {target}."
        fix = (
            "Without torchrun: run `unset TORCHELASTIC_USE_AGENT_STORE` in the job script. With torchrun: look in its "
            f"output on {host} why it ended, and check that the script sets no other MASTER_ADDR or MASTER_PORT."
        )
    elif first.is_own:
        word, title = failure, f"{host} cannot connect to its own MASTER_PORT {first.port}"
        message = f"Rank 0 listens on {host}, but a connection from {host} to {target} {_RESULTS[failure]}."
        fix = (
            f"As root allow TCP port {first.port} in the firewall of {host} ({_RULES} its rules). Or choose another "
            "port: `export MASTER_PORT=PORT`."
        )
    else:
        word, title = "elsewhere", f"MASTER_ADDR {first.name} is not rank 0's host"
        message = (
            f"MASTER_ADDR is {first.name}{_address_text(first)}, but {host}, rank 0's host, does not have this address."
        )
        fix = f"{address_fix(host, first.port)} If it is a name: as root correct it in the DNS or in /etc/hosts."
    return seen.finding(word, title, message, hosts=[host], evidence=_evidence({host: first}), fix=fix)


def _self_connection(seen: Seen[Data], first_host: str, answers: Mapping[int, Data]) -> Finding:
    """The finding on hosts to which the address of MASTER_ADDR also belongs, so that they connect to themselves."""
    first, hosts = next(iter(answers.values())), seen.world.host_names(list(answers))
    names = names_text(hosts)
    return seen.finding(
        "itself",
        f"MASTER_ADDR leads {names} to {'itself' if len(hosts) == 1 else 'themselves'}",
        f"MASTER_ADDR {first.name}{_address_text(first)} is also an address of {names}. So the ranks there connect to "
        f"their own host instead of {first_host}, rank 0's host.",
        links=[f"{host} -> {first_host}" for host in hosts],
        evidence=_evidence({seen.world.host_name(rank): data for rank, data in answers.items()}),
        fix=f"Set MASTER_ADDR to an IP address that only {first_host} has, in every process: `export "
        f"MASTER_ADDR=ADDRESS` (`ip -br addr` on {first_host} shows its addresses; docker0's is the same on every "
        f"host). If it is a name: as root correct it in /etc/hosts of {names}.",
    )


_RESULTS = {
    "refused": "is refused",
    "dropped": "gets no answer",
    "unreachable": "finds no route",
    "other-process": "is answered by another process",
}
# Fields: `first` is the first of the failing hosts, `names` are their names, `host` is rank 0's host.
_FIREWALL_FIX = (
    "As root open TCP port {port} between {names} and {host} in their firewalls ({rules} the rules; in a cloud, the "
    "security group). Or choose a port that is open: `export MASTER_PORT=PORT`."
)
_FIXES = {
    "refused": f"{_FIREWALL_FIX} If `ip -br addr` on {{host}} does not show {{address}}, set MASTER_ADDR to an address "
    "of {host}.",
    "dropped": _FIREWALL_FIX,
    "unreachable": "Run `ip route get {address}` and `ip -br addr` on {first}. If there is no route, ask the "
    "administrator to add it, or set MASTER_ADDR to an address of {host} that {names} can reach (`ping ADDRESS`). If "
    "there is one, a firewall answers in its place: as root look at the rules of {host} ({rules} them).",
    "other-process": "Compare `getent ahosts {name}` on {first} with `ip -br addr` on {host}. If {address} is not an "
    "address of {host}, set MASTER_ADDR to one in every process (`export MASTER_ADDR=ADDRESS`). If it is, ask the "
    "network administrator which machine, proxy or NAT answers {names} there.",
}


def _failure_finding(seen: Seen[Data], failed: Mapping[int, Data], word: str, *, reached: int, total: int) -> Finding:
    """The finding on hosts with one kind of failure. `reached` of `total` other hosts reached rank 0's host."""
    first_host, data = seen.world.host_name(0), next(iter(failed.values()))
    hosts = seen.world.host_names(list(failed))
    names = names_text(hosts)
    # If another process answered, the connection may not have reached rank 0's host.
    is_blamed = reached == 0 and total > 1 and word != "other-process"
    conclusion = "There is no third host to compare with, so it is not known which end is at fault."
    if total > 1:
        conclusion = f"{reached or 'None'} of {total} other hosts {'reaches' if reached == 1 else 'reach'} rank 0, so "
        conclusion += (
            f"the cause is most likely on {first_host}." if is_blamed else f"the fault may still be on {first_host}."
        )
    fix = _FIXES[word].format(
        host=first_host,
        names=names,
        first=hosts[0],
        name=quote(data.name),
        address=quote(data.address or "ADDRESS"),
        port=data.port,
        rules=_RULES,
    )
    return seen.finding(
        word,
        f"{names} cannot connect to MASTER_PORT {data.port}",
        f"The connection to {data.name}:{data.port}{_address_text(data)}, where rank 0 listens on {first_host}, "
        f"{_RESULTS[word]}. {conclusion}",
        hosts=[first_host] if is_blamed else (),
        links=[f"{host} -> {first_host}" for host in hosts],
        evidence=_evidence({seen.world.host_name(rank): own for rank, own in failed.items()}),
        fix=fix if is_blamed else f"{fix} Until then {leave_out(hosts)}.",
    )


def _address_text(data: Data) -> str:
    return f" ({data.address})" if data.address not in (None, data.name) else ""


def _evidence(answers: Mapping[str, Data]) -> dict[str, Scalar | list[Scalar]]:
    """The address, result and seconds of each host's connection, for at most 16 hosts."""
    return {
        host: f"{answer.reached.address}: {answer.reached.reach.value} after {answer.reached.seconds:.3f} s"
        for host, data in list(answers.items())[:16]
        if (answer := data.port_check) is not None
    }


CHECK: Check[Data] = Check(__name__, "RDZ005", "master-port", Stage.RENDEZVOUS, Scope.HOST, deadline=15)
