"""What NCCL chose, judged: sockets, GPUDirect RDMA, ways within a host, NVLS, versions."""

from collections.abc import Iterable, Mapping

import pytest
from msgspec import structs
from rails import host, rails
from seen import seen_of, skip_text, together, world_of

from ddpdiag.checks.host import rdma_ports
from ddpdiag.checks.p2p import transport
from ddpdiag.checks.p2p.transport import Data
from ddpdiag.model import Finding, RunOptions, Severity
from ddpdiag.probes.gpu.links import Connections
from ddpdiag.probes.net.adapters import Port
from ddpdiag.probes.net.nccl_log import Hop, NcclLog

HOST = 4
NDR = 50e9
INFINIBAND = tuple(Port(adapter=f"mlx5_{n}", number="1", infiniband=True, active=True, bytes_per_s=NDR) for n in (0, 1))
ROCE = tuple(structs.replace(port, infiniband=False) for port in INFINIBAND)
DOWN = tuple(structs.replace(port, active=False) for port in INFINIBAND)
EFA = tuple(
    structs.replace(port, adapter=f"rdmap{n}s27", infiniband=False, link_layer="Unknown", bytes_per_s=12.5e9)
    for n, port in enumerate(INFINIBAND)
)


def hop(source: int, target: int, kind: str = "P2P", name: str = "CUMEM", **more: object) -> Hop:
    return Hop(source=source, target=target, kind=kind, name=name, **more)  # type: ignore[arg-type]


def net(source: int, target: int, name: str = "IB", *, gdr: bool = True) -> Hop:
    return hop(source, target, "NET", name, gdr=gdr, devices=(0,))


def ring(rank: int, size: int, name: str, *, gdr: bool) -> tuple[Hop, ...]:
    """What a rank tells of a ring through all hosts: its way onwards, and what comes in over the network."""
    after, before = (rank + 1) % size, (rank - 1) % size
    onwards = hop(rank, after) if rank // HOST == after // HOST else net(rank, after, name, gdr=gdr)
    return (onwards,) if rank // HOST == before // HOST else (onwards, net(before, rank, name, gdr=gdr))


def healthy(size: int, *, network: str = "IB", gdr: bool = True, **more: object) -> dict[int, Data]:
    """Hosts of four GPUs on a switch, with InfiniBand."""
    return {
        rank: Data(
            log=NcclLog(
                hops=ring(rank, size, network, gdr=gdr),
                nvls_channels=16,
                **more,  # type: ignore[arg-type]
            ),
            gpu_uuid=f"GPU-{rank}",
            links=Connections(nvlinks=18, nvlink_switched=True),
            ports=INFINIBAND,
            peer_memory=True,
        )
        for rank in range(size)
    }


def with_log(data: Data, **changes: object) -> Data:
    assert data.log is not None
    return structs.replace(data, log=structs.replace(data.log, **changes))


def judged(rows: Mapping[int, Data]) -> list[Finding]:
    return list(transport.judge(seen_of(transport.CHECK, rows, ranks_per_node=HOST, gpus=HOST)))


def only(rows: Mapping[int, Data]) -> Finding:
    (finding,) = judged(rows)
    return finding


def without_gdr(rows: dict[int, Data], ranks: Iterable[int], **row: object) -> dict[int, Data]:
    """The same rows, in which the logs of these ranks show no GPUDirect RDMA."""
    return rows | {
        rank: structs.replace(
            with_log(rows[rank], hops=tuple(structs.replace(own, gdr=False) for own in rows[rank].hops)), **row
        )
        for rank in ranks
    }


def on_pcie(size: int) -> dict[int, Data]:
    return {rank: structs.replace(data, links=Connections(nvlinks=4)) for rank, data in healthy(size).items()}


def with_hops(rows: dict[int, Data], rank: int, *hops: Hop) -> dict[int, Data]:
    return rows | {rank: with_log(rows[rank], hops=hops)}


def with_ports(rows: dict[int, Data], ports: tuple[Port, ...], ranks: Iterable[int] | None = None) -> dict[int, Data]:
    return rows | {rank: structs.replace(rows[rank], ports=ports) for rank in (rows if ranks is None else ranks)}


SILENT = {
    **{f"{size} healthy ranks": healthy(size) for size in (2, 4, 8, 16)},
    "sockets, no port on one end": with_ports(healthy(8, network="Socket"), (), range(4)),
    "sockets, ports down on one end": with_ports(healthy(8, network="Socket"), DOWN, range(4)),
    "a cloud's plugin": healthy(8, network="FasTrak", gdr=False),
    "EFA over its plugin": with_ports(healthy(8, network="AWS Libfabric"), EFA),
    "GPUs that are written directly and not read": {
        rank: with_log(data, hops=tuple(structs.replace(h, gdr=h.gdr and h.target == rank) for h in data.hops))
        for rank, data in healthy(8).items()
    },
    "shared memory between GPUs that only PCIe connects": with_hops(
        on_pcie(4), 1, hop(1, 2, "SHM", "direct"), net(1, 2)
    ),
}


@pytest.mark.parametrize("rows", SILENT.values(), ids=SILENT)
def test_what_is_no_fault_is_silent(rows: dict[int, Data]) -> None:
    assert judged(rows) == []


SLOW_PATHS = {
    "sockets although InfiniBand is up": (
        {
            rank: with_log(data, sockets=("eth0",), settings={"NCCL_IB_DISABLE": "1"})
            for rank, data in healthy(8, network="Socket").items()
        },
        "sockets", Severity.WARNING, ("n0", "n1"), (0, 3, 4, 7),
    ),
    "sockets, with NCCL's own reason": (
        healthy(8, network="Socket", notes=("Failed to open libibverbs.so[.1]",)),
        "sockets", Severity.WARNING, ("n0", "n1"), (0, 3, 4, 7),
    ),
    "sockets beside a host without InfiniBand": (
        with_ports(healthy(12, network="Socket"), (), range(4)),
        "sockets", Severity.WARNING, ("n1", "n2"), (7, 8),
    ),
    "sockets beside RoCE": (
        with_ports(healthy(8, network="Socket"), ROCE), "sockets", Severity.NOTE, ("n0", "n1"), (0, 3, 4, 7)
    ),
    "sockets beside EFA": (
        with_ports(healthy(8, network="Socket"), EFA), "sockets", Severity.WARNING, ("n0", "n1"), (0, 3, 4, 7)
    ),
    "one host of three without GPUDirect": (
        without_gdr(healthy(12), (4, 7), peer_memory=False), "no-gdr", Severity.WARNING, ("n1",), (4, 7)
    ),
    "one host of two without GPUDirect": (without_gdr(healthy(8), (4, 7)), "no-gdr", Severity.WARNING, (), ()),
    "no GPUDirect anywhere": (healthy(8, gdr=False), "no-gdr", Severity.NOTE, (), ()),
    "no GPUDirect by its level": (
        healthy(8, gdr=False, settings={"NCCL_NET_GDR_LEVEL": "LOC"}), "no-gdr", Severity.NOTE, (), ()
    ),
    "shared memory beside NVLinks": (
        with_hops(healthy(8, settings={"NCCL_P2P_LEVEL": "LOC"}), 1, hop(1, 2, "SHM", "direct")),
        "inside", Severity.WARNING, ("n0",), (1, 2),
    ),
    "sockets within a host": (
        with_hops(on_pcie(4), 1, net(1, 2, "Socket", gdr=False)), "inside", Severity.WARNING, ("n0",), (1, 2)
    ),
    "a rank without a log": (healthy(8) | {2: Data(ports=INFINIBAND)}, "unreadable", Severity.WARNING, ("n0",), (2,)),
}  # fmt: skip


@pytest.mark.parametrize(("rows", "word", "severity", "hosts", "ranks"), SLOW_PATHS.values(), ids=SLOW_PATHS)
def test_slow_paths_are_told(golden, rows, word, severity, hosts, ranks) -> None:
    finding = only(rows)
    assert (finding.code, finding.severity) == (f"P2P004.{word}", severity)
    assert (finding.hosts, finding.ranks) == (hosts, ranks)
    golden(finding)


def test_sockets_because_of_a_wrong_nccl_ib_hca_are_told_once() -> None:
    size = 8
    run = {"size": size, "ranks_per_node": HOST, "gpus": HOST}
    wrong, right = (host(rails(), NCCL_IB_HCA=rule) for rule in ("mlx4", "mlx5"))
    rows = healthy(size, network="Socket")
    seen = together(seen_of(transport.CHECK, rows, **run), seen_of(rdma_ports.CHECK, {0: wrong, HOST: right}, **run))
    assert [finding.code for finding in seen.findings_of("HST007")] == ["HST007.hca"]
    assert list(transport.CHECK.judge(seen)) == []
    (finding,) = transport.CHECK.judge(seen_of(transport.CHECK, rows, **run))
    assert finding.code == "P2P004.sockets"


def test_a_known_warning_of_nccl_has_the_title_and_fix_of_its_card(golden) -> None:
    rows = healthy(4, warnings=("odd", "Error: failed to extend /dev/shm/nccl-03v824 to 4194660 bytes"))
    finding = only(rows)
    assert (finding.code, finding.severity) == ("P2P004.warned", Severity.NOTE)
    assert "known_error" in finding.evidence
    golden(finding)


def test_only_nccl_between_gpus_has_ground(golden) -> None:
    assert skip_text(transport.CHECK, world_of(2, gpus=2)) is None
    others = world_of(2), world_of(1, gpus=1), world_of(2, options=RunOptions(backend="nccl"))
    golden(*(skip_text(transport.CHECK, other) for other in others))


def test_the_trial_shares_the_group_of_the_all_reduce() -> None:
    seen = seen_of(transport.CHECK, {}, size=2, gpus=2)
    fresh = type(seen)(seen.world, seen.check, structs.replace(seen.recording, trials=(), outcomes=()))
    (trial,) = transport.plan(fresh)
    assert (trial.fresh, trial.env, trial.params) == (False, {}, {"backend": "nccl"})
    assert transport.plan(seen) == ()


def test_ranks_of_a_group_are_the_jobs_ranks() -> None:
    assert transport._with_job_ranks(NcclLog(hops=(hop(0, 1), hop(1, 7))), (4, 6)) == NcclLog(hops=(hop(4, 6),))


def test_the_ranks_table_shows_the_paths() -> None:
    columns = transport.report(seen_of(transport.CHECK, healthy(8), ranks_per_node=HOST, gpus=HOST)).columns
    assert columns[3] == {"transport": "P2P/CUMEM, NET/IB/GDRDMA, NVLS"}
    assert columns[1] == {"transport": "P2P/CUMEM, NVLS"}
