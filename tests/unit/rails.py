"""Made-up hosts with RDMA adapters: a tree like /sys, and what HST007 reads of it."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from ddpdiag.checks.host.rdma_ports import Data, read_rdma_data

# (address, type, interface): "" where the kernel hides it from a container.
ROCE = (
    ("fe80:0000:0000:0000:0000:00ff:fe00:0001", "IB/RoCE v1", "eth2"),
    ("fe80:0000:0000:0000:0000:00ff:fe00:0001", "RoCE v2", "eth2"),
    ("0000:0000:0000:0000:0000:ffff:0a00:0001", "IB/RoCE v1", "eth2"),
    ("0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v2", "eth2"),
)
# The interface has no address.
LINK_LOCAL = ROCE[:2]


class Rail(NamedTuple):
    """An adapter with one port; `place` says which switch it shares with a GPU, None that it is no PCI device."""

    name: str
    place: int | None = 0
    layer: str = "InfiniBand"
    state: str = "4: ACTIVE"
    physical: str = "5: LinkUp"
    rate: str = "400 Gb/sec (4X NDR)"
    firmware: str = "28.39.1002"
    model: str = "MT4129"
    board: str = "MT_0000000838"
    driver: str = "mlx5_core"
    kind: str = "1: CA"
    gids: tuple[tuple[str, str, str], ...] = ()
    net: str = ""
    virtual: bool = False
    slot: int = 0


DOWN = {"state": "1: DOWN", "physical": "2: Polling", "rate": "10 Gb/sec (4X SDR)"}


def rails(count: int = 8, **same) -> tuple[Rail, ...]:
    """As many adapters, each beside a GPU of its own."""
    return tuple(Rail(f"mlx5_{number}", number, **same) for number in range(count))


def roce(count: int = 8, **same) -> tuple[Rail, ...]:
    """The same over Ethernet, each with GIDs of both versions."""
    return rails(count, layer="Ethernet", **{"gids": ROCE, **same})


def with_rail(own: tuple[Rail, ...], number: int, **other) -> tuple[Rail, ...]:
    """The same adapters, of which one differs."""
    return tuple(rail._replace(**other) if place == number else rail for place, rail in enumerate(own))


@cache
def host(own: tuple[Rail, ...] = (), *, gpus: int = 8, model: str = "0x2330", **settings: str) -> Data:
    """What HST007 reads on such a host; `settings` are variables."""
    with TemporaryDirectory() as folder:
        tree(Path(folder), own, gpus, model)
        return read_rdma_data({"HOME": folder, "DDPDIAG_SYSFS": folder, **settings}, lambda _: None)


def tree(root: Path, own: tuple[Rail, ...], gpus: int = 8, model: str = "0x2330") -> None:
    """Fill `root` like /sys."""
    (root / "class").mkdir(parents=True)
    (root / "bus" / "pci" / "devices").mkdir(parents=True)
    for number in range(gpus):
        _identify(_pci(root, number, downstream=1), "0x10de", model, "0x030200")
    for rail in own:
        _add(root, rail)


def _pci(root: Path, place: int, *, downstream: int) -> Path:
    """A PCI device behind a switch of its own root port: four switches on each of two sockets."""
    base = 0x10 * (place + 1)
    port = f"{base + 2:02x}:{downstream:02x}.0"
    parts = (
        f"pci0000:{base:02x}",
        f"{base:02x}:01.0",
        f"{base + 1:02x}:00.0",
        port,
        f"{base + 3 + downstream:02x}:00.0",
    )
    folder = root.joinpath("devices", parts[0], *(f"0000:{part}" for part in parts[1:]))
    folder.mkdir(parents=True)
    write(folder, numa_node=str(place // 4))
    (root / "bus" / "pci" / "devices" / folder.name).symlink_to(folder)
    return folder


def _identify(folder: Path, vendor: str, device: str, kind: str) -> None:
    write(folder, vendor=vendor, device=device, **{"class": kind})


def _add(root: Path, rail: Rail) -> None:
    device = root / "class" / "infiniband" / rail.name
    port = device / "ports" / "1"
    port.mkdir(parents=True)
    write(device, hca_type=rail.model, board_id=rail.board, fw_ver=rail.firmware, node_type=rail.kind)
    write(port, link_layer=rail.layer, state=rail.state, phys_state=rail.physical, rate=rail.rate)
    if rail.place is not None:
        folder = _pci(root, rail.place, downstream=2 * rail.slot)
        _identify(folder, "0x15b3", "0x1021", "0x020700")
        (folder / "driver").symlink_to(f"../../../bus/pci/drivers/{rail.driver}")
        (device / "device").symlink_to(folder)
        if rail.virtual:
            (folder / "physfn").mkdir()
        if rail.net:
            (folder / "net" / rail.net).mkdir(parents=True)
    if rail.gids:
        _add_gids(port, rail.gids)


def _add_gids(port: Path, gids: tuple[tuple[str, str, str], ...]) -> None:
    """A table with one free place: the kernel refuses to tell its type."""
    places = (port / "gids", port / "gid_attrs" / "types", port / "gid_attrs" / "ndevs")
    for folder in places:
        folder.mkdir(parents=True)
    for number, gid in enumerate((*gids, (":".join(["0000"] * 8), "", ""))):
        for folder, text in zip(places, gid, strict=True):
            if text:
                write(folder, **{str(number): text})


def write(folder: Path, **files: str) -> None:
    """Files that hold one line."""
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")
