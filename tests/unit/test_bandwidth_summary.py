"""The sentence of a benchmark of several collectives."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpdiag.bench.judge import held_back, summary
from ddpdiag.model.bench import Bottleneck, Series

UNKNOWN = "what this hardware should reach is not known."
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


@pytest.mark.parametrize(
    "found",
    [
        pytest.param((), id="nothing was measured"),
        pytest.param(
            (
                one("all_reduce", COPIES, 0.782e9, 1.63),
                one("all_gather", COPIES, 0.58e9, 1.42),
                one("broadcast", COPIES, 2.06e9, 3.59),
                one("send_recv", COPIES, 1.5e9, 2.3),
            ),
            id="what holds several back is said once, with the range",
        ),
        pytest.param(
            (one("all_reduce", COPIES, 1.2e9), one("reduce", COPIES, 2.4e9)), id="one unit is enough for both ends"
        ),
        pytest.param(
            (one("all_reduce", COPIES, share=None), one("broadcast", COPIES)),
            id="without an expectation there is no share",
        ),
        pytest.param(
            (one("all_reduce", COPIES), one("all_reduce", COPIES, 2e9)), id="types of one collective are counted"
        ),
        pytest.param(
            tuple(
                one("all_reduce", why) for why in ("is bound by PCIe", "is bound by NVLink", COPIES, "lacks", "falls")
            ),
            id="what is left out is counted",
        ),
        pytest.param(
            (one("reduce", f"reduce over gloo: 1 GB/s; {UNKNOWN}"), one("x", f"x over gloo: 3 GB/s; {UNKNOWN}", 3e9)),
            id="no expectation for any of them",
        ),
    ],
)
def test_several_series_are_told_in_few_sentences(golden, found):
    golden(summary(found))


def test_backends_and_reasons_stay_apart():
    found = (one("all_reduce", COPIES), one("all_reduce", "is bound by NVLink", backend="nccl"))
    assert summary(found) == " ".join(own.sentence for own in found)


def test_a_slow_rank_is_said_once():
    slow = "rank 1 on n0 holds the others back: it copies at half of the usual rate."
    assert summary((one("all_reduce", slow), one("broadcast", slow))) == slow


@given(st.lists(st.sampled_from((COPIES, "is bound by PCIe", "Nobody knows.", "x over gloo.")), min_size=1), st.data())
def test_any_series_are_told_in_few_sentences(reasons, data):
    names = st.sampled_from(("all_reduce", "broadcast", "reduce"))
    found = tuple(one(data.draw(names), reason) for reason in reasons)
    text = summary(found)
    assert text.isascii()
    assert text.endswith(".")
    assert all(held_back(own) in own.sentence for own in found)
