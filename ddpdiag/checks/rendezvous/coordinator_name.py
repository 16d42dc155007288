"""The coordinator's name on every host.

One rank of each host looks up MASTER_ADDR as a job does. It also looks up the host's own name, because gloo offers the
address of that name to its peers. Debian and Ubuntu install `127.0.1.1 <host name>` in /etc/hosts, so that a host
offers its loopback address: a job works on one host, and hangs on two.

Findings and their causes:

glibc asks each name server in /etc/resolv.conf twice and waits 5 s each time; `options timeout:1 attempts:1` shortens
that.

Fix: correct /etc/hosts or the DNS entry; or give the address itself (`--master-addr 10.0.0.1`), and name the interface
for gloo (`GLOO_SOCKET_IFNAME=eth0`).

Confirm by hand: On every host `getent ahosts $MASTER_ADDR; getent hosts $(hostname); time getent hosts ADDRESS`.

Sources: gloo's transport/tcp/device.cc and torch's ProcessGroupGloo.cpp (the host's own name gives the address); Debian
reference, chapter 5.1.1 (127.0.1.1); resolv.conf(5), timeout and attempts.
"""

import os
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from shlex import quote

from msgspec import Struct, structs

from ddpdiag.checks.api import Check, Scope, Seen, Stage
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.hosts import address_fix, data_by_host, names_text
from ddpdiag.checks.rendezvous import methods
from ddpdiag.model import Finding, Severity
from ddpdiag.model.trial import Context
from ddpdiag.probes.net.interfaces import reverse_lookup_seconds
from ddpdiag.probes.net.tcp_connect import is_loopback, resolve

FINDINGS = {
    "unknown": FindingSpec.error("the resolver reports that there is no such name."),
    "slow": FindingSpec(
        "the resolver answers late, or not within 12 s (glibc asks a silent name server twice, 5 s each), for "
        "MASTER_ADDR or for the name of its address (a warning). torch looks up the latter at each connection, which "
        "costs a job of three hosts 20 s.",
        same_item=True,
    ),
    **dict.fromkeys(
        ("loopback", "own"),
        FindingSpec(
            "/etc/hosts names 127.0.1.1. On rank 0's host that is harmless as long as the ranks can "
            "connect. For a host's own name it is harmless as long as gloo works: of two ranks the one that offers the "
            "higher address connects."
        ),
    ),
    "differs": FindingSpec.warning("hosts got different addresses: a split DNS, or an old line in /etc/hosts."),
}

# resolv.conf(5): 2 tries of 5 s for each name server. The limit is longer, so that the resolver gives up first.
_LOOK_UP_SECONDS = 12.0


class Data(Struct, frozen=True):
    """The answers of this host's resolver (None: no answer in time; an empty tuple: the name is unknown). `name` is
    MASTER_ADDR; the look-up of its `addresses` took `seconds`. `own_name` is the host's name. `interface` is
    GLOO_SOCKET_IFNAME, if set. `reverse_seconds` is the time to look up the first address's name (0: no address)."""

    name: str
    addresses: tuple[str, ...] | None
    seconds: float
    own_name: str
    own_addresses: tuple[str, ...] | None
    interface: str | None
    reverse_seconds: float | None = 0.0


def measure(ctx: Context) -> Data:
    """Look up MASTER_ADDR, this host's own name, and the name of MASTER_ADDR's first address, if it has one."""
    name, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
    ctx.step(f"look up {name}")
    begin = time.perf_counter()
    addresses = resolve(name, port, _LOOK_UP_SECONDS)
    seconds = time.perf_counter() - begin
    host_name = socket.gethostname()
    ctx.step(f"look up {host_name}")
    own_addresses = resolve(host_name, 0, _LOOK_UP_SECONDS)
    data = Data(name, addresses, seconds, host_name, own_addresses, os.environ.get("GLOO_SOCKET_IFNAME"))
    if addresses:
        ctx.step(f"look up the name of {addresses[0]}")
        data = structs.replace(data, reverse_seconds=reverse_lookup_seconds(addresses[0], _LOOK_UP_SECONDS))
    return data


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    """Findings on unknown names, slow look-ups and, with several hosts, loopback addresses and different addresses."""
    is_multi_host = len(seen.world.hosts) > 1
    host_data: dict[str, Data] = {}
    for host, rows in data_by_host(seen):
        host_data[host.name] = data = next(iter(rows.values()))
        yield from _bad_look_ups(seen, host.name, data)
        if is_multi_host and data.addresses and all(map(is_loopback, data.addresses)):
            yield _loopback(seen, host.name, data.name, data.addresses, is_first_host=0 in host.ranks)
        # gloo takes the first address that it can bind, and it can always bind a loopback one.
        if is_multi_host and not data.interface and (not data.own_addresses or is_loopback(data.own_addresses[0])):
            gloo_works = seen.world.backend == "gloo" and seen.job_backend_works
            address = data.own_addresses[0] if data.own_addresses else "loopback"
            yield seen.finding(
                "own",
                f"gloo on {host.name} offers a loopback address",
                f"{host.name} resolves its own name {data.own_name} to {address}, and gloo gives this address to the "
                f"other ranks. It is valid only inside {host.name}"
                + (f"; gloo works here only because {host.name} is the side that connects." if gloo_works else "."),
                severity=Severity.WARNING if gloo_works or seen.world.backend != "gloo" else Severity.ERROR,
                hosts=[host.name],
                evidence={"own_addresses": list(data.own_addresses or ())},
                fix="Name the network interface for gloo in the job script: `export GLOO_SOCKET_IFNAME=INTERFACE`. `ip "
                'route get ADDRESS`, with the address of another host, shows it behind "dev". Or, as root, correct the '
                f"address of {data.own_name} in /etc/hosts of {host.name}.",
            )
    yield from _different_addresses(seen, host_data)


def _bad_look_ups(seen: Seen[Data], host: str, data: Data) -> Iterator[Finding]:
    """Findings on look-ups of MASTER_ADDR and of its address that were slow, had no answer, or found no such name."""
    limit, addresses = seen.setting("slow_seconds"), data.addresses
    look_ups = [(data.name, "MASTER_ADDR", None if addresses is None else data.seconds)]
    if addresses:
        look_ups.append((addresses[0], "whose name torch looks up at each connection", data.reverse_seconds))
    for name, role, seconds in look_ups:
        if seconds is not None and seconds <= limit:
            continue
        result = f"needed {seconds:.1f} s to look up" if seconds is not None else ""
        result = result or f"got no answer within {_LOOK_UP_SECONDS:g} s when it looked up"
        yield seen.finding(
            "slow",
            f"{'no answer to a' if seconds is None else 'slow'} name look-up on {host}",
            f"{host} {result} {name} ({role}); at most {limit:g} s is expected.",
            severity=Severity.ERROR if addresses is None else Severity.WARNING,
            hosts=[host],
            evidence={"name": name, "seconds": seconds},
            fix=f"Run `time getent hosts {quote(name)}` on {host}, and ask each name server of /etc/resolv.conf by "
            f"itself: `dig @SERVER {quote(name)}`. As root remove servers that do not answer, add the line `options "
            "timeout:1 attempts:1`, or add the addresses and names of the job's hosts to /etc/hosts.",
        )
    if addresses == ():
        yield seen.finding(
            "unknown",
            f"{host} cannot resolve MASTER_ADDR {data.name}",
            f"MASTER_ADDR is {data.name}, but the resolver of {host} knows no such name. So the ranks on {host} cannot "
            "connect to rank 0.",
            hosts=[host],
            fix=f"{address_fix(seen.world.host_name(0))} Or, as root, add the name to the DNS, or the line `ADDRESS "
            f"{data.name}` to /etc/hosts of {host}.",
        )


def _loopback(seen: Seen[Data], host: str, name: str, addresses: tuple[str, ...], *, is_first_host: bool) -> Finding:
    """The finding on a host that resolves MASTER_ADDR to loopback. `is_first_host`: it is rank 0's host."""
    rdz001 = seen.of(methods.CHECK)
    is_harmless = is_first_host and any(t.params.get("method") == "tcp" and rdz001.succeeded(t) for t in rdz001.trials)
    first_host = seen.world.host_name(0)
    consequence = f"the ranks on {host} cannot connect to rank 0 on {first_host}."
    if is_first_host:
        consequence = "the ranks could still connect here." if is_harmless else "other hosts cannot connect to it."
    return seen.finding(
        "loopback",
        f"MASTER_ADDR {name} resolves to loopback on {host}",
        f"On {host} MASTER_ADDR {name} resolves to {addresses[0]}. This address is valid only inside {host}, "
        f"{'but' if is_harmless else 'so'} {consequence}",
        severity=Severity.WARNING if is_harmless else Severity.ERROR,
        hosts=[host],
        evidence={"addresses": list(addresses)},
        fix=f"{address_fix(first_host)} Or, as root, remove {name} from the line with {addresses[0]} in /etc/hosts of "
        f"{host}.",
    )


def _different_addresses(seen: Seen[Data], host_data: Mapping[str, Data]) -> Iterator[Finding]:
    """The finding on hosts that share no address with the hosts that have the most common address. They are blamed only
    if more than half of the hosts have this address. Loopback addresses do not count."""
    by_host = {host: {a for a in data.addresses or () if not is_loopback(a)} for host, data in host_data.items()}
    by_host = {host: addresses for host, addresses in by_host.items() if addresses}
    counts = Counter(address for addresses in by_host.values() for address in addresses)
    if not counts:
        return
    address, host_count = counts.most_common(1)[0]
    usual = set().union(*(addresses for addresses in by_host.values() if address in addresses))
    odd = [host for host, addresses in by_host.items() if addresses.isdisjoint(usual)]
    if not odd:
        return
    name, first_host = next(iter(host_data.values())).name, seen.world.host_name(0)
    blamed = odd if 2 * host_count > len(by_host) else []
    who = f"{len(odd)} hosts differ: {names_text(odd)}. The ranks there" if len(odd) > 1 else f"The ranks on {odd[0]}"
    doubt = "" if blamed else " There is no majority, so no host is blamed."
    export = f"`export MASTER_ADDR=ADDRESS` (`ip -br addr` on {first_host})"
    if blamed:
        export = f"`export MASTER_ADDR={quote(address)}`"
    yield seen.finding(
        "differs",
        f"MASTER_ADDR {name} has different addresses on the hosts",
        f"{name} resolves to {address} on {host_count} of {len(by_host)} hosts, but to "
        f"{', '.join(sorted(by_host[odd[0]]))} on {odd[0]}. {who} may connect to another machine than rank 0's.{doubt}",
        hosts=blamed,
        evidence={host: ", ".join(sorted(by_host[host])) for host in odd},
        fix=f"Set MASTER_ADDR to the address of rank 0's host instead of the name, in every process: {export}. Or, as "
        f"root, correct the name in the DNS or in /etc/hosts of {names_text(blamed) or 'the hosts that are wrong'} "
        f"(`getent ahosts {quote(name)}` shows the result).",
    )


SETTINGS = {"slow_seconds": 1.0}
CHECK: Check[Data] = Check(__name__, "RDZ002", "coordinator-name", Stage.RENDEZVOUS, Scope.HOST, deadline=40)
