"""RDMA ports and nvidia-peermem, as /sys shows them."""

from pathlib import Path

import pytest
from test_probes_route import add_port

from ddpdiag.probes.net.adapters import Port, has_peer_memory, rdma_ports


def test_ports_with_their_layer_state_and_rate(tmp_path: Path) -> None:
    add_port(tmp_path, "mlx5_0")
    add_port(tmp_path, "mlx5_1", port=2, state="1: DOWN", rate="100 Gb/sec (4X EDR)")
    add_port(tmp_path, "mlx5_2", state="5: ACTIVE_DEFER", rate="?")
    (tmp_path / "class/infiniband/mlx5_0/ports/1/link_layer").write_text("InfiniBand\n")
    (tmp_path / "class/infiniband/mlx5_1/ports/2/link_layer").write_text("Ethernet\n")
    first, second, third = rdma_ports(tmp_path)
    assert first == Port(adapter="mlx5_0", number="1", infiniband=True, active=True, bytes_per_s=50e9)
    assert (second.name, second.infiniband, second.active, second.bytes_per_s) == ("mlx5_1:2", False, False, 12.5e9)
    assert (third.active, third.bytes_per_s) == (False, None)


def test_a_host_without_rdma_has_no_port(tmp_path: Path) -> None:
    assert rdma_ports(tmp_path) == ()
    assert not has_peer_memory(tmp_path)


@pytest.mark.parametrize("place", ["module/nvidia_peermem", "kernel/mm/memory_peers/nv_mem"])
def test_peer_memory_of_both_generations(tmp_path: Path, place: str) -> None:
    (tmp_path / place).mkdir(parents=True)
    (tmp_path / place / "version").write_text("1.3\n")
    assert has_peer_memory(tmp_path)
