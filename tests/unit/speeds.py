"""Hand-made runs in which an all-reduce over nccl is fast or slow: COL001, P2P004, GPU003 and P2P005 together."""

from cards import host_of, uuid_of
from msgspec import structs
from seen import seen_of, together

from ddpdiag.checks.collective import all_reduce
from ddpdiag.checks.gpu import memory_errors
from ddpdiag.checks.p2p import transport
from ddpdiag.checks.p2p.speed import CHECK, Data
from ddpdiag.probes.gpu.links import Connections
from ddpdiag.probes.net.adapters import Port
from ddpdiag.probes.net.nccl_log import Hop, NcclLog
from ddpdiag.stats import Samples

GB = 1e9
H100 = Connections(nvlinks=18, nvlink_switched=True, nvlink_bytes_per_s=370.8 * GB, pcie_bytes_per_s=48 * GB)
PCIE = Connections(pcie_bytes_per_s=24 * GB)
LATENCY = 30e-6


def timing(seconds):
    return Samples(min=seconds, median=seconds * 1.1, p95=seconds * 1.5, count=8)


def seconds_of(size, rate, ranks):
    """A call at this bus bandwidth, with its latency."""
    return LATENCY + size / rate * 2 * (ranks - 1) / ranks


def hop_of(rank, size, on_host, kind, name):
    after = (rank + 1) % size
    inside = rank // on_host == after // on_host or name == "MNNVL"
    return Hop(
        source=rank,
        target=after,
        kind=kind if inside else "NET",
        name=name if inside else "IB",
        devices=() if inside else (rank % on_host,),
    )


def transport_of(rank, size, on_host, *, kind="P2P", name="CUMEM", links=H100, log=True, network=None, **settings):
    ports = tuple(
        Port(adapter=f"mlx5_{n}", number="1", infiniband=True, active=True, bytes_per_s=50 * GB) for n in range(on_host)
    )
    hop = hop_of(rank, size, on_host, kind, name)
    hop = structs.replace(hop, name=network) if network and hop.kind == "NET" else hop
    told = NcclLog(hops=(hop,), settings=settings) if log else None
    host, index = divmod(rank, on_host)
    return transport.Data(log=told, gpu_uuid=uuid_of(index, host), links=links, ports=ports)


def run(
    rate, again=None, around=None, *, size=2, on_host=None, sick=None, health=True, others=(), options=None, **path
):
    """`size` ranks whose all-reduce of 4 MiB reaches `rate`, one of 128 MiB `again`, and `around` without P2P."""
    on_host = on_host or size
    world = {"size": size, "ranks_per_node": on_host, "gpus": on_host, "options": options}
    large = timing(seconds_of(4 << 20, rate, size))
    first = all_reduce.Data("nccl", size, 4, timing(LATENCY), 4 << 20, large, 0)
    seen = seen_of(all_reduce.CHECK, dict.fromkeys(range(size), first), params={"backend": "nccl"}, **world)
    ways = {rank: transport_of(rank, size, on_host, **path) for rank in range(size)}
    seen = together(seen, seen_of(transport.CHECK, ways, **world))
    if health:
        looks = {on_host * n: host_of(sick, host=n, count=on_host) for n in range(size // on_host)}
        seen = together(seen, seen_of(memory_errors.CHECK, looks, **world))
    for other in others:
        seen = together(seen, other)
    for rate, env in ((again, {}), (around, {"NCCL_P2P_DISABLE": "1"})):
        if rate is not None:
            large = timing(seconds_of(128 << 20, rate, size))
            row = Data(backend="nccl", bytes=128 << 20, small_seconds=timing(LATENCY), large_seconds=large)
            seen = together(seen, seen_of(CHECK, dict.fromkeys(range(size), row), env=env, fresh=True, **world))
    return seen.of(CHECK)
