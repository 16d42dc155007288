"""The sentence of a benchmark of several collectives."""

from hypothesis import given
from hypothesis import strategies as st

from ddpdiag.bandwidth.summary import held_back, summary
from ddpdiag.model.bench import Bottleneck, Series

COPIES = "is bound by copies on this host's CPU"


def one(collective: str, told: str, busbw: float = 1e9, share: float | None = 0.9, backend: str = "gloo") -> Series:
    """A series whose sentence is about itself, or about something else where `told` ends in a full stop."""
    subject = f"{collective} over {backend}"
    return Series(
        backend=backend,
        collective=collective,
        dtype="float",
        op="sum",
        root=-1,
        peak_busbw_bytes_per_s=busbw,
        best_bytes=1 << 20,
        fit=None,
        expectation=None,
        share=share,
        bottleneck=Bottleneck.COPY,
        sentence=told if told.endswith(".") else f"{subject} {told}: {busbw:g} B/s, more than expected.",
    )


def test_one_series_says_its_own_sentence():
    own = one("all_reduce", COPIES)
    assert summary((own,)) == own.sentence


def test_what_holds_several_back_is_said_once_with_the_range():
    found = (
        one("all_reduce", COPIES, 0.782e9, 1.63),
        one("all_gather", COPIES, 0.58e9, 1.42),
        one("broadcast", COPIES, 2.06e9, 3.59),
        one("send_recv", COPIES, 1.5e9, 2.3),
    )
    assert summary(found) == (
        f"all_reduce, all_gather, broadcast and send_recv over gloo: each {COPIES}, 580 MB/s to 2.06 GB/s busbw, 142 "
        "to 359 % of what is expected."
    )


def test_one_unit_is_enough_for_both_ends():
    assert "1.2 to 2.4 GB/s busbw" in summary((one("all_reduce", COPIES, 1.2e9), one("reduce", COPIES, 2.4e9)))


def test_without_an_expectation_there_is_no_share():
    found = (one("all_reduce", COPIES, share=None), one("broadcast", COPIES))
    assert summary(found) == f"all_reduce and broadcast over gloo: each {COPIES}, 1 GB/s busbw."


def test_types_of_one_collective_are_counted():
    assert summary((one("all_reduce", COPIES), one("all_reduce", COPIES, 2e9))).startswith(
        f"all_reduce over gloo (2 series): each {COPIES}, 1 to 2 GB/s busbw"
    )


def test_backends_and_reasons_stay_apart():
    found = (one("all_reduce", COPIES), one("all_reduce", "is bound by NVLink", backend="nccl"))
    assert summary(found) == " ".join(own.sentence for own in found)


def test_a_slow_rank_is_said_once():
    slow = "rank 1 on n0 holds the others back: it copies at half of the usual rate."
    assert summary((one("all_reduce", slow), one("broadcast", slow))) == slow


def test_what_is_left_out_is_counted():
    reasons = ("is bound by PCIe", "is bound by NVLink", COPIES, "lacks lanes", "falls")
    text = summary(tuple(one("all_reduce", reason) for reason in reasons))
    assert text.endswith("2 more results are in the report.")
    assert "lacks" not in text


def test_no_expectation_for_any_of_them():
    unknown = "what this hardware should reach is not known."
    found = tuple(
        one(name, f"{name} over gloo: {rate:g} B/s; {unknown}", rate) for name, rate in (("reduce", 1e9), ("x", 3e9))
    )
    assert summary(found) == f"reduce and x over gloo: 1 to 3 GB/s busbw; {unknown}"


def test_nothing_was_measured():
    assert summary(()) == "Nothing was measured."


@given(st.lists(st.sampled_from((COPIES, "is bound by PCIe", "Nobody knows.", "x over gloo.")), min_size=1), st.data())
def test_any_series_are_told_in_few_sentences(reasons, data):
    names = st.sampled_from(("all_reduce", "broadcast", "reduce"))
    found = tuple(one(data.draw(names), reason) for reason in reasons)
    text = summary(found)
    assert text.isascii()
    assert text.endswith(".")
    assert all(held_back(own) in own.sentence for own in found)
