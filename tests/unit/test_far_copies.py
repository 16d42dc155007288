"""P2P002: copies far below what their path carries, or what the other GPUs of the host reach."""

from itertools import permutations

import pytest
from cards import LINKS, pcie
from cards import host_of as cards_of
from msgspec import Raw, structs
from paths import around, both
from paths import host_of as paths_of
from seen import seen_of, together
from speeds import transport_of
from test_p2p002 import GB, all_of, host_of, uuid_of, world

from ddpdiag.checks.api import Seen
from ddpdiag.checks.gpu import memory_errors
from ddpdiag.checks.p2p import paths, transport
from ddpdiag.checks.p2p.copies.check import CHECK
from ddpdiag.codec import encode
from ddpdiag.model import Outcome, Severity, Status
from ddpdiag.model.measurements import Copies

NVLINKS = {"nvlinks": tuple(structs.replace(link, bytes_per_s=26.562 * GB) for link in LINKS)}
# As `nvidia-smi topo -m` shows it: NV18.
NV18 = {link: {"nvlinks": 18} for link in permutations(range(4), 2)}
EVERY = set(permutations(range(4), 2))


def run(rates, *, pairs=None, again=None, changes=None, sick=None, log=True, count=4, **surroundings):
    """One host with `count` GPUs that NVLinks connect; `again` are rates of the second measurement."""
    shape = {"size": count, "ranks_per_node": count, "gpus": count}
    own = {index: NVLINKS | (sick or {}).get(index, {}) for index in range(count)}
    seen = world(count, {0: host_of(count, rates=rates, pairs=pairs)})
    seen = together(seen, seen_of(memory_errors.CHECK, {0: cards_of(own, count=count)}, **shape))
    ways = paths_of(changes if changes is not None else NV18, count=count, surroundings=around(count, **surroundings))
    seen = together(seen, seen_of(paths.CHECK, {0: ways}, **shape))
    ends = {rank: transport_of(rank, count, count, log=log) for rank in range(count)}
    seen = together(seen, seen_of(transport.CHECK, ends, **shape))
    return with_second(seen, again) if again is not None else seen


def with_second(seen, rates, copies=None):
    """The same run, with the second measurement that its plan asks for."""
    (trial,) = CHECK.plan(seen)
    trial = structs.replace(trial, number=len(seen.recording.trials))
    pairs = tuple(pair for pair in host_of(4, rates=rates).pairs if (pair.source, pair.target) in rates)
    gpus = tuple(structs.replace(gpu, to_bytes_per_s=None, from_bytes_per_s=None) for gpu in host_of(4).gpus)
    data = Raw(encode(copies or Copies(gpus=gpus, pairs=pairs, done=len(pairs), jobs=len(pairs))))
    done = Outcome(trial=trial.number, code="P2P002", rank=0, status=Status.DONE, data=data)
    recording = seen.recording
    recording = structs.replace(recording, trials=(*recording.trials, trial), outcomes=(*recording.outcomes, done))
    return Seen(seen.world, CHECK, recording)


def judged(*rates, **more):
    return [finding for finding in CHECK.judge(run(*rates, **more)) if finding.code != "P2P002.host-slow"]


def slow(rate, links=EVERY):
    return dict.fromkeys(links, rate)


FAST = slow(380 * GB)


ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE
TWICE = {"again": slow(2 * GB)}
ONE, PEERS = FAST | all_of(1, 2 * GB), slow(40 * GB) | all_of(1, 2 * GB)
ACROSS = slow(40 * GB) | {link: 3 * GB for link in EVERY if sum(gpu < 2 for gpu in link) == 1} | {(0, 2): 5 * GB}
NEAR, PAIR = {"changes": both(0, 1) | both(2, 3)}, slow(40 * GB) | {(0, 1): 2 * GB}
NARROW = {0: pcie(width=1), 1: pcie(width=1)}
FAR = {"count": 2, "changes": both(0, 1, level=50)}
UNKNOWN = {"changes": {}, "log": False}  # no NVLink is known
# The rates, what else is different, and the findings of slow copies: severity, GPUs, and parts of the evidence.
COPIES = {
    "below NVLinks, twice": (slow(2 * GB), {"again": slow(2.1 * GB)}, [(ERROR, (), {})]),
    "below NVLinks, one GPU": (ONE, {"again": ONE}, [(ERROR, (1,), {})]),
    "recovers": (slow(2 * GB), {"again": slow(300 * GB)}, [(NOTE, (), {})]),
    "beside another process": (
        slow(2 * GB), TWICE | {"sick": {1: {"memory_used_bytes": 20 << 30}}},
        [(WARNING, (), {"doubts": "another process uses GPU 1 on n0"})],
    ),
    "not far below": (slow(100 * GB), {}, []),
    "measured once": (slow(2 * GB), {}, [(WARNING, (), {"doubts": "it was measured once only"})]),
    "below the peers": (PEERS, {"again": PEERS} | UNKNOWN, [(ERROR, (1,), {})]),
    "across sockets": (ACROSS, UNKNOWN, [(WARNING, (), {})]),
    "below the slots behind one switch": (
        PAIR, NEAR | {"again": PAIR}, [(ERROR, (0, 1), {"expected_bytes_per_s": 16 * 3.44 * GB})]
    ),
    "slots that are narrow": (
        PAIR, NEAR | {"sick": NARROW}, [(WARNING, (0, 1), {"source": "most GPUs of the host reach it"})]
    ),
    "across processors": ({(0, 1): 2 * GB, (1, 0): 2 * GB}, FAR, [(WARNING, (0, 1), {})]),
}  # fmt: skip


@pytest.mark.parametrize(("rates", "more", "expected"), COPIES.values(), ids=COPIES)
def test_copies_far_below_what_is_expected(golden, rates, more, expected):
    found = judged(rates, **more)
    assert {finding.code for finding in found} <= {"P2P002.slow"}
    assert [(finding.severity, finding.gpus) for finding in found] == [
        (severity, tuple(map(uuid_of, gpus))) for severity, gpus, _ in expected
    ]
    for finding, (_, _, evidence) in zip(found, expected, strict=True):
        assert {name: finding.evidence[name] for name in evidence if name != "doubts"}.items() <= evidence.items()
        assert str(finding.evidence.get("doubts", "")).startswith(evidence.get("doubts", ""))
    golden(*found)


def test_a_pair_that_stays_slow_is_named_apart_from_one_that_recovers():
    first = FAST | {(2, 3): 2 * GB, (0, 1): 2 * GB}
    seen = run(first, again={(2, 3): 2 * GB, (0, 1): 300 * GB})
    found = {finding.severity: finding.evidence["pairs"] for finding in CHECK.judge(seen)}
    assert found[Severity.NOTE] == ["GPU 0 -> GPU 1"]
    assert [pairs for severity, pairs in found.items() if severity is not Severity.NOTE] == [["GPU 2 -> GPU 3"]]


def test_pairs_that_are_far_below_are_measured_again_and_no_others():
    (trial,) = CHECK.plan(run(FAST | {(2, 3): 2 * GB}))
    assert (trial.groups, trial.params, trial.may_fail) == (((0,),), {"again.0": "2>3"}, True)
    short = {(2, 3): {"words": 1 << 18}}
    assert CHECK.plan(run(FAST)) == CHECK.plan(run(FAST | {(2, 3): 30 * GB}, pairs=short)) == ()
    assert CHECK.plan(run(slow(2 * GB), again=slow(2 * GB))) == ()


def test_of_many_pairs_a_few_are_measured_again():
    every = slow(2 * GB, permutations(range(8), 2))
    links = {link: {"nvlinks": 18} for link in every}
    (trial,) = CHECK.plan(run(every, count=8, changes=links))
    assert len(trial.params["again.0"].split()) <= 8


def test_a_gpu_whose_link_to_the_host_is_far_below_its_siblings_twice_is_an_error(golden):
    slow_gpu = {"to_bytes_per_s": 2 * GB}

    def found(**sick):
        seen = world(4, {0: host_of(gpus={1: slow_gpu})})
        shape = {"size": 4, "ranks_per_node": 4, "gpus": 4}
        seen = together(seen, seen_of(memory_errors.CHECK, {0: cards_of({1: sick}, count=4)}, **shape))
        (trial,) = CHECK.plan(seen)
        assert trial.params == {"again.0": "1"}
        (once,) = CHECK.judge(seen)
        second = structs.replace(host_of(gpus={1: slow_gpu}), pairs=())
        (twice,) = CHECK.judge(with_second(seen, {}, second))
        return once, twice

    once, twice = found()
    assert (once.severity, twice.severity, twice.gpus) == (Severity.WARNING, Severity.ERROR, (uuid_of(1),))
    golden(twice)
    assert found(memory_used_bytes=20 << 30)[1].severity is Severity.WARNING


def test_words_that_are_wrong_the_second_time_only_are_wrong():
    seen = run(slow(2 * GB))
    bad = tuple(structs.replace(pair, wrong=3) for pair in host_of(4, rates=slow(2 * GB)).pairs[:1])
    seen = with_second(seen, {}, Copies(gpus=(), pairs=bad, done=1, jobs=1))
    assert "P2P002.wrong" in {finding.code for finding in CHECK.judge(seen)}
