"""NCCL's log, in the forms of several versions."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpdiag.probes.net.nccl_log import MAX_BYTES, Hop, NcclLog, parse_log, read_log

LOGS = Path(__file__).with_name("nccl_logs")
KNOWN = sorted(LOGS.glob("*.log"))
LINES = [line for path in KNOWN for line in path.read_text().splitlines()]


def log(name: str) -> NcclLog:
    found = read_log(LOGS / name)
    assert found is not None
    return found


def line(message: str) -> NcclLog:
    return parse_log(f"h:1:2 [0] NCCL INFO {message}\n")


def way(text: str) -> Hop:
    (hop,) = line(f"Channel 00/0 : 0[0] -> 1[1] {text}").hops
    return hop


def test_infiniband_with_gpudirect_and_nvls() -> None:
    found = log("ib-gdr-nvls-2.27.log")
    assert found.nvls_channels == 16
    assert found.hops[:2] == (
        Hop(source=9, target=0, kind="NET", name="IB", gdr=True, devices=(0, 1)),
        Hop(source=0, target=9, kind="NET", name="IB", gdr=True, devices=(0,)),
    )
    assert found.settings == {"NCCL_IB_HCA": "mlx5"}


def test_sockets_instead_of_infiniband() -> None:
    found = log("sockets-2.18.log")
    assert (found.sockets, found.nvls_channels) == (("ib0", "eth0"), 0)
    assert found.notes == ("Failed to open libibverbs.so[.1]",)
    assert found.warnings == ("socketProgress: Connection closed by remote peer alpha1.ibnet<53735>",)
    assert [hop.text for hop in found.hops] == ["NET/Socket", "NET/Socket", "P2P/IPC"]
    assert found.hops[0].devices == (0, 1)


def test_shared_memory_between_gpus_with_bridges() -> None:
    found = log("shm-2.12.log")
    assert [hop.text for hop in found.hops] == ["SHM/direct", "SHM/direct"]
    assert found.settings == {"NCCL_P2P_DISABLE": "1"}, "how the log was asked for is no news"
    assert found.notes == ("NET/IB : No device found.",)


def test_a_plugin_with_a_space_in_its_name_and_the_nic_of_another_rank() -> None:
    expected = {"NET/AWS Libfabric/GDRDMA", "P2P/indirect", "P2P/direct pointer"}
    assert {hop.text for hop in log("efa-2.21.log").hops} == expected


@pytest.mark.parametrize(
    ("text", "path", "devices"),
    [
        ("via P2P/MNNVL", "P2P/MNNVL", ()),
        ("via P2P/CUMEM/read/CE", "P2P/CUMEM", ()),
        ("via SHM/CE/direct", "SHM/CE", ()),
        ("[send] via NET/IBext_v8/6", "NET/IBext_v8", (6,)),
        ("[receive] via NET/IB/3/GDRDMA(PCI)", "NET/IB/GDRDMA", (3,)),
        # The rank whose adapter is used is no part of it.
        ("[send] via NET/IBext/0(8)", "NET/IBext", (0,)),
    ],
)
def test_paths_in_all_forms(text: str, path: str, devices: tuple[int, ...]) -> None:
    assert (way(text).text, way(text).devices) == (path, devices)


def test_secrets_and_our_own_settings_are_left_out() -> None:
    assert line("NCCL_SECRET_KEY set by environment to abc").settings == {}
    assert line("NCCL_DEBUG_FILE set by environment to /tmp/x").settings == {}


def test_a_missing_an_empty_and_a_foreign_file_say_nothing(tmp_path: Path) -> None:
    assert read_log(tmp_path / "none.log") is None
    for content in (b"", b"hello\n", b"\xff\x00\xfe" * 100):
        (tmp_path / "log").write_bytes(content)
        assert read_log(tmp_path / "log") is None


def test_only_the_start_of_a_huge_log_is_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(
        b"x NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1\n"
        + b" " * MAX_BYTES
        + b"\nx NCCL INFO NCCL_ALGO set to Ring\n"
    )
    assert read_log(path) == NcclLog(sockets=("eth0",))


def test_many_warnings_are_cut() -> None:
    text = "".join(f"h NCCL WARN {number} {'x' * 500}\n" for number in range(100))
    assert len(parse_log(text).warnings) == 8
    assert max(map(len, parse_log(text).warnings)) == 200


@given(st.lists(st.sampled_from(LINES), max_size=8), st.text(max_size=60), st.integers(0, 400))
def test_no_text_raises(lines: list[str], noise: str, cut: int) -> None:
    text = "\n".join(lines)
    parse_log(text[:cut] + noise + text[cut:])
    parse_log(f"NCCL INFO {noise}")


@settings(max_examples=50)
@given(st.binary(max_size=300))
def test_no_bytes_raise(content: bytes) -> None:
    parse_log(b"NCCL INFO Channel 00 : ".decode() + content.decode(errors="replace"))
