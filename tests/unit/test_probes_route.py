"""Which ports a collective takes to other hosts."""

from pathlib import Path

import pytest

from ddpdiag.probes.net.adapters import Card, nccl_allows_port, outgoing_card, rdma_card

NDR = "400 Gb/sec (4X NDR)"


def add_port(root: Path, adapter: str, *, port: int = 1, state: str = "4: ACTIVE", rate: str = NDR) -> None:
    folder = root / "class" / "infiniband" / adapter / "ports" / str(port)
    folder.mkdir(parents=True)
    (folder / "state").write_text(f"{state}\n")
    (folder / "rate").write_text(f"{rate}\n")


@pytest.fixture
def rails(tmp_path):
    """8 ports of 400 Gbit/s, one that is down and one of 100 Gbit/s."""
    for number in range(8):
        add_port(tmp_path, f"mlx5_{number}")
    add_port(tmp_path, "mlx5_8", state="1: DOWN")
    add_port(tmp_path, "mlx5_bond_0", rate="100 Gb/sec (4X EDR)")
    return tmp_path


def test_ports_are_counted_and_the_slowest_is_known(rails):
    card = rdma_card(rails)
    assert card is not None
    assert (card.ports, card.bytes_per_s, card.port_bytes_per_s) == (9, 412.5e9, 12.5e9)


def test_a_host_without_infiniband_has_no_card(tmp_path):
    assert rdma_card(tmp_path) is None


@pytest.mark.parametrize(
    ("rule", "ports"),
    [
        ("mlx5", 9),
        ("mlx5_1", 1),
        ("mlx5_1,mlx5_2", 2),
        ("mlx5_1:1,mlx5_2:2", 1),
        ("=mlx5_bond", 0),
        ("=mlx5_bond_0", 1),
        ("^mlx5_bond", 8),
        ("^=mlx5_bond", 9),
        ("^mlx5_0,mlx5_1", 7),
        ("", 9),
        ("^", 0),
    ],
)
def test_nccl_ib_hca_chooses_the_ports(rails, rule, ports):
    card = rdma_card(rails, rule)
    assert (card.ports if card else 0) == ports


def test_a_port_has_its_number_behind_a_colon():
    assert nccl_allows_port("mlx5_0:2", "mlx5_0", "2")
    assert not nccl_allows_port("mlx5_0:2", "mlx5_0", "1")
    assert not nccl_allows_port("^mlx5_0:2", "mlx5_0", "2")
    assert nccl_allows_port("=mlx5_0:2:7:1", "mlx5_0", "2")  # rail and plane, which say nothing of speed
    assert nccl_allows_port("mlx5_0:", "mlx5_0", "2")


def test_both_ports_of_an_adapter_count(tmp_path):
    add_port(tmp_path, "mlx5_0", port=1)
    add_port(tmp_path, "mlx5_0", port=2)
    assert rdma_card(tmp_path) == Card("mlx5_0", 100e9, 2, 50e9)


def test_a_port_that_does_not_say_how_fast_it_is_leaves_all_unknown(tmp_path):
    add_port(tmp_path, "mlx5_0")
    add_port(tmp_path, "mlx5_1", rate="")
    assert rdma_card(tmp_path) == Card("mlx5_0+mlx5_1", None, 2, None)
    assert rdma_card(tmp_path, "mlx5_1") is None


def test_nccl_finds_its_variables_in_the_environment_and_in_its_file(rails):
    assert outgoing_card("nccl", {"NCCL_IB_HCA": "mlx5_3"}, rails) == Card("mlx5_3", 50e9, 1, 50e9)
    conf = rails / "nccl.conf"
    conf.write_text("NCCL_IB_HCA=mlx5_4\n")
    assert outgoing_card("nccl", {"NCCL_CONF_FILE": str(conf)}, rails) == Card("mlx5_4", 50e9, 1, 50e9)
    both = {"NCCL_CONF_FILE": str(conf), "NCCL_IB_HCA": "mlx5_5"}
    assert outgoing_card("nccl", both, rails) == Card("mlx5_5", 50e9, 1, 50e9)


def test_infiniband_that_is_disabled_or_not_for_gloo_is_not_taken(rails):
    for library, env in (("nccl", {"NCCL_IB_DISABLE": "1"}), ("gloo", {}), ("nccl", {"NCCL_IB_HCA": "none"})):
        card = outgoing_card(library, env, rails)
        assert card is None or not card.name.startswith("mlx5")
