"""TRN004: the parts of a soak, and what is said of its differences, from hand-made numbers."""

from dataclasses import fields
from typing import Any

import pytest
from msgspec import structs
from seen import seen_of, skip_text, together, unseen, world_of

from ddpdiag.checks.api import Seen
from ddpdiag.checks.gpu import counters, memory_errors
from ddpdiag.checks.training.soak import CHECK, Data, extra_budget_seconds, part_count
from ddpdiag.cli.options import CheckArgs
from ddpdiag.errors import UsageError
from ddpdiag.model import Finding, RunOptions, Severity, Status
from ddpdiag.model.measurements import SoakDifference
from ddpdiag.probes.gpu.health import GpuReading, Health, MemoryErrors

MINUTE = RunOptions(soak_seconds=60.0, backend="gloo")
CLEAN = Data(device="CPU X, torch 2", steps=1200, bytes=5 << 20, seconds=60.0)
REDUCE = "all_reduce of 20 B"


def differing(product: str, again: str | None = None, reduce: str = "0", **changes: Any) -> Data:
    """A rank that computed `product` and then `again` in step 137, where any rank's product differed."""
    repeated = ({"product": again or product},) * 2
    first = SoakDifference(step=137, digests={"product": product, REDUCE: reduce}, repeated=repeated)
    return structs.replace(CLEAN, different_steps=1, first_difference=first, **changes)


def findings(rows: dict[int, Data], options: RunOptions = MINUTE, **world: Any) -> dict[str, Finding]:
    found = list(CHECK.judge(seen_of(CHECK, rows, options=options, **world)))
    return {finding.code.partition(".")[2]: finding for finding in found}


def test_equal_bits_give_a_note_on_all_that_was_tried(golden):
    assert findings({}, statuses={0: Status.HUNG, 1: Status.HUNG}) == {}
    found = findings(dict.fromkeys(range(4), CLEAN))
    assert set(found) == {"tried"}
    assert found["tried"].severity is Severity.NOTE
    assert (found["tried"].evidence["steps"], found["tried"].evidence["collectives"]) == (1200, 3600)
    golden(found["tried"])


@pytest.mark.parametrize(
    ("rows", "blamed"),
    [
        pytest.param(["b", "a", "a", "a"], (0,), id="a minority"),
        pytest.param([("b", "a"), "a", "a"], (0,), id="a minority, once"),
        pytest.param([("b", "a"), "a"], (0,), id="of two, the one that differs from itself"),
        pytest.param(["b", "a"], (), id="of two that agree with themselves, none"),
        pytest.param([("b", "a"), ("a", "b")], (), id="if all differ from themselves, none"),
    ],
)
def test_blame_of_different_bits(golden, rows, blamed):
    by_rank = {rank: differing(*row) for rank, row in enumerate(rows)}
    found = findings(by_rank)
    assert set(found) == {"differs", "tried"}
    assert (found["differs"].ranks, found["differs"].severity) == (blamed, Severity.ERROR)
    assert (found["differs"].evidence["step"], found["differs"].evidence["result"]) == (137, "product")
    golden(found["differs"])


@pytest.mark.parametrize(
    ("wrong", "word", "blamed"),
    [
        (["7", "0", "0"], "differs", (0,)),
        (["0", "7", "7"], "differs", ()),  # of an all-reduce: rank 0's own values may be right
        (["7", "7", "7"], "wrong", ()),
        (["0", "0", "0"], "wrong", ()),  # only the exchange of the digests was wrong
    ],
)
def test_blame_of_wrong_values_from_a_collective(golden, wrong, word, blamed):
    found = findings({rank: differing("a", reduce=own) for rank, own in enumerate(wrong)})
    assert set(found) == {word, "tried"}
    assert found[word].ranks == blamed
    golden(found[word])


@pytest.mark.parametrize(
    ("wrong", "word", "blamed"), [(["7", "0", "0"], "differs", (0,)), (["7", "7", "7"], "wrong", ())]
)
def test_a_collective_is_compared_between_different_devices(wrong, word, blamed):
    devices = ("CPU X, torch 2", "CPU Y, torch 2", "CPU Z, torch 2")
    found = findings({rank: differing(f"p{rank}", reduce=own, device=devices[rank]) for rank, own in enumerate(wrong)})
    assert set(found) == {word, "incomplete", "tried"}
    assert found[word].ranks == blamed
    assert found[word].evidence.get("result", REDUCE) == REDUCE


def test_the_sender_is_blamed_if_most_ranks_received_wrong_values(golden):
    rows = {rank: differing("a") for rank in range(3)}
    for rank, wrong in enumerate(("7", "0", "7")):
        first = SoakDifference(step=137, digests={"broadcast of 20 B from rank 1": wrong}, repeated=({},) * 2)
        rows[rank] = structs.replace(rows[rank], first_difference=first)
    found = findings(rows)
    assert found["differs"].ranks == (1,)
    golden(found["differs"])


def test_only_equal_devices_are_compared(golden):
    """Ranks 0-2 have one device; rank 3 rounds differently, and no rank confirms its bits."""
    rows = {0: differing("a"), 1: differing("b", "a"), 2: differing("a"), 3: differing("c", device="CPU Y, torch 2")}
    found = findings(rows)
    assert found["differs"].ranks == (1,)
    assert found["incomplete"].ranks == ()
    golden(found["incomplete"])


def test_a_soak_that_the_budget_cut_short_is_said_to_be_incomplete(golden):
    rows = {rank: structs.replace(CLEAN, seconds=20.0) for rank in range(2)}
    found = findings(rows)
    assert set(found) == {"incomplete", "tried"}
    assert found["incomplete"].ranks == ()
    golden(found["incomplete"])


def test_the_gpu_is_named_with_the_counters_that_rose():
    rows = {0: differing("a", uuid="GPU-0"), 1: differing("b", uuid="GPU-1"), 2: differing("a", uuid="GPU-2")}
    seen: Seen[Any] = seen_of(CHECK, rows, gpus=1, ranks_per_node=1, options=MINUTE)
    for check, corrected in ((memory_errors.CHECK, 3), (counters.CHECK, 8)):
        gpu = Health(index=0, uuid="GPU-1", pci=None, name="H100", memory=MemoryErrors(corrected=corrected))
        reading = GpuReading(gpus=(gpu,))
        seen = together(seen, seen_of(check, {1: reading}, gpus=1, ranks_per_node=1, size=3))
    found = next(iter(CHECK.judge(seen)))
    assert (found.ranks, found.hosts, found.gpus) == ((1,), ("n1",), ("GPU-1",))
    assert "correctable memory errors of GPU GPU-1 by 5" in found.message


def test_parts_follow_each_other_until_one_differs_or_the_time_is_over():
    options = RunOptions(soak_seconds=150.0, backend="gloo")
    (first,) = CHECK.plan(unseen(CHECK, world_of(2, options=options)))
    assert (first.params["seconds"], first.params["first_step"]) == (50.0, 1)
    assert first.deadline_seconds >= 50.0 + CHECK.deadline
    rows = dict.fromkeys(range(2), CLEAN)
    (second,) = CHECK.plan(seen_of(CHECK, rows, options=options))
    assert (second.params["before_seconds"], second.params["first_step"]) == (50.0, 1201)
    assert not CHECK.plan(seen_of(CHECK, rows, options=MINUTE)), "it had one part"
    assert not CHECK.plan(seen_of(CHECK, rows | {1: differing("a")}, options=options))
    assert not CHECK.plan(seen_of(CHECK, {0: CLEAN}, statuses={1: Status.HUNG}, options=options))
    seen = seen_of(CHECK, rows, options=options)
    assert not CHECK.plan(Seen(seen.world, CHECK, seen.recording, left_seconds=5.5)), "the budget is nearly spent"


def test_the_parts_and_the_budget_of_a_soak():
    assert [part_count(seconds) for seconds in (5, 60, 61, 1800, 86400)] == [1, 1, 2, 20, 144]
    assert 1800 < extra_budget_seconds(1800, 8) < 2000


def test_one_rank_has_no_other_to_compare_with():
    assert "one rank" in str(skip_text(CHECK, world_of(1, options=MINUTE)))
    assert skip_text(CHECK, world_of(2, options=MINUTE)) is None


@pytest.mark.parametrize(("text", "seconds"), [("45s", 45), ("30m", 1800), ("1.5h", 5400), ("90", 90), ("2H", 7200)])
def test_a_duration_has_a_unit(text, seconds):
    assert _soak_option(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "0", "-5m", "nan", "inf", "1e9h", "30 min", "1h30m", "5d"])
def test_another_duration_is_refused(text):
    with pytest.raises(UsageError, match="expected a time from 1s to 168h"):
        _soak_option(text)


def _soak_option(text: str) -> Any:
    return next(field for field in fields(CheckArgs) if field.name == "soak").metadata["parse"](text)
