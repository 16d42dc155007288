"""RDMA adapters and their ports, GIDs, and nvidia-peermem, as /sys shows them."""

from pathlib import Path

import pytest
from rails import LINK_LOCAL, ROCE, Rail, rails, tree
from test_probes_route import add_port

from ddpdiag.probes.net.adapters import Port, has_peer_memory, rdma_ports
from ddpdiag.probes.net.rdma import Adapter, Gid, gpu_device_ids, nccl_settings, rdma_adapters, roce_gids


def test_ports_with_their_layer_state_and_rate(tmp_path: Path) -> None:
    add_port(tmp_path, "mlx5_0")
    add_port(tmp_path, "mlx5_1", port=2, state="1: DOWN", rate="100 Gb/sec (4X EDR)")
    add_port(tmp_path, "mlx5_2", state="5: ACTIVE_DEFER", rate="?")
    (tmp_path / "class/infiniband/mlx5_0/ports/1/link_layer").write_text("InfiniBand\n")
    (tmp_path / "class/infiniband/mlx5_1/ports/2/link_layer").write_text("Ethernet\n")
    (tmp_path / "class/infiniband/mlx5_1/ports/2/phys_state").write_text("4: PortConfigurationTraining\n")
    first, second, third = rdma_ports(tmp_path)
    assert first == Port(
        adapter="mlx5_0",
        number="1",
        infiniband=True,
        active=True,
        bytes_per_s=50e9,
        lanes=4,
        link_layer="InfiniBand",
        state="ACTIVE",
    )
    assert (second.name, second.infiniband, second.active, second.bytes_per_s) == ("mlx5_1:2", False, False, 12.5e9)
    assert (second.link_layer, second.state, second.physical_state) == ("Ethernet", "DOWN", "PortConfigurationTraining")
    assert (third.active, third.bytes_per_s, third.lanes, third.link_layer) == (False, None, None, None)


def test_a_host_without_rdma_has_no_port(tmp_path: Path) -> None:
    assert rdma_ports(tmp_path) == ()
    assert not has_peer_memory(tmp_path)


@pytest.mark.parametrize("place", ["module/nvidia_peermem", "kernel/mm/memory_peers/nv_mem"])
def test_peer_memory_of_both_generations(tmp_path: Path, place: str) -> None:
    (tmp_path / place).mkdir(parents=True)
    (tmp_path / place / "version").write_text("1.3\n")
    assert has_peer_memory(tmp_path)


def test_an_adapter_with_its_firmware_and_place_unless_it_is_made_of_software(tmp_path: Path) -> None:
    tree(tmp_path, (Rail("mlx5_0", 5), Rail("rxe0", None, "Ethernet")), gpus=0)
    adapter, software = rdma_adapters(tmp_path) or ()
    assert adapter == Adapter(
        name="mlx5_0", model="MT4129", board="MT_0000000838", firmware="28.39.1002", kind="CA", pci="0000:63:00.0"
    )
    assert software.pci is None


def test_a_host_without_a_driver_has_no_adapter_and_a_sys_that_is_not_there_is_unknown(tmp_path: Path) -> None:
    assert rdma_adapters(tmp_path) is None
    (tmp_path / "class").mkdir()
    assert rdma_adapters(tmp_path) == ()


def test_gids_with_their_types(tmp_path: Path) -> None:
    tree(tmp_path, (Rail("mlx5_0", layer="Ethernet", gids=ROCE, net="eth2"), Rail("mlx5_1", 1, net="ib0")))
    roce, _ = rdma_ports(tmp_path)
    gids = roce_gids(tmp_path, roce)
    assert gids == tuple(Gid(place, address, kind) for place, (address, kind, _) in enumerate(ROCE))
    assert [gid.is_routed for gid in gids] == [False, False, False, True]


def test_types_that_the_kernel_hides_are_unknown(tmp_path: Path) -> None:
    tree(tmp_path, (Rail("mlx5_0", layer="Ethernet", gids=tuple((address, "", "") for address, _, _ in LINK_LOCAL)),))
    (port,) = rdma_ports(tmp_path)
    assert [gid.kind for gid in roce_gids(tmp_path, port)] == [None, None]


@pytest.mark.parametrize(
    ("address", "kind", "routed"),
    [
        ("0000:0000:0000:0000:0000:ffff:a9fe:0101", "RoCE v2", True),
        ("2001:0db8:0000:0000:0000:0000:0000:0001", "RoCE v2", True),
        ("fe80:0000:0000:0000:0000:00ff:fe00:0001", "RoCE v2", False),
        ("0000:0000:0000:0000:0000:ffff:0a00:0001", "IB/RoCE v1", False),
        ("no address", "RoCE v2", False),
    ],
)
def test_a_gid_leads_beyond_its_link_with_an_address_and_version_2(address: str, kind: str, routed: bool) -> None:
    assert Gid(0, address, kind).is_routed is routed


def test_models_of_gpus(tmp_path: Path) -> None:
    tree(tmp_path, rails(8))
    assert gpu_device_ids(tmp_path) == ("0x2330",) * 8


def test_variables_win_over_files(tmp_path: Path) -> None:
    conf = tmp_path / "nccl.conf"
    conf.write_text("NCCL_IB_HCA=mlx5_4\nNCCL_IB_GID_INDEX=3\nNCCL_DEBUG=INFO\n")
    env = {"NCCL_CONF_FILE": str(conf), "NCCL_IB_HCA": "mlx5_5"}
    assert nccl_settings(env) == {"NCCL_IB_HCA": "mlx5_5", "NCCL_IB_GID_INDEX": "3"}
    assert nccl_settings(env | {"NCCL_IB_HCA": ""}) == {"NCCL_IB_GID_INDEX": "3"}
