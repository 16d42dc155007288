"""What rank 0 may set in the processes of other ranks: what checks set, and nothing that runs code."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from ddpdiag.checks.p2p.fallback import variables
from ddpdiag.codec import read_recording
from ddpdiag.model.trial import refused_override

RECORDINGS = sorted((Path(__file__).parent.parent / "recordings").glob("*.jsonl"))


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_whatever_a_check_has_ever_set_is_allowed(path: Path) -> None:
    for trial in read_recording([path]).trials:
        assert refused_override(trial.env) is None


OVERRIDES = [
    *variables.INSIDE_HOSTS,
    *variables.BETWEEN_HOSTS,
    *variables.interface_overrides(["eth0", "ib0.8001", "enp1s0f0np0"]),
    variables.Override("no NCCL_ALGO", {"NCCL_ALGO": None}),
]


@pytest.mark.parametrize("env", [override.env for override in OVERRIDES])
def test_so_is_each_step_of_the_search_for_what_works(env: Mapping[str, str | None]) -> None:
    assert refused_override(env) is None


@pytest.mark.parametrize(
    "said",
    [
        "PYTHONPATH=/tmp/evil", "LD_PRELOAD=/tmp/evil.so", "NCCL_NET_PLUGIN=/tmp/evil.so", "NCCL_NET=evil",
        "NCCL_TUNER_PLUGIN=evil", "NCCL_CONF_FILE=/tmp/evil.conf", "NCCL_DEBUG_FILE=/tmp/file", "PATH=/tmp",
        "OMP_NUM_THREADS=1", "NCCL_SOCKET_IFNAME=a;b", "NCCL_IB_DISABLE=1\n", "GLOO_SOCKET_IFNAME=\u0661", "X=",
    ],
)  # fmt: skip
def test_nothing_else_is(said: str) -> None:
    name, _, value = said.partition("=")
    assert refused_override({"NCCL_IB_DISABLE": "1", name: value}) == said


def test_only_variables_of_nccl_may_be_unset() -> None:
    assert refused_override({"NCCL_ANYTHING": None}) is None
    assert refused_override({"PATH": None}) == "PATH="
