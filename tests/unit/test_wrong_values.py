"""The ranks or links that spoil values, judged from matrices of senders and receivers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpdiag.checks.collective.all_reduce import Data, find_culprit
from ddpdiag.stats import Samples

_TIME = Samples(min=1e-3, median=1e-3, p95=1e-3, count=1)


def culprit(ranks, wrong, senders=None):
    """The culprit among `ranks` ranks, whose sums are all wrong, with these wrong links (sender, receiver)."""
    return find_culprit(
        {
            rank: Data(
                "gloo",
                ranks,
                4,
                _TIME,
                4096,
                _TIME,
                wrong=7,
                senders=ranks if senders is None else senders,
                wrong_from=tuple(sender for sender, receiver in wrong if receiver == rank),
            )
            for rank in range(ranks)
        }
    )


@given(st.integers(3, 64), st.booleans(), st.data())
def test_an_end_of_all_wrong_links_is_blamed(ranks, sends, data):
    bad = data.draw(st.integers(0, ranks - 1))
    wrong = [(bad, other) if sends else (other, bad) for other in range(ranks) if other != bad]
    assert culprit(ranks, wrong)[1:] == ((bad,), ())


# Around a ring, what passes from rank 2 to rank 3 is spoilt, and so for all behind it.
RING = [
    (sender, (sender + hops) % 6)
    for sender in range(6)
    for hops in range(1, 6)
    if any(((sender + hop) % 6, (sender + hop + 1) % 6) == (2, 3) for hop in range(hops))
]


@pytest.mark.parametrize(
    ("ranks", "wrong", "blamed", "links"),
    [
        pytest.param(5, [(2, 0), (2, 1), (2, 4)], (2,), (), id="most of a sender's links"),
        pytest.param(5, [(0, 2), (1, 2), (4, 2)], (2,), (), id="most of a receiver's links"),
        pytest.param(2, [(1, 0), (1, 1)], (1,), (), id="its copy changed, of two"),
        pytest.param(4, [(0, 1), (0, 2), (3, 3)], (3,), (), id="its copy changed, of four"),
        pytest.param(8, [(a, b) for a in (1, 4) for b in range(8) if a != b], (1, 4), (), id="two senders"),
        pytest.param(5, [(2, b) for b in (0, 1, 3, 4)] + [(a, 2) for a in (0, 1, 3, 4)], (2,), (), id="both ways"),
        pytest.param(2, [(1, 0)], (), ((1, 0),), id="one link of two ranks"),
        pytest.param(6, [(4, 1)], (), ((4, 1),), id="one link of many"),
        pytest.param(6, RING, (), ((2, 3),), id="a bad cable in a ring"),
        pytest.param(6, [(0, 1), (2, 3), (4, 5)], (), ((0, 1), (2, 3), (4, 5)), id="scattered"),
        pytest.param(3, [(a, b) for a in range(3) for b in range(3) if a != b], (), (), id="everything"),
    ],
)
def test_blame_of_wrong_broadcasts(ranks, wrong, blamed, links):
    assert culprit(ranks, wrong)[1:] == (blamed, links)


def test_right_broadcasts_point_at_the_summing(golden):
    found = culprit(4, [])
    assert found[1:] == ((), ())
    golden(found.why)


def test_fewer_senders_than_ranks_still_show_a_receiver():
    assert culprit(4, [(0, 2), (1, 2)], senders=2).ranks == (2,)


@given(st.integers(3, 64), st.integers(1, 2))
def test_a_single_wrong_link_condemns_neither_end(ranks, senders):
    assert culprit(ranks, [(0, 2)], senders)[1:] == ((), ((0, 2),))
