"""The place that preflight() of Lightning takes from a trainer. tests/processes/test_frameworks.py runs real ones."""

from types import SimpleNamespace

import pytest

from ddpdiag import api
from ddpdiag.integrations.lightning import preflight


class Environment(SimpleNamespace):
    """As LightningEnvironment, or one of a launcher, where only `launched` counts."""

    def set_global_rank(self, rank):
        self.global_rank = lambda: rank if self.launched is None else self.launched

    def set_world_size(self, size):
        self.world_size = lambda: size


@pytest.fixture(autouse=True)
def options(monkeypatch):
    monkeypatch.setattr(api, "preflight", lambda **options: options)


@pytest.mark.parametrize(("launched", "rank"), [(None, 5), (6, 6)], ids=["Lightning", "launcher"])
def test_the_place_is_that_of_the_trainer(launched, rank):
    environment = Environment(launched=launched, local_rank=lambda: 1, main_address="n0", main_port=29511)
    strategy = SimpleNamespace(cluster_environment=environment)
    trainer = SimpleNamespace(strategy=strategy, node_rank=1, local_rank=1, num_devices=4, num_nodes=2)
    place = {"rank": rank, "local_rank": 1, "world_size": 8, "master_addr": "n0", "master_port": 29511}
    assert preflight(trainer, budget=30) == place | {"budget": 30}


def test_one_device_is_checked_alone():
    assert preflight(SimpleNamespace(strategy=SimpleNamespace()), budget=30) == {"budget": 30}
