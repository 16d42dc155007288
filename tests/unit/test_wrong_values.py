"""Who spoils values, judged from matrices of senders and receivers."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpdiag.checks.collective.all_reduce import find_culprit, suspects
from ddpdiag.checks.fabric.notes import round_robin


def heard(ranks, *wrong):
    """What `ranks` ranks heard wrong, as (sender, receiver)."""
    return {rank: tuple(sender for sender, receiver in wrong if receiver == rank) for rank in range(ranks)}


def judged(ranks, *wrong):
    found = find_culprit(heard(ranks, *wrong), ranks)
    return found.ranks, found.links


@given(st.integers(3, 64), st.data())
def test_a_sender_that_all_others_hear_wrong_is_guilty(ranks, data):
    bad = data.draw(st.integers(0, ranks - 1))
    assert judged(ranks, *((bad, other) for other in range(ranks) if other != bad)) == ((bad,), ())


@given(st.integers(3, 64), st.data())
def test_a_receiver_that_hears_all_others_wrong_is_guilty(ranks, data):
    bad = data.draw(st.integers(0, ranks - 1))
    assert judged(ranks, *((other, bad) for other in range(ranks) if other != bad)) == ((bad,), ())


def test_most_of_the_others_are_enough():
    assert judged(5, (2, 0), (2, 1), (2, 4)) == ((2,), ())
    assert judged(5, (0, 2), (1, 2), (4, 2)) == ((2,), ())


def test_a_rank_whose_own_copy_changed_is_guilty_even_of_two():
    assert judged(2, (1, 0), (1, 1)) == ((1,), ())
    assert judged(4, (0, 1), (0, 2), (3, 3)) == ((3,), ())


def test_of_two_ranks_only_the_way_is_known():
    assert judged(2, (1, 0)) == ((), ((1, 0),))


def test_one_bad_cell_among_many_is_a_way():
    assert judged(6, (4, 1)) == ((), ((4, 1),))


def test_a_bad_cable_in_a_ring_is_a_way_between_neighbours():
    # Around the ring, whatever passes from rank 2 to rank 3 is spoilt, and so for all behind it.
    ranks = 6
    wrong = [
        (sender, (sender + hops) % ranks)
        for sender in range(ranks)
        for hops in range(1, ranks)
        if any(((sender + hop) % ranks, (sender + hop + 1) % ranks) == (2, 3) for hop in range(hops))
    ]
    assert judged(ranks, *wrong) == ((), ((2, 3),))


def test_two_bad_senders_are_both_guilty():
    wrong = [(bad, other) for bad in (1, 4) for other in range(8) if other != bad]
    assert judged(8, *wrong) == ((1, 4), ())


def test_scattered_errors_blame_nobody():
    assert judged(6, (0, 1), (2, 3), (4, 5)) == ((), ())


def test_right_broadcasts_point_at_the_summing(golden):
    found = find_culprit(heard(4), 4)
    assert (found.ranks, found.links) == ((), ())
    golden(found.why)


def test_fewer_senders_than_ranks_still_show_a_receiver():
    assert find_culprit({0: (), 1: (), 2: (0, 1), 3: ()}, 2).ranks == (2,)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 9])
def test_in_all_rounds_together_everybody_meets_everybody_once(ranks):
    rounds = ranks - 1 if ranks % 2 == 0 else ranks
    met = [pair for number in range(rounds) for pair in round_robin(range(ranks), number)]
    assert sorted(met) == list(combinations(range(ranks), 2))


@given(st.integers(3, 64), st.data())
def test_three_rounds_of_pairs_leave_one_bad_rank_alone(ranks, data):
    bad = data.draw(st.integers(0, ranks - 1))
    sums = {pair: bad in pair for number in range(3) for pair in round_robin(range(ranks), number)}
    assert suspects(range(ranks), sums) == (bad,)


def test_pairs_that_all_sum_right_leave_nobody():
    assert suspects(range(4), {(0, 1): False, (2, 3): False}) == ()


@given(st.integers(3, 64), st.integers(1, 2))
def test_one_way_alone_condemns_neither_end_however_few_broadcast(ranks, senders):
    found = find_culprit({rank: (0,) if rank == 2 else () for rank in range(ranks)}, senders)
    assert (found.ranks, found.links) == ((), ((0, 2),))
