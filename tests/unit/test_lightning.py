"""The place that preflight() of Lightning takes from a trainer. tests/processes/test_frameworks.py runs real ones."""

from types import SimpleNamespace

import pytest

from ddpdiag import api
from ddpdiag.integrations.lightning import preflight


class Environment(SimpleNamespace):
    """As LightningEnvironment, or one of a launcher, where only `launched` counts."""

    def set_global_rank(self, rank):
        self.rank = rank

    def set_world_size(self, size):
        self.size = size

    def global_rank(self):
        return self.rank if self.launched is None else self.launched

    def local_rank(self):
        return 1

    def world_size(self):
        return self.size


@pytest.mark.parametrize(("launched", "rank"), [(None, 5), (6, 6)], ids=["Lightning", "launcher"])
def test_the_place_is_that_of_the_trainer(monkeypatch, launched, rank):
    monkeypatch.setattr(api, "preflight", lambda **options: options)
    environment = Environment(launched=launched, main_address="n0", main_port=29511)
    strategy = SimpleNamespace(cluster_environment=environment)
    trainer = SimpleNamespace(strategy=strategy, node_rank=1, local_rank=1, num_devices=4, num_nodes=2)
    place = {"rank": rank, "local_rank": 1, "world_size": 8, "master_addr": "n0", "master_port": 29511}
    assert preflight(trainer, budget=30) == place | {"budget": 30}


def test_one_device_is_checked_alone(monkeypatch):
    monkeypatch.setattr(api, "preflight", lambda **options: options)
    assert preflight(SimpleNamespace(strategy=SimpleNamespace()), budget=30) == {"budget": 30}
