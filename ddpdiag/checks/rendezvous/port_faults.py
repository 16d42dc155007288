"""What is wrong with MASTER_PORT, in words: rank 0 cannot listen, or hosts do not reach it. Part of RDZ005."""

from collections.abc import Mapping, Sequence
from shlex import quote

from msgspec import Struct, field

from ddpdiag.checks.api import Seen
from ddpdiag.checks.hosts import errno_text, leave_out, names_text, use_address
from ddpdiag.model import Finding, Scalar
from ddpdiag.probes.net.tcp_connect import PortAnswer, Reach

_RULES = "`nft list ruleset` or `iptables -L -n` shows"


class Data(Struct, frozen=True, kw_only=True):
    """What this host found. `port_check` is None where no process could listen, so that none was tried.

    `is_own`: the address tried is one of this host. Rank 0's host records why it could not listen (`error` is the
    errno's name, `holder` the process that has the port), and whether outgoing connections get such ports
    (`ephemeral`).
    """

    name: str
    port: int
    port_check: PortAnswer | None = field(default=None, name="knock")
    error: str | None = None
    holder: str | None = None
    ephemeral: tuple[int, int] | None = None
    is_own: bool | None = None

    @property
    def address(self) -> str | None:
        """The address that was tried."""
        return self.port_check.reached.address if self.port_check else None


def not_listening(seen: Seen[Data], node: str, first: Data) -> Finding:
    """Rank 0 could not listen."""
    if first.error != "EADDRINUSE":
        privileged = first.port < 1024 and first.error == "EACCES"
        higher = 29500 if first.port < 1024 else first.port + 1
        return seen.finding(
            "unusable",
            f"rank 0 cannot listen on MASTER_PORT {first.port}",
            f"Rank 0 on {node} cannot listen on port {first.port}: {errno_text(first.error or '')}."
            + (" Only root may use ports below 1024." if privileged else ""),
            nodes=[node],
            evidence={"port": first.port, "error": first.error},
            fix=f"Choose another port in every process: `export MASTER_PORT={higher}`.",
        )
    holder = first.holder or "a process that /proc does not show"
    pid = holder.partition(" (")[0]  # its command line may be long
    other = "$((20000 + SLURM_JOB_ID % 9000))" if seen.world.in_slurm else str(first.port + 1)
    kill = f" Or end the process on {node}, if it is left over from an old job of yours: `kill {quote(pid[4:])}`."
    end = kill if pid.startswith("pid ") else ""
    return seen.finding(
        "taken",
        f"MASTER_PORT {first.port} on {node} is taken by {pid}",
        f"Port {first.port} on {node}, rank 0's host, is held by {holder}. Rank 0 must be able to listen on "
        "MASTER_PORT.",
        evidence={"port": first.port, "holder": first.holder, "host": node},
        fix=f"Choose another port in the job script: `export MASTER_PORT={other}`.{end}",
        of_the_run=True,
    )


def not_even_itself(seen: Seen[Data], node: str, first: Data, why: str) -> Finding:
    """Rank 0's host does not reach the store under MASTER_ADDR."""
    where, address = (
        f"{first.name}:{first.port}{_address(first)}",
        first.port_check and first.port_check.reached.address,
    )
    word, title = "elsewhere", f"MASTER_ADDR {first.name} is not rank 0's host"
    message = (
        f"MASTER_ADDR {first.name} resolves to {address} on {node}, rank 0's host, but {node} does not have this "
        f"address. A connection from {node} to port {first.port} there {_ENDS[why]}."
    )
    fix = f"{use_address(node, first.port)} Or, as root, correct {first.name} in the DNS or in /etc/hosts."
    if address == first.name:
        message = f"MASTER_ADDR is {address}, but {node}, rank 0's host, does not have this address."
        fix = use_address(node, first.port)
    if seen.trials[-1].params.get("agent_store") and why == Reach.REFUSED.value:
        word, title = "nobody", "no torchrun serves the store of env://"
        message = (
            f"TORCHELASTIC_USE_AGENT_STORE is set, so all ranks expect torchrun's store at {where}. No process listens "
            "there."
        )
        fix = (
            "Without torchrun: an outer launcher has set the variable, so run `unset TORCHELASTIC_USE_AGENT_STORE` in "
            f"the job script. With torchrun: look in its output on {node} why it ended, and check that the script sets "
            "no other MASTER_ADDR or MASTER_PORT."
        )
    elif first.is_own:
        word, title = why, f"{node} cannot connect to its own MASTER_PORT {first.port}"
        message = (
            f"{node}, rank 0's host, cannot connect to itself at {where}, although rank 0 listens there: "
            f"the connection {_ENDS[why]}."
        )
        fix = (
            f"As root allow TCP port {first.port} in the firewall of {node} ({_RULES} its rules). Or choose another "
            "port: `export MASTER_PORT=PORT`."
        )
    evidence = _evidence({node: first})
    return seen.finding(word, title, message, nodes=[node], evidence=evidence, fix=fix)


def itself(seen: Seen[Data], node: str, asked: Mapping[int, Data]) -> Finding:
    """Hosts for which MASTER_ADDR is an address of their own, so that they never asked rank 0's."""
    first, hosts = next(iter(asked.values())), seen.world.nodes_of(list(asked))
    names, address = names_text(hosts), first.address
    one = len(hosts) == 1
    also = f"resolves to {address}, which is also an address of {f'{names} itself' if one else 'these hosts'}"
    message = f"On {names} MASTER_ADDR {first.name} {also}."
    if address == first.name:
        owners = f"{names} itself" if one else "these hosts"
        message = f"On {names} the address {address} (MASTER_ADDR) also belongs to {owners}."
    return seen.finding(
        "itself",
        f"MASTER_ADDR leads {names} to {'itself' if one else 'themselves'}",
        f"{message} So their ranks connect to their own host instead of {node}, rank 0's host.",
        links=[f"{host} -> {node}" for host in hosts],
        evidence=_evidence({seen.world.node_of(rank): data for rank, data in asked.items()}),
        fix=f"Set MASTER_ADDR to an IP address that only {node} has, in every process: `export MASTER_ADDR=ADDRESS` "
        f"(`ip -br addr` on {node} shows its addresses; docker0's is the same on every host)."
        + ("" if address == first.name else f" Or, as root, correct {first.name} in /etc/hosts of {names}."),
    )


_ENDS = {
    "refused": "is refused",
    "dropped": "gets no answer",
    "unreachable": "finds no route",
    "stranger": "is answered by another process",
}
_CAUSES = {
    "refused": "the connection is refused. A firewall rejects it, or another machine has this address.",
    "dropped": "there is no answer. A firewall on one of these hosts or between them drops the packets.",
    "unreachable": "no route leads there. The route is missing, or a firewall reports that there is none.",
}


def failure_finding(seen: Seen[Data], node: str, failed: Mapping[int, Data], why: str, *, got: int, of: int) -> Finding:
    """Hosts with one kind of failure, where `got` of `of` other hosts reached rank 0's (`node`)."""
    first, hosts = next(iter(failed.values())), seen.world.nodes_of(list(failed))
    # A host that got another machine's answer did not get as far as rank 0's host.
    theirs = got == 0 and of > 1 and why != "stranger"
    names, where = names_text(hosts), f"{first.name}:{first.port}{_address(first)}"
    address = first.address
    title = f"{names} cannot connect to MASTER_PORT {first.port}"
    verb, reaches = "can connect", ("connects" if len(hosts) == 1 else "connect")
    message = f"{names} cannot connect to {where}, where rank 0 listens on {node}: {_CAUSES.get(why, '')}"
    if why == "stranger":
        title = f"{names} {reaches} to another process at MASTER_ADDR, not to rank 0"
        verb = "reaches rank 0" if got == 1 else "reach rank 0"
        message = (
            f"{names} {reaches} to {where}, but the process that answers is not rank 0 on {node}. Another machine may "
            "have this address, or a device between the hosts answers."
        )
    whose = f"{got or 'None'} of {of} other hosts {verb}" if of > 1 else "There is no third host to compare with"
    so = f"so the cause is most likely on {node}" if theirs else f"but the fault may still be on {node}"
    if of == 1:
        so = "so it is not known which end is at fault"
    return seen.finding(
        why,
        title,
        f"{message} {whose}, {so}.",
        nodes=[node] if theirs else (),
        links=[f"{host} -> {node}" for host in hosts],
        evidence=_evidence({seen.world.node_of(rank): data for rank, data in failed.items()}),
        fix=_failure_fix(why, first, node, hosts, address, theirs=theirs),
    )


def _failure_fix(why: str, first: Data, node: str, hosts: Sequence[str], address: str | None, *, theirs: bool) -> str:
    names = names_text(hosts)
    out = "" if theirs else f", or {leave_out(hosts)}"
    if why == "stranger":
        return (
            f"Compare `getent ahosts {quote(first.name)}` on {hosts[0]} with `ip -br addr` on {node}. If {address} is "
            "not an "
            f"address of {node}, set MASTER_ADDR to one in every process: `export MASTER_ADDR=ADDRESS`; or, as root, "
            f"correct the name in the DNS or /etc/hosts of {names}. If it is, ask the network administrator which "
            "machine, proxy "
            f"or NAT answers {names} there, or {leave_out(hosts)}."
        )
    if why == "unreachable":
        return (
            f"Run `ip route get {quote(address or 'ADDRESS')}` and `ip -br addr` on {hosts[0]}: the route should "
            "leave by the interface "
            "that leads to the other hosts. If it does, a firewall answers in its place: as root look at the rules of "
            f"{node} ({_RULES}). Otherwise ask the administrator to add the route, or set MASTER_ADDR to an address of "
            f"{node} that {names} can reach (`ping ADDRESS`)." + ("" if theirs else f" Until then {leave_out(hosts)}.")
        )
    firewalls = f"for {names} in the firewall of {node} ({_RULES} its rules; in a cloud, the security group)"
    if not theirs:
        firewalls = f"from {names} to {node} in the firewalls of both ({_RULES} the rules)"
    elsewhere = ""
    if why == "refused":
        elsewhere = (
            f"If `ip -br addr` on {node} does not show {address}, set MASTER_ADDR to an address of {node} in every "
            "process (`export MASTER_ADDR=ADDRESS`). If it does: "
        )
    return (
        f"{elsewhere}{'as' if elsewhere else 'As'} root open TCP port {first.port} {firewalls}. Or choose a port that "
        f"is open: `export MASTER_PORT=PORT`{out}."
    )


def _address(data: Data) -> str:
    return f" ({data.address})" if data.address not in (None, data.name) else ""


def _evidence(answers: Mapping[str, Data]) -> dict[str, Scalar | list[Scalar]]:
    """Of each of the first hosts: address, answer, and after how long."""
    return {
        host: f"{found.reached.address}: {found.reached.reach.value} after {found.reached.seconds:.3f} s"
        for host, data in list(answers.items())[:16]
        if (found := data.port_check) is not None
    }
