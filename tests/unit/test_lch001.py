"""LCH001: ranks as they arrived."""

from dataclasses import replace

import pytest
from msgspec import structs
from seen import arrival_of, seen_of, with_arrivals, with_events

from ddpdiag.checks.launch.ranks import CHECK
from ddpdiag.model import Event, EventKind, RunOptions, Severity


def seen(size=4, **world):
    return seen_of(CHECK, {}, size=size, **world)


def changed(size, changes, **world):
    """`size` ranks, some of them with other fields in their arrival or place."""
    arrivals = {rank: arrival_of(rank, size, **world) for rank in range(size)}
    for rank, fields in changes.items():
        place = {name: value for name, value in fields.items() if name in arrivals[rank].place.__struct_fields__}
        rest = {name: value for name, value in fields.items() if name not in place}
        arrivals[rank] = structs.replace(arrivals[rank], place=structs.replace(arrivals[rank].place, **place), **rest)
    return with_arrivals(seen(size, **world), arrivals)


def with_event(kind, **fields):
    return with_events(seen(), Event(kind=kind, **fields))


LACKING = {"unset_variables": ("LOCAL_RANK",)}
ZERO, BOUND, MORE = {"local_rank": 0}, {"local_rank": 0, "pci_gpus": 2}, {"local_rank": 0, "gpus": 2, "pci_gpus": 2}
OTHER_RUN = "user ann, pid 17 on n1, started 3 s before"
ERROR, WARNING = Severity.ERROR, Severity.WARNING
# The run; its finding, severity, ranks and hosts.
FAULTS = {
    "a rank that joined twice": (
        with_event(EventKind.DUPLICATE, rank=1, host="n1 (pid 4802)", detail="n0 (pid 4711)"),
        ("duplicate", ERROR, (1,), ("n0", "n1")),
    ),
    "one world size of four": (changed(4, {2: {"world_size": 8}}), ("world-size", ERROR, (2,), ("n1",))),
    "a world size that was turned away": (
        with_event(EventKind.MISMATCH, rank=5, host="n7", detail="8"),
        ("world-size", ERROR, (5,), ("n7",)),
    ),
    "one world size of two": (changed(2, {1: {"world_size": 4}}), ("world-size", ERROR, (), ())),
    "another version": (with_event(EventKind.VERSION, rank=3, detail="0.0.9"), ("version", ERROR, (3,), ("n1",))),
    "another run on the port": (with_event(EventKind.OTHER_RUN, detail=OTHER_RUN), ("other-run", WARNING, (), ())),
    "a host with fewer ranks": (seen(21), ("uneven", WARNING, (20,), ("n10",))),
    "one local rank twice": (changed(2, {1: ZERO}), ("local-rank", ERROR, (0, 1), ("n0",))),
    "virtual local ranks with a GPU each": (changed(2, {0: BOUND, 1: BOUND}, gpus=1), None),
    "virtual local ranks, the bus hidden": (changed(2, {0: ZERO, 1: ZERO}, gpus=1), None),
    "one of two shows more than its GPU": (
        changed(2, {0: MORE, 1: BOUND}, gpus=1),
        ("local-rank", ERROR, (0, 1), ("n0",)),
    ),
    "GPUs without a rank": (seen(2, gpus=8), ("idle-gpus", WARNING, (0, 1), ("n0",))),
    "more ranks than GPUs": (seen(4, ranks_per_node=4, gpus=2), ("fewer-gpus", ERROR, (0, 1, 2, 3), ("n0",))),
    "more ranks than GPUs over gloo": (
        seen(4, ranks_per_node=4, gpus=2, options=RunOptions(backend="gloo")),
        ("fewer-gpus", WARNING, (0, 1, 2, 3), ("n0",)),
    ),
    "one GPU on the bus for two ranks": (
        changed(2, {0: {"pci_gpus": 1}, 1: {"pci_gpus": 1}}, gpus=1),
        ("fewer-gpus", ERROR, (0, 1), ("n0",)),
    ),
    "a GPU bound to each rank": (changed(2, {0: {"pci_gpus": 8}, 1: {"pci_gpus": 8}}, gpus=1), None),
    "no local rank": (changed(1, {0: LACKING}), ("no-local-rank", WARNING, (0,), ("n0",))),
    "no local rank on shared GPUs": (
        changed(2, {0: LACKING, 1: LACKING}, gpus=2),
        ("no-local-rank", ERROR, (0, 1), ("n0",)),
    ),
    "ranks that joined once each": (seen(), None),
    "ranks with a GPU each": (seen(gpus=2), None),
    "many ranks without a GPU": (seen(16, ranks_per_node=16), None),
    "absent ranks": (with_arrivals(seen(4), {rank: arrival_of(rank, 4) for rank in (0, 1, 2)}), None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_launch_names_its_ranks_and_hosts(golden, fault):
    run, expected = FAULTS[fault]
    findings = list(CHECK.judge(run))
    words = [(found.code.removeprefix("LCH001."), found.severity, found.ranks, found.hosts) for found in findings]
    assert words == ([] if expected is None else [expected])
    if findings:
        golden(*findings)


@pytest.mark.parametrize(("secret", "codes"), [("", []), ("token", []), ("none", ["LCH001.unauthenticated"])])
def test_a_run_whose_ranks_had_no_secret_has_a_note(secret, codes):
    run = seen()
    header = structs.replace(run.recording.header, authentication=secret)
    findings = list(CHECK.judge(replace(run, recording=structs.replace(run.recording, header=header))))
    assert [finding.code for finding in findings] == codes
    assert all(finding.severity is Severity.NOTE for finding in findings)
