"""P2P002: copies far below what their path carries, or what the other GPUs of the host reach."""

from itertools import permutations

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


def only(*rates, **more):
    (finding,) = judged(*rates, **more)
    return finding


def slow(rate, links=EVERY):
    return dict.fromkeys(links, rate)


FAST = slow(380 * GB)


def test_all_pairs_far_below_their_nvlinks_twice_are_an_error_of_the_host(golden):
    finding = only(slow(2 * GB), again=slow(2.1 * GB))
    assert (finding.code, finding.severity) == ("P2P002.slow", Severity.ERROR)
    assert (finding.gpus, finding.hosts) == ((), ("n0",))
    golden(finding)


def test_the_second_measurement_decides():
    rates = FAST | all_of(1, 2 * GB)
    assert only(rates, again=rates).gpus == (uuid_of(1),)
    assert only(slow(2 * GB), again=slow(300 * GB)).severity is Severity.NOTE
    finding = only(slow(2 * GB), again=slow(2 * GB), sick={1: {"memory_used_bytes": 20 << 30}})
    assert finding.severity is Severity.WARNING
    assert finding.evidence["doubts"].startswith("another process uses GPU 1 on n0")
    assert judged(slow(100 * GB)) == []


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


def test_without_a_second_time_it_is_a_warning(golden):
    finding = only(slow(2 * GB))
    assert (finding.severity, finding.evidence["doubts"]) == (Severity.WARNING, "it was measured once only")
    golden(finding)


def test_peers_are_an_expectation_as_well(golden):
    rates = slow(40 * GB) | all_of(1, 2 * GB)
    finding = only(rates, again=rates, changes={}, log=False)
    assert (finding.severity, finding.gpus) == (Severity.ERROR, (uuid_of(1),))
    golden(finding)


def test_between_sockets_all_may_be_slow():
    rates = slow(40 * GB) | {link: 3 * GB for link in EVERY if sum(gpu < 2 for gpu in link) == 1}
    rates[0, 2] = 5 * GB
    assert Severity.ERROR not in {own.severity for own in judged(rates, changes={}, log=False)}


def test_behind_one_switch_the_slots_are_what_is_expected():
    near = both(0, 1) | both(2, 3)
    rates = slow(40 * GB) | {(0, 1): 2 * GB}
    assert only(rates, again=rates, changes=near).evidence["expected_bytes_per_s"] == 16 * 3.44 * GB
    narrow = {0: pcie(width=1), 1: pcie(width=1)}
    assert only(rates, changes=near, sick=narrow).evidence["source"] == "most GPUs of the host reach it"


def test_across_processors_nothing_is_promised():
    rates = {(0, 1): 2 * GB, (1, 0): 2 * GB}
    assert [own.code for own in judged(rates, count=2, changes=both(0, 1, level=50))] == ["P2P002.slow"]


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
