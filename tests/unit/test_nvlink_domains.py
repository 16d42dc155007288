"""Which GPUs NVLinks join across hosts (MNNVL), as NCCL decides: the fabric by NVML, and variables."""

import pytest

from ddpdiag.nccl_rings import allows_mnnvl
from ddpdiag.probes.gpu.links import Fabric


@pytest.mark.parametrize(
    ("fabric", "domain"),
    [
        (Fabric(state=3, cluster="5f2c", clique=0x7FFE), "5f2c.32766"),
        (Fabric(state=3, cluster="0", clique=0), None),
        (Fabric(state=2, cluster="5f2c", clique=1), None),
        (Fabric(state=3), None),
        (Fabric(), None),
    ],
    ids=["completed", "ends with the host", "in progress", "driver does not say", "no fabric"],
)
def test_a_domain_is_a_completed_fabric_with_a_cluster(fabric: Fabric, domain: str | None) -> None:
    assert fabric.domain == domain


@pytest.mark.parametrize(
    "setting", ["NCCL_MNNVL_ENABLE=0", "NCCL_P2P_DISABLE=1", "NCCL_P2P_LEVEL=LOC", "NCCL_CUMEM_ENABLE=0"]
)
def test_variables_that_keep_nccl_from_nvlinks_between_hosts(setting: str) -> None:
    assert not allows_mnnvl(dict([setting.split("=")]))


def test_other_variables_do_not() -> None:
    assert allows_mnnvl({"NCCL_MNNVL_ENABLE": "1", "NCCL_P2P_DISABLE": "0", "NCCL_P2P_LEVEL": "SYS"})
