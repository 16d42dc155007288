"""P2P002: what is said of copies between GPUs, and who tries them."""

from itertools import permutations

import pytest
from cards import healthy, pcie
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw, structs
from paths import around
from paths import host_of as paths_of
from seen import seen_of, skip_text, together, with_events

from ddpdiag.checks.api import Seen
from ddpdiag.checks.gpu import devices, memory_errors
from ddpdiag.checks.launch import versions
from ddpdiag.checks.p2p import paths as p2p001
from ddpdiag.checks.p2p.copies.check import CHECK
from ddpdiag.codec import encode
from ddpdiag.model import Event, EventKind, Outcome, ProcessState, Severity, Status
from ddpdiag.model.measurements import Copies, GpuCopies, PairCopies
from ddpdiag.probes.gpu.health import GpuReading

GB = 1e9
USUAL = 40 * GB


def uuid_of(index, host=0):
    return f"GPU-{host}-{index}"


def gpu(index, host=0, **changes):
    own = {"name": "NVIDIA H100", "to_bytes_per_s": 50 * GB, "from_bytes_per_s": 50 * GB}
    known = {"uuid": uuid_of(index, host), "pci": f"0000:{index}b:00.0"}
    return GpuCopies(index=index, **(known | own | changes))


def host_of(count=4, *, host=0, gpus=None, rates=None, pairs=None, closed=(), **changes):
    """One process with all GPUs of a host. `rates` of some links; `gpus` and `pairs` say what differs there."""
    found = tuple(gpu(index, host, **(gpus or {}).get(index, {})) for index in range(count))
    links = tuple(
        PairCopies(
            source=a,
            target=b,
            access=(a, b) not in closed,
            **(
                {"words": 1 << 24, "through_host_bytes_per_s": 15 * GB}
                | {"bytes_per_s": (rates or {}).get((a, b), USUAL)}
                | (pairs or {}).get((a, b), {})
            ),
        )
        for a, b in permutations(range(count), 2)
    )
    jobs = count + len(links)
    return Copies(**({"gpus": found, "pairs": links, "done": jobs, "jobs": jobs} | changes))


def takers(count, *, size=None, apart=False):
    """What torch showed to each rank: all GPUs of its host, or one of them."""
    size = size or count
    rows = {}
    for rank in range(size):
        host, local = divmod(rank, count)
        shown = [local] if apart else range(count)
        gpus = tuple(devices.TorchGpu("NVIDIA H100", uuid_of(index, host)) for index in shown)
        rows[rank] = devices.Data(torch="2.13", cuda="12.8", gpus=gpus, chosen=0 if apart else local)
    return rows


def world(count, rows=None, *, apart=False, hosts=1, **options):
    """Hosts with `count` ranks; `rows` is what P2P002 saw."""
    size = count * hosts
    shape = {"size": size, "ranks_per_node": count, "gpus": 1 if apart else count}
    before = seen_of(devices.CHECK, takers(count, size=size, apart=apart), **shape, **options)
    if rows is None:
        return before.of(CHECK)
    return together(seen_of(CHECK, rows, **shape, **options), before)


def judged(*hosts, count=4, **options):
    rows = {count * number: own for number, own in enumerate(hosts)}
    return list(CHECK.judge(world(count, rows, hosts=len(hosts), **options)))


def all_of(index, value, count=4):
    """All links to and from one GPU."""
    return {link: value for link in permutations(range(count), 2) if index in link}


PAIRS = set(permutations(range(4), 2))
CLOSED = {link for link in PAIRS if 3 in link}
TWO_SOCKETS = {(a, b) for a, b in permutations(range(8), 2) if (a < 4) is not (b < 4)}
HALF = {"to_bytes_per_s": 25 * GB}
DISTANT = {"to_bytes_per_s": 27 * GB, "from_bytes_per_s": 27 * GB}


@pytest.mark.parametrize(
    ("count", "host"),
    [
        pytest.param(4, {}, id="healthy"),
        pytest.param(2, {"rates": {(1, 0): 28.1 * GB}}, id="a path somewhat slower than the path back"),
        pytest.param(8, {"rates": dict.fromkeys(TWO_SOCKETS, 15 * GB)}, id="two sockets"),
        pytest.param(4, {"rates": dict.fromkeys({(0, 1), (1, 0), (2, 3), (3, 2)}, 200 * GB)}, id="bridges"),
        pytest.param(4, {"closed": CLOSED, "rates": dict.fromkeys(CLOSED, 8 * GB)}, id="some without peer access"),
        pytest.param(4, {"closed": PAIRS, "rates": dict.fromkeys(PAIRS, 10 * GB)}, id="all without peer access"),
        pytest.param(2, {"rates": {(0, 1): 20 * GB, (1, 0): 20 * GB}}, id="two GPUs, neither of which is usual"),
        pytest.param(2, {"gpus": {1: HALF}}, id="a slow link to the host, of two"),
        pytest.param(4, {"gpus": {2: DISTANT, 3: DISTANT}}, id="GPUs behind the other socket"),
        pytest.param(4, {"gpus": {1: HALF | {"name": "NVIDIA T4"}}}, id="a GPU of another model"),
    ],
)
def test_what_is_no_fault_is_silent(count, host):
    assert judged(host_of(count, **host), host_of(count, host=1), count=count) == []


@pytest.mark.parametrize(
    ("host", "gpus"),
    [
        pytest.param(
            host_of(rates={(0, 1): 400 * GB, (1, 0): 400 * GB}, pairs={(0, 1): {"wrong": 1}}), (0, 1),
            id="one word of one way, however fast",
        ),
        pytest.param(host_of(pairs=all_of(2, {"wrong": 9})), (2,), id="all ways of a GPU"),
        pytest.param(host_of(gpus={3: {"wrong_to": 8}}), (3,), id="from the host's memory"),
        pytest.param(
            host_of(pairs={link: {"wrong": 9} for link in permutations(range(4), 2)}), (), id="all ways, as by an IOMMU"
        ),
        pytest.param(
            host_of(pairs={(0, 1): {"wrong": 5, "wrong_through_host": 5}}), (0, 1),
            id="through the host too, so not by peer access alone",
        ),
    ],
)  # fmt: skip
def test_wrong_words_are_an_error_that_names_the_gpus_or_the_host_alone(golden, host, gpus):
    (finding,) = judged(host, host_of(host=1))
    code = "P2P002.wrong" if gpus != (3,) else "P2P002.host-wrong"
    assert (finding.code, finding.severity, finding.hosts) == (code, Severity.ERROR, ("n0",))
    assert finding.gpus == tuple(map(uuid_of, gpus))
    golden(finding)


@pytest.mark.parametrize(
    ("rates", "count", "gpus"),
    [
        pytest.param(all_of(1, 10 * GB), 4, (1,), id="one of four, slower than the host"),
        pytest.param(all_of(1, 19 * GB), 4, (1,), id="one of four, faster than the host"),
        pytest.param({(0, 1): 10 * GB}, 4, (0, 1), id="a pair"),
        pytest.param({(1, 0): 27 * GB}, 2, (1, 0), id="a way slower than the way back"),
        pytest.param(
            {(2, other): 25 * GB for other in (0, 1, 3)}, 4, (2,), id="one sends slower than it receives"
        ),
        pytest.param(
            dict.fromkeys(permutations(range(4), 2), 10 * GB), 4, (), id="all slower than the host"
        ),
    ],
)  # fmt: skip
def test_slow_ways_are_a_warning_that_names_the_gpus(golden, rates, count, gpus):
    (finding,) = judged(host_of(count, rates=rates), count=count)
    assert (finding.code, finding.severity) == ("P2P002.slow", Severity.WARNING)
    assert (finding.gpus, finding.env) == (tuple(map(uuid_of, gpus)), {})
    golden(finding)


@pytest.mark.parametrize(("words", "codes"), [(1 << 24, ["P2P002.slow"]), (1 << 18, [])])
def test_a_copy_too_short_for_a_rate_is_not_slow(words, codes):
    # 64 MiB in 2 ms, or 1 MiB in 35 us, where many pairs share little time.
    rates = dict.fromkeys(permutations(range(4), 2), 364 * GB) | {(0, 1): 30 * GB}
    assert [finding.code for finding in judged(host_of(rates=rates, pairs={(0, 1): {"words": words}}))] == codes


def test_groups_that_most_ways_are_inside_of_are_good_to_know():
    distant = {(a, b): 5 * GB for a, b in permutations(range(8), 2) if (a < 6) is not (b < 6)}
    (finding,) = judged(
        host_of(8, rates=distant, pairs={link: {"through_host_bytes_per_s": 4 * GB} for link in distant}), count=8
    )
    assert (finding.code, finding.severity) == ("P2P002.slow", Severity.NOTE)


@pytest.mark.parametrize(
    ("processor", "nccl", "named"),
    [
        ("GenuineIntel", "2.27.7", []),
        ("ARM", "2.27.7", []),
        ("AuthenticAMD", "2.27.7", []),
        ("AuthenticAMD", None, []),
        ("AuthenticAMD", "2.21.5", [8]),
        (None, "2.27.7", [8]),
    ],
)
def test_peer_access_that_nccl_does_not_use_may_be_slow(processor, nccl, named):
    distant = [(a, b) for a, b in permutations(range(4), 2) if a // 2 != b // 2]
    paths = paths_of(surroundings=around(processor=processor))
    seen = together(world(4, {0: host_of(rates=dict.fromkeys(distant, 13 * GB))}), seen_of(p2p001.CHECK, {0: paths}))
    seen = together(seen, seen_of(versions.CHECK, {0: versions.Data(python="3.11", torch="2.9", nccl=nccl)}))
    found = [own for own in CHECK.judge(seen) if own.code == "P2P002.slow"]
    assert [len(own.evidence["pairs"]) for own in found] == named


PERMUTED = {0: 2, 1: 0, 2: 3, 3: 1}


def permuted(**changes):
    """Torch's GPU 0 is NVML's 2, and so on, by CUDA_VISIBLE_DEVICES."""
    gpus = {torch: {"uuid": uuid_of(nvml), "pci": f"0000:{nvml}b:00.0"} for torch, nvml in PERMUTED.items()}
    return together(world(4, {0: host_of(gpus=gpus, **changes)}), seen_of(p2p001.CHECK, {0: paths_of()}))


def test_a_gpu_has_the_number_of_nvml_and_its_uuid_in_every_matrix():
    seen = permuted(rates={(0, 1): 7 * GB})
    copy = next(matrix for matrix in CHECK.report(seen).matrices if matrix.name == "p2p.copy.n0")
    assert copy.rows == copy.columns == ("GPU 0", "GPU 1", "GPU 2", "GPU 3")
    assert copy.cells[2][0] == 7 * GB
    topology = next(matrix for matrix in p2p001.CHECK.report(seen.of(p2p001.CHECK)).matrices)
    uuids = {f"GPU {index}": uuid_of(index) for index in range(4)}
    assert topology.rows == copy.rows
    assert all(matrix.gpus == uuids for matrix in (*CHECK.report(seen).matrices, topology))


def test_findings_name_a_gpu_by_the_same_number(golden):
    (finding,) = CHECK.judge(permuted(pairs={(0, 1): {"wrong": 3}}))
    assert finding.gpus == (uuid_of(2), uuid_of(0))
    assert finding.evidence["pairs"] == ["GPU 2 -> GPU 0"]
    golden(finding)


def test_a_step_that_hangs_is_named_by_the_same_numbers(golden):
    first = ended(
        Status.HUNG,
        process=stuck(),
        so_far=structs.replace(KNOWN, gpus=(gpu(0, uuid=uuid_of(1)), gpu(1, uuid=uuid_of(0)))),
    )
    (finding,) = CHECK.judge(together(first, seen_of(p2p001.CHECK, {0: paths_of(count=2)}, size=2, gpus=2)))
    assert finding.evidence["last_step"] == "copy GPU 1 -> GPU 0"
    golden(finding)


def test_a_gpu_that_nvml_does_not_number_keeps_torchs():
    copied = world(2, {0: host_of(2, gpus={1: {"uuid": "MIG-1"}})})
    seen = together(copied, seen_of(p2p001.CHECK, {0: paths_of(count=2)}))
    assert CHECK.report(seen).matrices[0].rows == ("GPU 0", "cuda:1")


@given(st.dictionaries(st.sampled_from(list(permutations(range(4), 2))), st.floats(-1e12, 1e12), max_size=12))
def test_any_rates_are_judged_and_no_stranger_is_named(rates):
    for finding in judged(host_of(rates=rates)):
        assert set(finding.gpus) <= {uuid_of(index) for index in range(4)}
        assert (finding.title + finding.message + finding.fix).isascii()


def with_slots(*slots, rate, virtual=None, **changes):
    """GPUs that copy to and from the host at this rate, over these slots; `virtual` is what P2P001 saw."""
    count = len(slots)
    slow = {"to_bytes_per_s": rate, "from_bytes_per_s": rate}
    copies = host_of(count, gpus={index: slow | changes.get(f"gpu{index}", {}) for index in range(count)})
    look = GpuReading(gpus=tuple(healthy(index, **pcie(**slot)) for index, slot in enumerate(slots)))
    shape = {"size": count, "ranks_per_node": count, "gpus": count}
    met = together(world(count, {0: copies}), seen_of(memory_errors.CHECK, {0: look}, **shape))
    if virtual is not None:
        shown = paths_of(count=count, surroundings=around(count, virtual=virtual))
        met = together(met, seen_of(p2p001.CHECK, {0: shown}, **shape))
    return list(CHECK.judge(met))


GEN5 = {"generation_max": 5, "width": 16}


@pytest.mark.parametrize(
    ("generation", "width", "rate"), [(5, 16, 28 * GB), (4, 16, 14 * GB), (3, 16, 7 * GB), (3, 8, 3.5 * GB)]
)
def test_half_of_what_the_slot_gives_is_silent_and_less_is_not(golden, generation, width, rate):
    slots = [{"generation_max": generation, "width": width}] * 2
    assert with_slots(*slots, rate=rate) == []
    found = with_slots(*slots, rate=rate * 0.9)
    assert {finding.code for finding in found} == {"P2P002.host-slow"}
    golden(found[0])


@pytest.mark.parametrize("count", [2, 8])
def test_in_a_virtual_machine_the_slot_that_it_shows_promises_nothing(count):
    assert with_slots(*[GEN5] * count, rate=12 * GB, virtual=True) == []
    found = with_slots(*[GEN5] * count, rate=12 * GB, virtual=False)
    assert {finding.code for finding in found} == {"P2P002.host-slow"}


def test_a_gpu_slower_than_its_siblings_is_named(golden):
    (finding,) = judged(host_of(gpus={1: {"to_bytes_per_s": 25 * GB}}))
    assert (finding.code, finding.severity, finding.gpus) == ("P2P002.host-slow", Severity.WARNING, (uuid_of(1),))
    golden(finding)
    (odd,) = with_slots(*[GEN5] * 8, rate=12 * GB, virtual=True, gpu5={"from_bytes_per_s": 5 * GB})
    assert (odd.gpus, odd.evidence["expected_bytes_per_s"]) == ((uuid_of(5),), 12 * GB)


def test_a_slot_that_is_not_known_promises_nothing():
    assert with_slots({"generation_max": None}, {"width": None}, rate=1 * GB) == []


# The links to and from the host are known when the first pair is tried.
KNOWN = structs.replace(host_of(2), pairs=(), done=2)


def ended(status, at="copy GPU 0 -> GPU 1", *, so_far=KNOWN, process=None, **more):
    """A host with two GPUs whose first trial ended so."""
    seen = world(2)
    (trial,) = CHECK.plan(seen)
    trial = structs.replace(trial, number=len(seen.recording.trials))
    data = Raw(b"null") if so_far is None else Raw(encode(so_far))
    known = {"status": status, "last_step": at, "partial_data": data, "process": process, "seconds": 25}
    own = Outcome(trial=trial.number, code="P2P002", rank=0, **known, **more)
    recording = seen.recording
    recording = structs.replace(recording, trials=(*recording.trials, trial), outcomes=(*recording.outcomes, own))
    return Seen(seen.world, CHECK, recording)


def stuck(**changes):
    return ProcessState(**({"pid": 7, "state": "R", "step_seconds": 20.0} | changes))


COPY, RANKS = "copy GPU 0 -> GPU 1", (0, 1)
ENDS = {
    **{f"{status.value}": ({"status": status}, COPY, RANKS) for status in (Status.HUNG, Status.DIED, Status.UNHEARD)},
    "raised": (
        {"status": Status.RAISED, "error": "OutOfMemoryError: CUDA out of memory. Tried\nmore"}, COPY, RANKS
    ),
    "through the host": ({"status": Status.HUNG}, "copy GPU 0 -> host -> GPU 1", RANKS),
    "survives its kill": (
        {"status": Status.HUNG, "process": stuck(survived=True, state="D")}, COPY, RANKS
    ),
    "before any copy": ({"status": Status.HUNG, "so_far": None}, "context", (0,)),
}  # fmt: skip


@pytest.mark.parametrize(("end", "at", "ranks"), ENDS.values(), ids=ENDS)
def test_what_ends_a_copy_names_its_gpus(golden, end, at, ranks):
    error = "CUDA error: unspecified launch failure" if end["status"] is Status.DIED else ""
    seen = ended(**({"process": stuck(), "error": error} | end), at=at)
    (finding,) = CHECK.judge(seen)
    assert (finding.code, finding.severity) == (f"P2P002.{end['status'].value}", Severity.ERROR)
    assert (finding.gpus, finding.ranks) == (tuple(map(uuid_of, ranks)) if len(ranks) > 1 else (), ranks)
    assert (finding.hosts, finding.env) == (("n0",), {})
    assert CHECK.plan(seen) == ()
    golden(finding)


REFUSED = host_of(10, refused=((0, 9), (9, 0)))
MAPPED = tuple(pair for pair in REFUSED.pairs if (pair.source, pair.target) not in REFUSED.refused)


@pytest.mark.parametrize(
    ("host", "count", "word", "severity"),
    [
        pytest.param(structs.replace(REFUSED, pairs=MAPPED), 10, "untested", Severity.NOTE, id="no peer mappings"),
        pytest.param(host_of(2, done=3), 2, "unmeasured", Severity.WARNING, id="no time"),
    ],
)
def test_what_was_not_copied_is_not_known(golden, host, count, word, severity):
    (finding,) = judged(host, count=count)
    assert (finding.code, finding.severity) == (f"P2P002.{word}", severity)
    golden(finding)


def test_a_rank_that_was_still_taking_steps_is_not_condemned():
    seen = ended(Status.HUNG, process=stuck(step_seconds=0.4))
    (finding,) = CHECK.judge(seen)
    assert (finding.code, finding.severity) == ("P2P002.unmeasured", Severity.WARNING)
    assert CHECK.plan(seen) == ()


def test_a_gpu_that_allows_one_process_only_is_no_fault():
    error = "AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable"
    refused = ended(Status.RAISED, "context of GPU 1", so_far=structs.replace(KNOWN, done=0), error=error)
    shape = {"size": 2, "ranks_per_node": 2, "gpus": 2}

    def judged_in(mode):
        look = GpuReading(gpus=tuple(healthy(index, compute_mode=mode) for index in range(2)))
        return list(CHECK.judge(together(refused, seen_of(memory_errors.CHECK, {0: look}, **shape))))

    assert [(finding.code, finding.severity) for finding in judged_in(3)] == [("P2P002.untested", Severity.NOTE)]
    assert [(finding.code, finding.gpus) for finding in judged_in(0)] == [("P2P002.raised", (uuid_of(1),))]


def test_a_lost_rank_is_named_elsewhere():
    seen = with_events(ended(Status.UNHEARD), Event(kind=EventKind.LOST, rank=0, seconds=1.0))
    assert list(CHECK.judge(seen)) == []


APART = {rank: host_of(1, gpus={0: {"uuid": uuid_of(rank)}}) for rank in range(3)}


@pytest.mark.parametrize(
    ("seen", "groups"),
    [
        pytest.param(world(4, hosts=2), [((0,), (4,))], id="one rank of each host"),
        pytest.param(world(4, {0: host_of()}), [], id="once"),
        pytest.param(world(3, apart=True), [((0,),)], id="bound ranks one after the other"),
        pytest.param(world(3, {0: APART[0]}, apart=True), [((1,),)], id="the second bound rank"),
    ],
)
def test_each_gpu_is_tried_by_one_rank(seen, groups):
    assert [trial.groups for trial in CHECK.plan(seen)] == groups


def test_where_torch_shows_no_gpu_none_is_tried():
    nothing = {0: devices.Data(torch="2.13+cpu")}
    seen = seen_of(devices.CHECK, nothing, gpus=2, ranks_per_node=1).of(CHECK)
    assert CHECK.plan(seen) == ()
    assert "GPU002" in skip_text(CHECK, seen)


def test_ranks_that_see_gpus_of_their_own_have_no_pairs_and_that_is_said(golden):
    second = structs.replace(APART[1], gpus=(gpu(0, uuid=uuid_of(1), from_bytes_per_s=9 * GB),))
    seen = world(3, APART | {1: second}, apart=True)
    slow, apart = CHECK.judge(seen)
    assert (slow.gpus, slow.ranks) == ((uuid_of(1),), (1,))
    assert (apart.code, apart.severity) == ("P2P002.untested", Severity.NOTE)
    golden(slow, apart)
    (matrix,) = CHECK.report(seen).matrices
    assert matrix.columns == ("GPU 0 of rank 0", "GPU 0 of rank 1", "GPU 0 of rank 2")


def test_ranks_that_share_a_gpu_do_not_see_other_ones():
    seen = world(2, {0: host_of(1), 1: host_of(1)}, apart=True)
    assert list(CHECK.judge(seen)) == []
    assert [matrix.columns for matrix in CHECK.report(seen).matrices] == [("GPU 0",)]


def test_where_torch_shows_no_gpu_there_is_nothing_to_copy_between_and_nobody_is_blamed(golden):
    finding, _ = judged(Copies(), Copies())
    assert (finding.code, finding.severity) == ("P2P002.unmeasured", Severity.WARNING)
    assert (finding.ranks, finding.hosts, finding.is_about_run) == ((), (), True)
    golden(finding)
    assert not list(CHECK.report(world(4, {0: Copies()})).matrices)


def test_no_gpu_is_no_ground(golden):
    golden(skip_text(CHECK, seen_of(CHECK, {}, size=1).world))


def test_the_matrix_has_every_pair_and_no_diagonal():
    copy, host = CHECK.report(world(2, {0: host_of(2, rates={(0, 1): 30 * GB})})).matrices
    assert (copy.name, copy.unit) == ("p2p.copy.n0", "bytes_per_s")
    assert copy.rows == copy.columns == ("GPU 0", "GPU 1")
    assert copy.cells == ((None, 30 * GB), (USUAL, None))
    assert (host.name, host.rows) == ("p2p.host.n0", ("to-device", "from-device"))
    assert host.cells == ((50 * GB, 50 * GB), (50 * GB, 50 * GB))
    alone = CHECK.report(world(1, {0: host_of(1)}))
    assert [matrix.name for matrix in alone.matrices] == ["p2p.host.n0"]
    figures = CHECK.report(world(4, {0: host_of(rates={(0, 1): 30 * GB})})).figures
    found = [figures[f"p2p.{name}_bytes_per_s"] for name in ("copy.min", "copy.median", "host.min")]
    assert found == [30 * GB, USUAL, 50 * GB]
