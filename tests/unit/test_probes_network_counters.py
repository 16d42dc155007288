"""What network ports count, over a tree like /sys."""

from pathlib import Path

import pytest
from test_probes_route import add_port

from ddpdiag.probes.net import adapters

SNMP = """\
Ip: Forwarding DefaultTTL InReceives
Ip: 1 64 12345
Tcp: RtoAlgorithm RtoMin RtoMax MaxConn ActiveOpens InSegs OutSegs RetransSegs InErrs OutRsts InCsumErrors
Tcp: 1 200 120000 -1 5 109071776 108880673 172011 503 5580074 12
Udp: InDatagrams
Udp: 7
"""


def write(folder: Path, **numbers: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, number in numbers.items():
        (folder / name).write_text(f"{number}\n")


def add_interface(root: Path, name: str, index: int, *, pci: str | None = None, **numbers: object) -> Path:
    folder = root / "class" / "net" / name
    write(folder, **{"ifindex": index, "operstate": "up", "carrier": 1, "carrier_down_count": 0} | numbers)
    write(folder / "statistics", rx_crc_errors=0, rx_frame_errors=0, rx_dropped=9)
    if pci is not None:
        device = root / "devices" / "pci0000:00" / pci / "virtio0"
        device.mkdir(parents=True)
        (folder / "device").symlink_to(device)
    return folder


def test_an_interface_with_its_card(tmp_path: Path) -> None:
    folder = add_interface(tmp_path, "eth0", 2, pci="0000:1b:00.0", carrier_down_count=3)
    write(folder / "statistics", rx_crc_errors=5)
    (found,) = adapters.interface_counters(tmp_path, ["eth0"], {"eth0": 2})
    assert found == adapters.PortCounters(
        name="eth0",
        pci="0000:1b:00.0",
        up=True,
        counters={"carrier_down_count": 3, "rx_crc_errors": 5, "rx_frame_errors": 0},
    )


@pytest.mark.parametrize(
    ("carrier", "state", "up"),
    [("1", "up", True), ("0", "down", False), (None, "down", False), (None, "unknown", None)],
)
def test_whether_the_link_is_up(tmp_path: Path, carrier: str | None, state: str, up: bool | None) -> None:
    folder = add_interface(tmp_path, "eth0", 2, operstate=state)
    (folder / "carrier").unlink()
    if carrier is not None:
        (folder / "carrier").write_text(carrier)
    (found,) = adapters.interface_counters(tmp_path, ["eth0"], {"eth0": 2})
    assert found.up is up


def test_what_lies_below_is_looked_at_once(tmp_path: Path) -> None:
    for index, name in enumerate(("eth1", "eth2", "bond0", "bond0.7"), start=2):
        add_interface(tmp_path, name, index)
    net = tmp_path / "class" / "net"
    for name, below in (("bond0", "eth1"), ("bond0", "eth2"), ("bond0.7", "bond0")):
        (net / name / f"lower_{below}").symlink_to(net / below)
    indices = {"eth1": 2, "eth2": 3, "bond0": 4, "bond0.7": 5}
    found = {port.name: port.below for port in adapters.interface_counters(tmp_path, ["bond0.7", "eth1"], indices)}
    assert found == {"bond0.7": ("bond0",), "bond0": ("eth1", "eth2"), "eth1": (), "eth2": ()}


def test_another_network_namespace_and_a_container_without_sys_show_nothing(tmp_path: Path) -> None:
    add_interface(tmp_path, "eth0", 2)
    assert list(adapters.interface_counters(tmp_path, ["eth0", "eth7"], {"eth0": 34, "eth7": 3})) == []
    assert list(adapters.interface_counters(tmp_path / "missing", ["eth0"], {"eth0": 2})) == []
    assert list(adapters.rdma_counters(tmp_path / "missing", ())) == []


@pytest.fixture
def rails(tmp_path: Path) -> Path:
    """mlx5_0 counts everything, and has an interface; rxe0 is made of software; mlx5_2 is down and has no counters."""
    infiniband = tmp_path / "class" / "infiniband"
    for adapter, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_2", "1: DOWN"), ("rxe0", "4: ACTIVE")):
        add_port(tmp_path, adapter, state=state)
    port = infiniband / "mlx5_0" / "ports" / "1"
    write(port / "counters", symbol_error=10, link_downed=1, port_rcv_errors="N/A (no PMA)", port_xmit_data=1 << 40)
    write(port / "hw_counters", rnr_nak_retry_err=6, lifespan=10)
    write(infiniband / "rxe0" / "ports" / "1" / "hw_counters", link_downed=4)
    device = tmp_path / "devices" / "pci0000:00" / "0000:1b:00.0"
    (device / "net" / "ens1f0").mkdir(parents=True)
    (infiniband / "mlx5_0" / "device").symlink_to(device)
    return tmp_path


def test_rdma_ports(rails: Path) -> None:
    first, second, soft = adapters.rdma_counters(rails, ["mlx5_0:1"])
    assert first == adapters.PortCounters(
        name="mlx5_0:1",
        rdma=True,
        pci="0000:1b:00.0",
        up=True,
        used_by_nccl=True,
        below=("ens1f0",),
        counters={"symbol_error": 10, "link_downed": 1},
    )
    assert second == adapters.PortCounters(name="mlx5_2:1", rdma=True, up=False)
    assert (soft.up, soft.used_by_nccl, soft.counters) == (True, False, {"link_downed": 4})


@pytest.mark.parametrize(
    ("env", "taken"),
    [
        ({}, ("mlx5_0:1", "rxe0:1")),
        ({"NCCL_IB_HCA": "mlx5"}, ("mlx5_0:1",)),
        ({"NCCL_IB_HCA": "^mlx5"}, ("rxe0:1",)),
        ({"NCCL_IB_DISABLE": "1"}, ()),
    ],
)
def test_ports_that_nccl_takes(rails: Path, env: dict[str, str], taken: tuple[str, ...]) -> None:
    assert adapters.nccl_ports(env, rails) == taken


@pytest.mark.parametrize(
    ("text", "counters"),
    [
        (SNMP, {"InSegs": 109071776, "OutSegs": 108880673, "RetransSegs": 172011, "InCsumErrors": 12}),
        ("", {}),
        ("Tcp: InSegs\n", {}),
        ("Tcp: InSegs InCsumErrors\nTcp: x\n", {}),
        ("Udp: InSegs\nUdp: 1\n", {}),
        ("Tcp: InSegs\nTcp: 5\n", {"InSegs": 5}),
        ("Tcp: InSegs\nTcp: 5\nTcpExt: X TCPDSACKRecv\nTcpExt: 1 3\n", {"InSegs": 5, "TCPDSACKRecv": 3}),
    ],
)
def test_counters_of_tcp_that_the_kernel_shows(text: str, counters: dict[str, int]) -> None:
    assert adapters.tcp_counters(text) == counters


def test_one_host_alone_looks_at_rdma_only(rails: Path) -> None:
    steps: list[str] = []
    look = adapters.read_network(None, {"DDPDIAG_SYSFS": str(rails)}, steps.append)
    assert [port.name for port in look.ports] == ["mlx5_0:1", "mlx5_2:1", "rxe0:1"]
    assert (look.route, look.tcp, steps) == (None, {}, ["RDMA ports"])


def test_with_others_there_are_interfaces_and_tcp() -> None:
    look = adapters.read_network("", {}, lambda step: None)
    assert "lo" not in {port.name for port in look.ports}
    assert look.tcp["InSegs"] >= 0
