"""What NCCL chose, judged: sockets, GPUDirect RDMA, ways within a host, NVLS, versions."""

from collections.abc import Mapping

import pytest
from msgspec import structs
from rails import host, rails
from seen import seen_of, skip_text, together, world_of

from ddpdiag.checks.host import rdma_ports
from ddpdiag.checks.launch import variables as lch002
from ddpdiag.checks.launch import versions
from ddpdiag.checks.p2p import transport
from ddpdiag.checks.p2p.transport import Data
from ddpdiag.model import Finding, Options, Severity
from ddpdiag.probes.gpu.links import Connections
from ddpdiag.probes.net.adapters import Port
from ddpdiag.probes.net.nccl_log import Hop, Log

HOST = 4
NDR = 50e9
INFINIBAND = tuple(Port(adapter=f"mlx5_{n}", number="1", infiniband=True, active=True, bytes_per_s=NDR) for n in (0, 1))
ROCE = tuple(structs.replace(port, infiniband=False) for port in INFINIBAND)
DOWN = tuple(structs.replace(port, active=False) for port in INFINIBAND)


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
            log=Log(
                version="2.27.7",
                network=network,
                hops=ring(rank, size, network, gdr=gdr),
                nvls=True,
                nvls_channels=16,
                hosts=-(-size // HOST),
                nvlinked={rank: tuple(r for r in range(size) if r // HOST == rank // HOST and r != rank)},
                gdr={"mlx5_0": True},
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


def judged(rows: Mapping[int, Data], **variables: str) -> list[Finding]:
    seen = seen_of(transport.CHECK, rows, ranks_per_node=HOST, gpus=HOST)
    if variables:
        seen = together(seen, seen_of(lch002.CHECK, {r: lch002.Data(variables, {}) for r in rows}, ranks_per_node=HOST))
    return list(transport.judge(seen))


def only(rows: Mapping[int, Data], **variables: str) -> Finding:
    (finding,) = judged(rows, **variables)
    return finding


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_healthy_hosts_are_silent(size: int) -> None:
    assert judged(healthy(size)) == []


def test_sockets_although_infiniband_is_up(golden) -> None:
    rows = {rank: with_log(data, sockets=("eth0",)) for rank, data in healthy(8, network="Socket").items()}
    finding = only(rows, NCCL_IB_DISABLE="1")
    assert (finding.code, finding.severity) == ("P2P004.sockets", Severity.WARNING)
    assert finding.hosts == ("n0", "n1")
    assert finding.ranks == (0, 3, 4, 7), "those that send over the network"
    golden(finding)


def test_sockets_tell_what_nccl_says_and_no_rate_that_is_not_known(golden) -> None:
    finding = only(healthy(8, network="Socket", notes=("Failed to open libibverbs.so[.1]",)))
    assert (finding.code, finding.hosts) == ("P2P004.sockets", ("n0", "n1"))
    golden(finding)


def test_sockets_because_of_a_wrong_nccl_ib_hca_are_told_once() -> None:
    size = 8
    run = {"size": size, "ranks_per_node": HOST, "gpus": HOST}
    wrong, right = (host(rails(), NCCL_IB_HCA=rule) for rule in ("mlx4", "mlx5"))
    rows = healthy(size, network="Socket")
    seen = together(seen_of(transport.CHECK, rows, **run), seen_of(rdma_ports.CHECK, {0: wrong, HOST: right}, **run))
    assert [finding.code for finding in seen.findings_of("HST007")] == ["HST007.hca"]
    assert list(transport.CHECK.judge(seen)) == []
    assert [finding.code for finding in transport.CHECK.judge(seen_of(transport.CHECK, rows, **run))] == [
        "P2P004.sockets"
    ]


@pytest.mark.parametrize("ports", [(), DOWN])
def test_sockets_are_fine_where_no_port_is_up_on_one_end(ports: tuple[Port, ...]) -> None:
    rows = healthy(8, network="Socket")
    assert judged(rows | {rank: structs.replace(rows[rank], ports=ports) for rank in range(4)}) == []


def test_hosts_without_infiniband_are_not_named_beside_others() -> None:
    rows = healthy(12, network="Socket")
    finding = only(rows | {rank: structs.replace(rows[rank], ports=()) for rank in range(4)})
    assert finding.hosts == ("n1", "n2")


def test_ports_of_clouds_that_may_reach_nobody_are_no_warning() -> None:
    rows = {rank: structs.replace(data, ports=ROCE) for rank, data in healthy(8, network="Socket").items()}
    finding = only(rows)
    assert (finding.code, finding.severity) == ("P2P004.sockets", Severity.NOTE)


def test_sockets_although_efa_is_up_name_the_plugin(golden) -> None:
    efa = tuple(
        structs.replace(port, adapter=f"rdmap{n}s27", infiniband=False, link_layer="Unknown", bytes_per_s=12.5e9)
        for n, port in enumerate(INFINIBAND)
    )
    rows = {
        rank: structs.replace(with_log(data, sockets=("ens5",)), ports=efa)
        for rank, data in healthy(8, network="Socket").items()
    }
    finding = only(rows)
    assert (finding.code, finding.severity) == ("P2P004.sockets", Severity.WARNING)
    assert "aws-ofi-nccl" in finding.message
    assert "NCCL_NET_PLUGIN" in finding.fix
    golden(finding)
    assert (
        judged({rank: structs.replace(row, ports=efa) for rank, row in healthy(8, network="AWS Libfabric").items()})
        == []
    )


def test_one_host_of_three_without_gpudirect_is_blamed(golden) -> None:
    rows = healthy(12)
    for rank in (4, 7):
        log = rows[rank].log
        assert log is not None
        mine = tuple(structs.replace(own, gdr=False) for own in log.hops)
        rows[rank] = structs.replace(with_log(rows[rank], hops=mine, gdr={"mlx5_0": False}), peer_memory=False)
    finding = only(rows)
    assert (finding.code, finding.severity) == ("P2P004.no-gdr", Severity.WARNING)
    assert finding.hosts == ("n1",)
    golden(finding)


def test_of_two_hosts_none_is_blamed(golden) -> None:
    rows = healthy(8)
    for rank in (4, 7):
        log = rows[rank].log
        assert log is not None
        rows[rank] = with_log(rows[rank], hops=tuple(structs.replace(own, gdr=False) for own in log.hops))
    finding = only(rows)
    assert (finding.hosts, finding.ranks) == ((), ())
    golden(finding)


def test_a_gpu_that_is_written_directly_and_not_read_is_fine() -> None:
    rows = healthy(8)
    for rank, data in rows.items():
        assert data.log is not None
        rows[rank] = with_log(
            data, hops=tuple(structs.replace(h, gdr=h.gdr and h.target == rank) for h in data.log.hops)
        )
    assert judged(rows) == []


@pytest.mark.parametrize("variables", [{}, {"NCCL_NET_GDR_LEVEL": "LOC"}], ids=["unset", "LOC"])
def test_no_gpudirect_anywhere_is_told(golden, variables: dict[str, str]) -> None:
    finding = only(healthy(8, gdr=False), **variables)
    assert (finding.code, finding.severity, finding.hosts) == ("P2P004.no-gdr", Severity.NOTE, ())
    golden(finding)


def test_a_plugin_of_a_cloud_goes_its_own_way() -> None:
    assert judged(healthy(8, network="FasTrak", gdr=False)) == []


def test_shared_memory_beside_nvlinks(golden) -> None:
    rows = healthy(8)
    rows[1] = with_log(rows[1], hops=(hop(1, 2, "SHM", "direct"),), settings={"NCCL_P2P_LEVEL": "LOC"})
    finding = only(rows)
    assert (finding.code, finding.severity) == ("P2P004.inside", Severity.WARNING)
    assert (finding.hosts, finding.ranks, finding.gpus) == (("n0",), (1, 2), ("GPU-1", "GPU-2"))
    golden(finding)


def test_ranks_that_nccl_takes_to_be_on_other_hosts(golden) -> None:
    rows = healthy(4, network="IB")
    for rank in rows:
        hops = (net(rank, (rank + 1) % 4),)
        rows[rank] = with_log(rows[rank], hops=hops, hosts=4, nvlinked={})
    finding = only(rows, NCCL_HOSTID="x")
    assert finding.code == "P2P004.inside"
    golden(finding)


def test_shared_memory_between_gpus_that_only_pcie_connects_is_fine() -> None:
    rows = {
        rank: structs.replace(with_log(data, nvlinked={}), links=Connections(nvlinks=4, nvlink_switched=False))
        for rank, data in healthy(4).items()
    }
    rows[1] = with_log(rows[1], hops=(hop(1, 2, "SHM", "direct"), net(1, 2)))
    assert judged(rows) == []


def test_sockets_within_a_host(golden) -> None:
    rows = {
        rank: structs.replace(with_log(data, nvlinked={}), links=Connections()) for rank, data in healthy(4).items()
    }
    rows[1] = with_log(rows[1], hops=(net(1, 2, "Socket", gdr=False),))
    finding = only(rows)
    assert finding.code == "P2P004.inside"
    golden(finding)


def test_one_gpu_without_nvls_is_named() -> None:
    rows = {rank: with_log(data, nvls_channels=0) for rank, data in healthy(8).items()}
    rows[5] = with_log(rows[5], nvls=False)
    finding = only(rows)
    assert (finding.code, finding.ranks, finding.gpus) == ("P2P004.nvls", (5,), ("GPU-5",))
    assert finding.severity is Severity.WARNING


def test_nvls_on_half_of_the_gpus_blames_nobody() -> None:
    rows = {rank: with_log(data, nvls=rank < 4) for rank, data in healthy(8).items()}
    finding = only(rows)
    assert (finding.severity, finding.ranks) == (Severity.NOTE, ())


def test_another_version_is_an_error_unless_it_was_told_before() -> None:
    rows = healthy(8)
    rows[3] = with_log(rows[3], version="2.21.5")
    finding = only(rows)
    assert (finding.code, finding.severity, finding.ranks) == ("P2P004.mixed-versions", Severity.ERROR, (3,))
    seen = seen_of(transport.CHECK, rows, ranks_per_node=HOST, gpus=HOST)
    told = {
        rank: versions.Data(python="3.12", torch="2.9", nccl=data.log.version)
        for rank, data in rows.items()
        if data.log is not None
    }
    assert list(transport.judge(together(seen, seen_of(versions.CHECK, told, ranks_per_node=HOST)))) == []


def test_a_rank_without_a_log_is_unknown(golden) -> None:
    rows = healthy(8)
    rows[2] = Data(ports=INFINIBAND)
    finding = only(rows)
    assert (finding.code, finding.ranks) == ("P2P004.unreadable", (2,))
    golden(finding)


def test_a_log_in_words_that_are_not_known_is_unknown(golden) -> None:
    rows = {rank: with_log(data, hops=(), nvls_channels=None) for rank, data in healthy(4).items()}
    finding = only(rows)
    assert finding.code == "P2P004.unreadable"
    golden(finding)


def test_warnings_of_nccl_are_told_once(golden) -> None:
    rows = healthy(4, warnings=("NET/IB : mlx5_0:1 Got async event : port error",))
    finding = only(rows)
    assert (finding.code, finding.severity) == ("P2P004.warned", Severity.NOTE)
    golden(finding)


def test_a_known_warning_of_nccl_has_the_title_and_fix_of_its_card(golden) -> None:
    rows = healthy(4, warnings=("odd", "Error: failed to extend /dev/shm/nccl-03v824 to 4194660 bytes"))
    finding = only(rows)
    assert (finding.code, finding.severity) == ("P2P004.warned", Severity.NOTE)
    assert "known_error" in finding.evidence
    golden(finding)


def test_a_network_that_reduces_is_among_the_transports() -> None:
    seen = seen_of(transport.CHECK, healthy(4, collnet="SHARP/GDRDMA"), size=4, ranks_per_node=4, gpus=4)
    assert transport.columns(seen)[0] == {"transport": "COLLNET/SHARP/GDRDMA, P2P/CUMEM, NVLS"}


def test_columns_matrix_and_figures() -> None:
    seen = seen_of(transport.CHECK, healthy(8), ranks_per_node=HOST, gpus=HOST)
    assert transport.columns(seen)[3] == {"transport": "P2P/CUMEM, NET/IB/GDRDMA, NVLS"}
    assert transport.columns(seen)[1] == {"transport": "P2P/CUMEM, NVLS"}
    (matrix,) = transport.matrices(seen)
    assert (matrix.name, matrix.rows[0]) == ("p2p.transport", "rank 0")
    assert (matrix.cells[0][1], matrix.cells[3][4], matrix.cells[1][0]) == ("P2P/CUMEM", "NET/IB/GDRDMA", None)
    assert transport.figures(seen) == {"nccl.version": "2.27.7", "nccl.network": "IB"}
    assert list(transport.matrices(seen_of(transport.CHECK, healthy(20), ranks_per_node=HOST))) == []


def test_only_nccl_between_gpus_has_ground(golden) -> None:
    assert skip_text(transport.CHECK, world_of(2, gpus=2)) is None
    others = world_of(2), world_of(1, gpus=1), world_of(2, options=Options(backend="nccl"))
    golden(*(skip_text(transport.CHECK, other) for other in others))


def test_the_trial_shares_the_group_of_the_all_reduce() -> None:
    seen = seen_of(transport.CHECK, {}, size=2, gpus=2)
    fresh = type(seen)(seen.world, seen.check, structs.replace(seen.recording, trials=(), outcomes=()))
    (trial,) = transport.plan(fresh)
    assert (trial.fresh, trial.env, trial.params) == (False, {}, {"backend": "nccl"})
    assert transport.plan(seen) == ()


def test_ranks_of_a_group_are_the_jobs_ranks() -> None:
    log = Log(hops=(hop(0, 1), hop(1, 7)), nvlinked={0: (1,), 1: (0, 9)})
    assert transport._as_ranks(log, (4, 6)) == Log(hops=(hop(4, 6),), nvlinked={4: (6,)})
