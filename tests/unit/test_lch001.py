"""LCH001: ranks as they arrived."""

from dataclasses import replace

import pytest
from msgspec import structs
from seen import arrival_of, seen_of, with_arrivals, with_events

from ddpdiag.checks.launch.ranks import CHECK
from ddpdiag.model import Event, EventKind, Options, Severity


def seen(size=4, **world):
    return seen_of(CHECK, {}, size=size, **world)


def found(run):
    return {finding.code: finding for finding in CHECK.judge(run)}


def changed(size, changes, **world):
    """`size` ranks, some of them with other fields in their arrival or place."""
    arrivals = {rank: arrival_of(rank, size, **world) for rank in range(size)}
    for rank, fields in changes.items():
        place = {name: value for name, value in fields.items() if name in arrivals[rank].place.__struct_fields__}
        rest = {name: value for name, value in fields.items() if name not in place}
        arrivals[rank] = structs.replace(arrivals[rank], place=structs.replace(arrivals[rank].place, **place), **rest)
    return with_arrivals(seen(size, **world), arrivals)


def test_ranks_that_came_once_each_are_silent():
    assert found(seen()) == {}
    assert found(seen(gpus=2)) == {}


def test_a_rank_that_came_twice_names_both_hosts(golden):
    run = with_events(seen(), Event(kind=EventKind.DUPLICATE, rank=1, host="n1 (pid 4802)", detail="n0 (pid 4711)"))
    finding = found(run)["LCH001.duplicate"]
    assert finding.severity is Severity.ERROR
    assert (finding.ranks, finding.hosts) == ((1,), ("n0", "n1"))
    golden(finding)


TURNED_AWAY = Event(kind=EventKind.MISMATCH, rank=5, host="n7", detail="8")


@pytest.mark.parametrize(
    ("run", "ranks", "hosts"),
    [
        (changed(4, {2: {"world_size": 8}}), (2,), ("n1",)),
        (with_events(seen(), TURNED_AWAY), (5,), ("n7",)),
        (changed(2, {1: {"world_size": 4}}), (), ()),
    ],
    ids=["one of four", "one that was turned away", "one of two"],
)
def test_the_minority_is_blamed_for_its_world_size(golden, run, ranks, hosts):
    finding = found(run)["LCH001.world-size"]
    assert (finding.ranks, finding.hosts) == (ranks, hosts)
    golden(finding)


def test_uneven_hosts_are_a_warning_that_names_the_odd_one():
    finding = found(seen(5))["LCH001.uneven"]
    assert finding.severity is Severity.WARNING
    assert finding.hosts == ("n2",)


def test_uneven_hosts_are_not_judged_while_ranks_are_absent():
    arrivals = {rank: arrival_of(rank, 4) for rank in (0, 1, 2)}
    assert found(with_arrivals(seen(4), arrivals)) == {}


ZERO, BOUND, MORE = {"local_rank": 0}, {"local_rank": 0, "pci_gpus": 2}, {"local_rank": 0, "gpus": 2, "pci_gpus": 2}


@pytest.mark.parametrize(
    ("changes", "gpus", "ranks"),
    [
        pytest.param({1: ZERO}, 0, (0, 1), id="one local rank twice"),
        pytest.param({0: BOUND, 1: BOUND}, 1, None, id="virtual local ranks with a GPU each"),
        pytest.param({0: ZERO, 1: ZERO}, 1, None, id="virtual local ranks in a container that hides the bus"),
        pytest.param({0: MORE, 1: BOUND}, 1, (0, 1), id="a rank that shows more than its GPU"),
    ],
)
def test_one_local_rank_twice_is_an_error_unless_each_rank_has_one_gpu(changes, gpus, ranks):
    finding = found(changed(2, changes, gpus=gpus)).get("LCH001.local-rank")
    assert (finding and finding.ranks) == ranks


def test_gpus_without_a_rank_are_a_warning_with_numbers(golden):
    finding = found(seen(2, gpus=8))["LCH001.idle-gpus"]
    assert (finding.severity, finding.evidence) == (Severity.WARNING, {"ranks": 2, "gpus": 8})
    golden(finding)


def test_more_ranks_than_gpus_are_an_error_and_with_gloo_a_warning():
    assert found(seen(4, ranks_per_node=4, gpus=2))["LCH001.fewer-gpus"].severity is Severity.ERROR
    gloo = Options(backend="gloo")
    assert found(seen(4, ranks_per_node=4, gpus=2, options=gloo))["LCH001.fewer-gpus"].severity is Severity.WARNING


@pytest.mark.parametrize(("on_the_bus", "codes"), [(1, {"LCH001.fewer-gpus"}), (8, set())])
def test_one_gpu_for_each_of_two_ranks_is_an_error_where_the_bus_has_no_more(on_the_bus, codes):
    assert found(changed(2, {rank: {"pci_gpus": on_the_bus} for rank in range(2)}, gpus=1)).keys() == codes


def test_hosts_without_gpus_are_silent_about_them():
    assert found(seen(16, ranks_per_node=16)) == {}


def test_ranks_without_a_local_rank_are_a_warning_on_shared_gpus_an_error(golden):
    lacking = {rank: {"lacks": ("LOCAL_RANK",)} for rank in range(4)}
    run = changed(4, lacking)
    assert [finding.code for finding in CHECK.judge(run)] == ["LCH001.no-local-rank"] * 2
    finding = found(run)["LCH001.no-local-rank"]
    assert (finding.severity, finding.ranks, finding.hosts) == (Severity.WARNING, (2, 3), ("n1",))
    finding = found(changed(4, lacking, gpus=2))["LCH001.no-local-rank"]
    assert finding.severity is Severity.ERROR
    golden(finding)


def test_one_rank_on_each_host_without_a_local_rank_takes_the_right_gpu():
    lacking = {rank: {"lacks": ("LOCAL_RANK",)} for rank in range(2)}
    finding = found(changed(2, lacking, ranks_per_node=1, gpus=1))["LCH001.no-local-rank"]
    assert finding.severity is Severity.WARNING


def test_the_odd_host_of_many_stands_first_in_the_counts(golden):
    finding = found(seen(21))["LCH001.uneven"]
    assert finding.hosts == ("n10",)
    golden(finding)


def test_a_rank_of_another_version_is_named(golden):
    run = with_events(seen(), Event(kind=EventKind.VERSION, rank=3, detail="0.0.9"))
    finding = found(run)["LCH001.version"]
    assert (finding.severity, finding.ranks) == (Severity.ERROR, (3,))
    assert finding.evidence["others"] == "0.0.9"
    golden(finding)


@pytest.mark.parametrize(("secret", "codes"), [("", set()), ("token", set()), ("none", {"LCH001.unauthenticated"})])
def test_a_run_whose_ranks_had_no_secret_says_so(secret, codes):
    run = seen()
    header = structs.replace(run.recording.header, secret=secret)
    told = found(replace(run, recording=structs.replace(run.recording, header=header)))
    assert told.keys() == codes
    assert all(finding.severity is Severity.NOTE for finding in told.values())


def test_another_run_on_the_port_is_named_and_no_rank_is_blamed(golden):
    run = with_events(seen(), Event(kind=EventKind.OTHER_RUN, detail="user ann, pid 17 on n1, started 3 s before"))
    finding = found(run)["LCH001.other-run"]
    assert (finding.severity, finding.ranks, finding.hosts) == (Severity.WARNING, (), ())
    golden(finding)
