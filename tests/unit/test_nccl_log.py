"""NCCL's log, in the forms of several versions."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpdiag.probes.net.nccl_log import MAX_BYTES, Hop, Log, parse, read_log

LOGS = Path(__file__).with_name("nccl_logs")
KNOWN = sorted(LOGS.glob("*.log"))
LINES = [line for path in KNOWN for line in path.read_text().splitlines()]


def log(name: str) -> Log:
    found = read_log(LOGS / name)
    assert found is not None
    return found


def line(message: str) -> Log:
    return parse(f"h:1:2 [0] NCCL INFO {message}\n")


def way(text: str) -> Hop:
    (hop,) = line(f"Channel 00/0 : 0[0] -> 1[1] {text}").hops
    return hop


def test_infiniband_with_gpudirect_and_nvls() -> None:
    found = log("ib-gdr-nvls-2.27.log")
    assert (found.version, found.network) == ("2.27.7", "IB")
    assert found.gdr == {"mlx5_0": True, "mlx5_1": True}
    assert (found.nvls, found.nvls_channels, found.hosts) == (True, 16, 2)
    assert found.hops == (
        Hop(source=9, target=0, kind="NET", name="IB", gdr=True, devices=(0, 1)),
        Hop(source=0, target=9, kind="NET", name="IB", gdr=True, devices=(0,)),
        Hop(source=0, target=7, kind="P2P", name="CUMEM"),
    )
    assert found.settings == {"NCCL_IB_HCA": "mlx5"}


def test_gpus_on_one_switch_are_all_linked() -> None:
    links = log("ib-gdr-nvls-2.27.log").nvlinked
    assert set(links) == set(range(8))
    assert links[0] == (1, 2, 3, 4, 5, 6, 7)


def test_sockets_instead_of_infiniband() -> None:
    found = log("sockets-2.18.log")
    assert (found.version, found.network) == ("2.18.6", "Socket")
    assert found.sockets == ("ib0", "eth0")
    assert found.notes == ("Failed to open libibverbs.so[.1]",)
    assert (found.nvls, found.nvls_channels) == (False, 0)
    assert found.warnings == ("socketProgress: Connection closed by remote peer alpha1.ibnet<53735>",)
    assert [hop.text for hop in found.hops] == ["NET/Socket", "NET/Socket", "P2P/IPC"]
    assert found.hops[0].devices == (0, 1)


def test_shared_memory_between_gpus_with_bridges() -> None:
    found = log("shm-2.12.log")
    assert [hop.text for hop in found.hops] == ["SHM/direct", "SHM/direct"]
    assert found.nvlinked == {0: (1,), 1: (0,), 2: (3,), 3: (2,)}
    assert found.settings == {"NCCL_P2P_DISABLE": "1"}, "how the log was asked for is no news"
    assert found.notes == ("NET/IB : No device found.",)
    assert found.nvls is None, "that version does not say"


def test_a_plugin_with_a_space_in_its_name_and_the_nic_of_another_rank() -> None:
    found = log("efa-2.21.log")
    assert found.network == "AWS Libfabric"
    assert [hop.text for hop in found.hops] == [
        "NET/AWS Libfabric/GDRDMA",
        "NET/AWS Libfabric/GDRDMA",
        "P2P/indirect",
        "P2P/direct pointer",
    ]


def test_ways_in_all_forms() -> None:
    assert way("via P2P/MNNVL").text == "P2P/MNNVL"
    assert way("via P2P/CUMEM/read/CE").text == "P2P/CUMEM"
    assert way("via SHM/CE/direct").text == "SHM/CE"
    assert way("[send] via NET/IBext_v8/6").text == "NET/IBext_v8"
    assert way("[receive] via NET/IB/3/GDRDMA(PCI)").gdr


def test_lines_in_other_forms() -> None:
    assert line("NVLS multicast support is not available on dev 0 (NVLS_NCHANNELS 0)").nvls is False
    assert line("Assigned NET plugin Socket to comm").network == "Socket"
    assert line("2 coll channels, 2 collnet channels, 4 nvls channels, 2 p2p channels").nvls_channels == 4
    assert line("RoCE : NVLS").nvls is None
    assert parse("[0] [2026-01-02 03:04:05] h:1:2 [0] NCCL INFO Using network IB\r\n").network == "IB"
    assert parse("NCCL version 2.30.7+cuda13.0\n").version == "2.30.7"


def test_the_communicator_behind_a_path_of_rccl_is_no_part_of_its_name() -> None:
    assert way("via P2P/IPC comm 0x7f00 nRanks 08").text == "P2P/IPC"
    assert way("[send] via NET/IB/0/GDRDMA comm 0x7f00 nRanks 08").text == "NET/IB/GDRDMA"


def test_a_network_that_reduces_is_read() -> None:
    assert line("CollNet 00/0 : 0 [send] via COLLNET/SHARP/0/GDRDMA").collnet == "SHARP/GDRDMA"
    assert line("CollNet 01/1 : 0 [receive] via COLLNET/IB/0").collnet == "IB"
    assert line("NVLS comm 0x1 headRank 0 nHeads 8").collnet is None


def test_the_rank_whose_adapter_is_used_is_no_part_of_the_adapter() -> None:
    found = way("[send] via NET/IBext/0(8)")
    assert (found.text, found.devices) == ("NET/IBext", (0,))


def begun(size: int, thread: int = 3, function: str = "ncclCommInitRankConfig ") -> str:
    told = f"{function}comm 0x{size} rank 0 nranks {size} cudaDev 0 nvmlDev 0 busId 18000 commId 0x1 - Init START"
    return f"h:1:{thread} [0] NCCL INFO {told}\n"


def hop(source: int, target: int, thread: int = 3) -> str:
    return f"h:1:{thread} [0] NCCL INFO Channel 00/0 : {source}[0] -> {target}[1] via P2P/CUMEM\n"


@pytest.mark.parametrize("function", ["", "ncclCommInitRank ", "[Rank 0] ncclCommInitRankConfig "])
def test_the_paths_of_a_smaller_communicator_are_not_those_of_the_ranks(function: str) -> None:
    one_after_the_other = begun(8, function=function) + hop(0, 7) + begun(2, function=function) + hop(1, 0)
    assert [(own.source, own.target) for own in parse(one_after_the_other).hops] == [(0, 7)]
    side_by_side = begun(2, 4, function) + begun(8, 3, function) + hop(1, 0, 4) + hop(0, 7, 3)
    assert [(own.source, own.target) for own in parse(side_by_side).hops] == [(0, 7)]


def test_a_log_that_does_not_say_when_a_communicator_begins_is_read_whole() -> None:
    assert len(parse(hop(0, 1) + hop(1, 0)).hops) == 2


def test_the_version_of_another_is_not_taken_for_ours() -> None:
    warned = "h:1:2 [0] src/x.cc:1 (f) NCCL WARN compiled with NCCL version 2.1.0, but is running with"
    assert parse(warned).version is None


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
    path.write_bytes(b"x NCCL INFO Using network IB\n" + b" " * MAX_BYTES + b"\nx NCCL INFO NCCL version 2.30.7\n")
    found = read_log(path)
    assert found == Log(network="IB")


def test_many_warnings_are_cut() -> None:
    text = "".join(f"h NCCL WARN {number} {'x' * 500}\n" for number in range(100))
    assert len(parse(text).warnings) == 8
    assert max(map(len, parse(text).warnings)) == 200


@given(st.lists(st.sampled_from(LINES), max_size=8), st.text(max_size=60), st.integers(0, 400))
def test_no_text_raises(lines: list[str], noise: str, cut: int) -> None:
    text = "\n".join(lines)
    parse(text[:cut] + noise + text[cut:])
    parse(f"NCCL INFO {noise}")


@settings(max_examples=50)
@given(st.binary(max_size=300))
def test_no_bytes_raise(content: bytes) -> None:
    parse(b"NCCL INFO Channel 00 : ".decode() + content.decode(errors="replace"))
