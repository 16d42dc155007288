"""Who is who: a sick GPU is named by its UUID with the ranks that take it, however the job counts its GPUs.

Each job is told twice: as torch sees it, and by CUDA_VISIBLE_DEVICES alone, where torch could not say.
"""

import pytest
from cards import host_of, memory, uuid_of
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from seen import seen_of, together, with_arrivals

from ddpdiag.checks.gpu import devices, memory_errors, present
from ddpdiag.checks.gpu.cards import cards_of, visible_uuids
from ddpdiag.checks.gpu.present import Data as Enumerated
from ddpdiag.model import Severity
from ddpdiag.probes.gpu.nvml import Enumeration, ListedGpu
from ddpdiag.probes.gpu.visibility import device_index

ALL = tuple(uuid_of(index) for index in range(8))


def listed(count=8, *, model=lambda _: "NVIDIA H100", mig=(), lost=()):
    """What NVML lists, in the order of the PCI bus."""
    return tuple(
        ListedGpu(index=index, error="GPU is lost")
        if index in lost
        else ListedGpu(index=index, name=model(index), uuid=uuid_of(index), pci=f"0000:{index}b:00.0", mig=index in mig)
        for index in range(count)
    )


def row(value, visible, gpus=None):
    gpus = listed() if gpus is None else gpus
    return Enumerated(nvml=Enumeration(gpus=gpus), visible=visible, cuda_visible_devices=value)


def torch_row(uuids, local_rank):
    gpus = tuple(devices.TorchGpu("NVIDIA H100", uuid) for uuid in uuids)
    return devices.Data(torch="2.13", cuda="12.8", gpus=gpus, chosen=device_index(local_rank, len(gpus)))


def job(look, values, *, torch=None, gpus=None, visible=None):
    """One host: what each rank's variable says, what torch shows to each (None: nothing), how many GPUs are visible."""
    count = len(values)
    shown = [visible] * count if visible is not None else [len(v.split(",")) if v is not None else 8 for v in values]
    world = {"size": count, "ranks_per_node": count, "gpus": 8}
    met = seen_of(memory_errors.CHECK, {0: look}, **world)
    met = together(met, seen_of(present.CHECK, {r: row(v, shown[r], gpus) for r, v in enumerate(values)}, **world))
    if torch is not None:
        met = together(met, seen_of(devices.CHECK, {r: torch_row(u, r) for r, u in enumerate(torch)}, **world))
    arrivals = met.world.arrivals
    return with_arrivals(met, {rank: structs.replace(arrivals[rank], gpus=shown[rank]) for rank in arrivals})


def blamed(met):
    """What GPU003 says, as UUIDs with their ranks and severities."""
    return {finding.gpus: (finding.ranks, finding.severity) for finding in memory_errors.CHECK.judge(met)}


SICK = host_of({5: memory(uncorrected=1)})
FIFTH = (uuid_of(5),)


@pytest.mark.parametrize("with_torch", [True, False])
@pytest.mark.parametrize(
    ("value", "order", "ranks"),
    [
        ("7,6,5,4,3,2,1,0", (7, 6, 5, 4, 3, 2, 1, 0), (2,)),
        ("5,4,3,2,1,0", (5, 4, 3, 2, 1, 0), (0,)),
        (",".join(reversed(ALL)), (7, 6, 5, 4, 3, 2, 1, 0), (2,)),
        ("GPU-0-6,GPU-0-5", (6, 5), (1,)),
        (None, range(8), (5,)),
        # Left out by the variable: GPUs of other jobs.
        ("7,6", (7, 6), None),
        ("0,1,2,3,4", range(5), None),
        ("GPU-0-7,GPU-0-6", (7, 6), None),
    ],
)
def test_a_permuted_variable_names_the_right_gpu_and_rank(value, order, ranks, with_torch):
    uuids = [uuid_of(index) for index in order]
    run = job(SICK, [value] * len(uuids), torch=[uuids] * len(uuids) if with_torch else None)
    assert blamed(run) == ({FIFTH: (ranks, Severity.ERROR)} if ranks else {})


MIXED = listed(model=lambda index: "NVIDIA H100" if index < 4 else "NVIDIA L4")
UNCERTAIN = ((), Severity.WARNING)


def first_of_two(value):
    """Two ranks with one visible GPU each, of which rank 0 alone answered."""
    world = {"size": 2, "ranks_per_node": 2, "gpus": 1}
    rows = seen_of(present.CHECK, {0: row(value, 1)}, **world)
    return together(seen_of(memory_errors.CHECK, {0: SICK}, **world), rows)


JOBS = {
    # CUDA counts the fastest first, unless CUDA_DEVICE_ORDER says otherwise: its 1 may be NVML's 5.
    "torch counts more than the variable": (
        job(SICK, ["0,1"] * 2, torch=[[uuid_of(3), uuid_of(5)]] * 2),
        ((1,), Severity.ERROR),
    ),
    "slices of the only GPU that is cut": (
        job(SICK, ["MIG-4d5e", "MIG-5e6f"], gpus=listed(mig=(5,)), visible=1),
        ((0, 1), Severity.ERROR),
    ),
    "slices of one of several GPUs": (
        job(SICK, ["MIG-4d5e", "MIG-5e6f"], gpus=listed(mig=(3, 5)), visible=1),
        UNCERTAIN,
    ),
    "a slice's UUID in torch": (
        job(SICK, [f"MIG-{uuid_of(5)}/1/0"], torch=[["GPU-slice"]], gpus=listed(mig=(5,)), visible=1),
        ((0,), Severity.ERROR),
    ),
    "indices among different models": (job(SICK, ["5", "6"], gpus=MIXED), UNCERTAIN),
    "UUIDs among different models": (job(SICK, [uuid_of(5), uuid_of(6)], gpus=MIXED), ((0,), Severity.ERROR)),
    # CUDA leaves a lost GPU out and counts on.
    "indices beside a lost GPU": (job(SICK, ["4", "6"], gpus=listed(lost=(2,))), UNCERTAIN),
    # CUDA should show eight and shows seven: the one that is missing may be the sick one.
    "torch lacks one": (job(SICK, [None], torch=[[*ALL[:5], *ALL[6:]]]), ((), Severity.ERROR)),
    "another rank did not answer": (first_of_two("0"), UNCERTAIN),
    "another rank did not answer, and this one takes it": (first_of_two("5"), ((0,), Severity.ERROR)),
}


@pytest.mark.parametrize(("run", "blame"), JOBS.values(), ids=JOBS)
def test_a_rank_is_blamed_only_where_it_is_certain(golden, run, blame):
    assert blamed(run) == {FIFTH: blame}
    if blame == UNCERTAIN:
        golden(*memory_errors.CHECK.judge(run))


def test_a_rank_without_a_gpu_takes_none_and_is_named():
    run = job(SICK, ["5", ""])
    arrivals = {r: structs.replace(a, gpus=1 - r) for r, a in run.world.arrivals.items()}
    assert blamed(with_arrivals(run, arrivals)) == {FIFTH: ((0,), Severity.ERROR)}
    rows = {0: row("5", 1), 1: row("", 0)}
    found = list(present.CHECK.judge(seen_of(present.CHECK, rows, size=2, gpus=1)))
    assert [(f.code, f.severity, f.ranks) for f in found] == [("GPU001.hidden", Severity.ERROR, (1,))]


@pytest.mark.parametrize(
    ("value", "uuids"),
    [
        ("GPU-0-5", FIFTH),
        ("GPU-0", ()),  # fits all
        ("GPU-9", ()),
        ("5,5", ()),
        ("5,9,3", FIFTH),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("", ()),
        ("5gpu", FIFTH),
        (" 5 , 3 ", (uuid_of(5), uuid_of(3))),
    ],
)
def test_the_variable_is_read_as_cuda_does(value, uuids):
    assert visible_uuids(row(value, len(uuids))) == uuids


@given(st.permutations(range(8)), st.integers(0, 7), st.booleans(), st.booleans())
def test_whatever_the_order_the_sick_gpu_and_its_rank_are_named(order, sick, by_uuid, with_torch):
    value = ",".join(uuid_of(index) if by_uuid else str(index) for index in order)
    torch = [[uuid_of(index) for index in order]] * 8 if with_torch else None
    met = job(host_of({sick: memory(uncorrected=1)}), [value] * 8, torch=torch)
    assert blamed(met) == {(uuid_of(sick),): ((order.index(sick),), Severity.ERROR)}
    assert {card.health.uuid: card.ranks for card in cards_of(met)} == {
        uuid_of(index): (rank,) for rank, index in enumerate(order)
    }
