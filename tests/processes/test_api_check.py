"""ddpdiag.check() of a notebook: a run in a process of its own."""

import multiprocessing

import ddpdiag


def test_a_check_gives_its_report():
    report = ddpdiag.check(nproc_per_node=2, stage=["launch", "collective"], budget=60)
    assert report.verdict is ddpdiag.Verdict.FIT
    assert report.world.size == 2
    assert isinstance(report, ddpdiag.Report)
    assert multiprocessing.active_children() == []
