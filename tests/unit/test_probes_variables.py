"""What is recorded of the environment, and what never is."""

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpdiag.probes.host.environment import MAX_VALUE_CHARACTERS, is_recorded, nccl_files, recorded_variables
from ddpdiag.probes.host.library_names import names_in, unread_variables


def test_what_steers_communication_is_recorded_and_secrets_are_not():
    names = ["NCCL_DEBUG", "TORCH_NCCL_BLOCKING_WAIT", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"]
    others = ["HOME", "AWS_REGION", "TORCH_HUB_TOKEN", "NCCL_SECRET", "UCX_password", "FI_AUTH_KEY", "UCX_PSK"]
    assert [*filter(is_recorded, [*names, *others, "FI_PWD", "TORCH_PASS"])] == names


@given(st.sampled_from(["NCCL_", "TORCH_", "GLOO_", ""]), st.sampled_from(["TOKEN", "Secret", "PASSWORD", "api_KEY"]))
def test_no_prefix_saves_a_secret(prefix, word):
    assert recorded_variables({f"{prefix}{word}": "x", f"{prefix}A_{word}_B": "x"}) == {}


def test_credentials_in_values_are_hidden_and_long_values_are_cut():
    env = {"TORCH_HOME": "http://user:pw@host/x", "TORCH_MIRROR": "https://tok@host", "NCCL_SOCKET_IFNAME": "=eth0"}
    assert recorded_variables({**env, "NCCL_TOPO": "x" * 9999}) == {
        "NCCL_SOCKET_IFNAME": "=eth0",
        "NCCL_TOPO": "x" * MAX_VALUE_CHARACTERS,
        "TORCH_HOME": "http://***@host/x",
        "TORCH_MIRROR": "https://***@host",
    }


def test_nccl_files_are_read_without_comments_and_secrets(tmp_path):
    (tmp_path / ".nccl.conf").write_text("# old workaround\nNCCL_P2P_DISABLE=1\nMY_TOKEN=x\n")
    (tmp_path / "nccl.conf").write_text("NCCL_SOCKET_IFNAME==ens1f0\n")
    assert nccl_files({"HOME": str(tmp_path)}, etc=tmp_path) == {
        f"{tmp_path}/.nccl.conf": {"NCCL_P2P_DISABLE": "1"},
        f"{tmp_path}/nccl.conf": {"NCCL_SOCKET_IFNAME": "=ens1f0"},
    }


def test_a_named_file_replaces_the_one_at_home_and_empty_ones_are_not_listed(tmp_path):
    (tmp_path / ".nccl.conf").write_text("NCCL_ALGO=Ring\n")
    (tmp_path / "site.conf").write_text("NCCL_ALGO=Tree\n")
    (tmp_path / "nccl.conf").write_text("\n")
    env = {"HOME": str(tmp_path), "NCCL_CONF_FILE": f"{tmp_path}/site.conf"}
    assert nccl_files(env, etc=tmp_path) == {f"{tmp_path}/site.conf": {"NCCL_ALGO": "Tree"}}
    assert nccl_files({}, etc=tmp_path) == {}


def library(path: Path, *constants: str, section: str = ".rodata") -> Path:
    """A 64-bit ELF file with these constants, each ended by a zero, in its section."""
    data = b"\0".join(constant.encode() for constant in constants) + b"\0"
    names = f"\0{section}\0.shstrtab\0".encode()
    begin = 64
    headers = begin + len(data) + len(names)
    rows = [(0, 0, 0), (1, begin, len(data)), (2 + len(section), begin + len(data), len(names))]
    table = b"".join(struct.pack("<I20xQQ24x", *row) for row in rows)
    head = b"\x7fELF\x02".ljust(40, b"\0") + struct.pack("<Q", headers) + b"\0" * 10 + struct.pack("<HHH", 64, 3, 2)
    path.write_bytes(head + data + names + table)
    return path


NCCL = ("NCCL_BUFFSIZE", "tail of another: NCCL_P2P_DISABLE", "Set NCCL_OLD to continue.", "NCCL_SOCKET_IFNAME")


def test_names_are_those_that_end_a_constant_of_the_section(tmp_path):
    assert names_in(library(tmp_path / "libnccl.so.2", *NCCL)) == {"NCCL_BUFFSIZE", "NCCL_P2P_DISABLE", NCCL[-1]}
    assert names_in(library(tmp_path / "libtorch_cuda.so", "TORCH_NCCL_X", "TORCH_FR_Y")) == {
        "TORCH_NCCL_X",
        "TORCH_FR_Y",
    }
    assert names_in(library(tmp_path / "libother.so", *NCCL, section=".comment")) == frozenset()


@pytest.mark.parametrize(
    "content", [b"", b"\x7fELF\x02", b"\x7fELF\x02" + b"\xff" * 200, b"#!/bin/sh\nNCCL_BUFFSIZE\0"]
)
def test_a_file_that_is_no_library_has_no_names(tmp_path, content):
    (tmp_path / "libnccl.so.2").write_bytes(content)
    assert names_in(tmp_path / "libnccl.so.2") == names_in(tmp_path / "absent") == frozenset()


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("NCCL_P2P_DISALBE", "NCCL_P2P_DISABLE"),
        ("nccl_p2p_disable", None),  # no variable of NCCL
        ("NCCL_socket_IFNAME", "NCCL_SOCKET_IFNAME"),
        ("NCCL_OLD", ""),
        ("NCCL_RINGS", ""),
        ("NCCL_P2P_DISABLE", None),
        ("NCCL_PLUGIN_X", None),
        ("NCCL_PLUGIN_Y", None),
        ("NCCL_OFI_DISABLE_GDR", None),
        ("NCCL_VERSION", None),
        ("TORCH_NCCL_BLOCKING", None),  # no CUDA build of torch, so its names are not known
    ],
)
def test_an_unread_variable_is_named_with_the_nearest_name(tmp_path, name, nearest):
    library(tmp_path / "libnccl.so.2", *NCCL)
    library(tmp_path / "libnccl-net.so", "NCCL_PLUGIN_X")
    plugin = library(tmp_path / "tuner.so", "NCCL_PLUGIN_Y")
    expected = {} if nearest is None else {name: nearest}
    env = {"LD_LIBRARY_PATH": f"/absent:{tmp_path}", "NCCL_TUNER_PLUGIN": str(plugin)}
    assert unread_variables([name], env) == expected
