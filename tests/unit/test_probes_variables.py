"""What is recorded of the environment, and what never is."""

from hypothesis import given
from hypothesis import strategies as st

from ddpdiag.probes.host.environment import MAX_VALUE_CHARACTERS, is_recorded, nccl_files, recorded_variables


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
