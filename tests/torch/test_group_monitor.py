"""preflight(groups=...) in a job of one rank: what it refuses, and what it says without a partner."""

import pytest
import torch.distributed as dist

import ddpdiag


@pytest.fixture
def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_without_a_process_group_it_says_so():
    with pytest.raises(ddpdiag.UsageError, match="there are no groups before init_process_group"):
        ddpdiag.preflight(groups=[])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"groups": [1]}, "group0 is of type int; expected a DeviceMesh"),
        ({"groups": []}, "there is no group"),
        ({"every": 0}, r"every=0.*at least 1"),
        ({"every": "x"}, r"every='x'.*at least 1"),
        ({"sizes": {"tp": 4}}, "a dict of them for dp"),
        ({"sizes": "25M"}, "a dict of them for dp"),
        ({"html": "x"}, "do not have this option"),
        ({"on_unknown": "go"}, "do not have this option"),
    ],
)
def test_wrong_use_is_refused_in_one_sentence(world, options, text):
    with pytest.raises(ddpdiag.UsageError, match=text):
        ddpdiag.preflight(**{"groups": {"dp": world}} | options)


def test_one_rank_is_checked_without_a_partner(world):
    monitor = ddpdiag.preflight(groups={"dp": world, "tp": None}, every=2)
    assert "no group has two ranks" in monitor.report.sentence
    assert [report is not None for report in (monitor.step(), monitor.step(), monitor.step())] == [False, True, False]
