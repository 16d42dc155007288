"""GPU003 to GPU008: what one look at the GPUs of a host shows, and which ranks look."""

import pytest
from cards import LINKS, clocks, fabric, healthy, host_of, links, memory, pcie, seen, uuid_of
from hypothesis import given
from hypothesis import strategies as st
from seen import seen_of, skip_text, together

from ddpdiag.checks.gpu import clocks as clocks_check
from ddpdiag.checks.gpu import devices, memory_errors, nvlink, nvswitch, other_users, pcie_link, present
from ddpdiag.model import RunOptions, Severity
from ddpdiag.probes.gpu.health import Clocks, GpuReading, Health, MemoryErrors, Process
from ddpdiag.probes.gpu.links import Fabric, NvLink, PcieLink
from ddpdiag.probes.gpu.nvml import BrokenState, Enumeration, ListedGpu

MODULES = (memory_errors, pcie_link, clocks_check, nvlink, nvswitch, other_users)
ERROR, WARNING = Severity.ERROR, Severity.WARNING


def found(*looks, **world):
    """The findings of all six checks."""
    run = seen(*looks, **world)
    return [finding for module in MODULES for finding in module.CHECK.judge(run.of(module.CHECK))]


def with_fifth(**changes):
    return found(host_of({5: changes}))


def all_alike(changes, count=8):
    return host_of(dict.fromkeys(range(count), changes), count=count)


FOREIGN = {"memory_used_bytes": 20 << 30, "processes": (Process(4711, 19 << 30),)}
SICK = {
    "uncorrected": ("GPU003.uncorrected", ERROR, "reset", memory(uncorrected=2)),
    "sram": ("GPU003.sram", ERROR, "reset", memory(uncorrected=1, sram_uncorrected=1)),
    "sram threshold": ("GPU003.sram", ERROR, "isolate", memory(sram_threshold_exceeded=True)),
    "remap pending": ("GPU003.remap-pending", ERROR, "reset", memory(remap_pending=True)),
    "remap failed": ("GPU003.remap-failed", ERROR, "isolate", memory(remap_failed=True, remaps=300)),
    "retirement pending": ("GPU003.retirement-pending", ERROR, "reset", memory(retirement_pending=True)),
    "corrected": ("GPU003.corrected", WARNING, "monitor", memory(corrected=20_000_001)),
    "narrow": ("GPU004.narrow", WARNING, "reboot", pcie(width=8)),
    "power brake": ("GPU005.slowdown", WARNING, "monitor", clocks(events=0x84, celsius=88)),
    "thermal": ("GPU005.slowdown", WARNING, "monitor", clocks(events=0x48, celsius=88)),
    "hardware": ("GPU005.slowdown", WARNING, "monitor", clocks(events=0x9, celsius=88)),
    "software": ("GPU005.slowdown", WARNING, "monitor", clocks(events=0x21, celsius=88)),
    "power limit": ("GPU005.power-limit", WARNING, "none", clocks(power_limit_watts=350)),
    "link down": ("GPU006.down", ERROR, "reset", links(down=[7])),
    "link errors": ("GPU006.errors", WARNING, "monitor", links(link3={"errors": 94})),
    "fabric not started": ("GPU007.fabric", ERROR, "reboot", fabric(state=1)),
    "fabric in progress": ("GPU007.fabric", ERROR, "reboot", fabric(state=2)),
    "fabric failed": ("GPU007.fabric", ERROR, "reboot", fabric(status=999)),
    "fabric in progress whatever its status": ("GPU007.fabric", ERROR, "reboot", fabric(state=2, status=999)),
    "fabric unhealthy": ("GPU007.fabric-health", ERROR, "reboot", fabric(health=2)),
    "fabric limited": ("GPU007.fabric-health", WARNING, "monitor", fabric(health=3)),
    "recovery reset": ("GPU007.recovery", ERROR, "reset", {"recovery_action": 1}),
    "recovery reboot": ("GPU007.recovery", ERROR, "reboot", {"recovery_action": 2}),
    "recovery drain and reset": ("GPU007.recovery", ERROR, "reset", {"recovery_action": 4}),
    "recovery unknown": ("GPU007.recovery", WARNING, "monitor", {"recovery_action": 99}),
    "reset required": ("GPU007.reset-required", ERROR, "reset", {"broken": BrokenState.RESET_REQUIRED}),
    "lost": ("GPU007.lost", ERROR, "reboot", {"broken": BrokenState.LOST}),
    "recovery explains the code": (
        "GPU007.recovery",
        ERROR,
        "reset",
        {"recovery_action": 1, "broken": BrokenState.RESET_REQUIRED},
    ),
    "process of another job": ("GPU008.in-use", WARNING, "none", FOREIGN),
    "process beside a desktop": ("GPU008.in-use", WARNING, "none", FOREIGN | {"has_graphics": True}),
    "memory without a process": ("GPU008.in-use", WARNING, "none", {"memory_used_bytes": 1 << 30}),
    "small process": (
        "GPU008.in-use",
        WARNING,
        "none",
        {"memory_used_bytes": 40 << 20, "processes": (Process(4711, 27 << 20),)},
    ),
    "slices": ("GPU008.mig", WARNING, "none", {"mig": True, "memory_used_bytes": 20 << 30}),
    "slices have no links": ("GPU008.mig", WARNING, "none", {"mig": True, **links(down=range(18))}),
    "prohibited": ("GPU008.prohibited", ERROR, "none", {"compute_mode": 2}),
}


@pytest.mark.parametrize(("code", "severity", "action", "changes"), SICK.values(), ids=SICK)
def test_a_sick_gpu_is_named_with_its_remedy(golden, code, severity, action, changes):
    (finding,) = with_fifth(**changes)
    assert (finding.code, finding.severity, finding.evidence.get("action")) == (code, severity, action)
    assert (finding.gpus, finding.hosts) == ((uuid_of(5),), ("n0",))
    golden(finding)


def bridged(numbers):
    return {"nvlinks": tuple(NvLink(number=number, up=number in numbers) for number in range(12))}


A100 = {"name": "NVIDIA A100-PCIE-40GB", **links(down=range(18))}
SILENT = {
    "healthy": host_of(),
    "some remaps": host_of({5: memory(remaps=511)}),
    "some corrected errors": host_of({5: memory(corrected=20_000_000)}),
    "no counts": host_of({5: memory(uncorrected=None, sram_uncorrected=None, corrected=None)}),
    "no ECC": GpuReading(gpus=(healthy(0, memory=MemoryErrors()),)),
    "not opened, which GPU001 reports": GpuReading(gpus=(Health(index=0, error="GPU is lost"),)),
    "full width of any generation": host_of({5: pcie(generation_max=4, replays=9999)}),
    "narrow for the whole model": all_alike(pcie(width=8)),
    "no link": host_of({5: {"pcie": PcieLink()}}),
    "no width": host_of({5: pcie(width_max=None)}),
    "no clocks": host_of({5: {"clocks": Clocks()}}),
    "a higher power limit": host_of({5: clocks(power_limit_watts=750)}),
    "a board of less power": host_of({1: clocks(power_limit_watts=450, default_power_limit_watts=450)}, count=2),
    "a power limit for all": all_alike(clocks(power_limit_watts=500)),
    "links that all have down": all_alike(links(down=[12, 13])),
    "links of another model": host_of({4: A100, 5: A100}),
    "a bridge on other numbers": host_of({n: bridged(range(4, 8) if n == 3 else range(4)) for n in range(4)}, count=4),
    "some links not reported": host_of({5: {"nvlinks": LINKS[:6]}}),
    "no fabric": host_of({5: {"fabric": Fabric(), "recovery_action": None}}),
    "memory of an idle driver": host_of({5: {"memory_used_bytes": 15 << 20}}),
    "no memory and no processes": host_of({5: {"memory_used_bytes": None, "processes": None}}),
    "memory of a display": host_of({5: {"memory_used_bytes": 40 << 20}}),
    "memory of a desktop": host_of({5: {"memory_used_bytes": 611 << 20, "has_graphics": True}}),
}


@pytest.mark.parametrize("look", SILENT.values(), ids=SILENT)
def test_what_is_no_fault_is_silent(look):
    assert found(look) == []


@pytest.mark.parametrize(
    ("settings", "changes"),
    [({"GPU003.corrected_errors": "5e7"}, memory(corrected=20_000_001)), ({"GPU008.used_mib": "30000"}, FOREIGN)],
)
def test_limits_can_be_set(settings, changes):
    assert found(host_of({5: changes}), options=RunOptions(settings=settings)) == []


def test_sram_errors_are_not_counted_twice(golden):
    both = with_fifth(**memory(uncorrected=3, sram_uncorrected=1))
    assert [finding.code for finding in both] == ["GPU003.uncorrected", "GPU003.sram"]
    golden(*both)


def test_a_gpu_that_two_ranks_saw_is_one_finding():
    looks = {rank: host_of({5: memory(uncorrected=1)}) for rank in range(2)}
    run = seen_of(memory_errors.CHECK, looks, ranks_per_node=8, gpus=8)
    assert len(list(memory_errors.CHECK.judge(run))) == 1


def test_nothing_that_can_be_read_is_unknown(golden):
    (gone,) = found(GpuReading(error="Driver Not Loaded"))
    (mute,) = found(GpuReading(gpus=(Health(index=0, uuid="GPU-1", name="NVIDIA T400"),)))
    assert gone.code == mute.code == "GPU003.unreadable"
    golden(gone, mute)


def test_without_gpu003_it_says_that_nothing_was_read(golden):
    alone = seen(size=8, options=RunOptions(select=("GPU004",)))
    empty = type(alone.recording)(header=alone.recording.header, arrivals=alone.world.arrivals)
    golden(pcie_link.CHECK.skip(type(alone)(alone.world, pcie_link.CHECK, empty)).text)


@given(st.integers(0, 0xFFF))
def test_bits_are_tested_as_bits(events):
    harmful = 0x8 | 0x20 | 0x40 | 0x80
    codes = {finding.code for finding in with_fifth(**clocks(events=events))}
    assert codes == ({"GPU005.slowdown"} if events & harmful else set())


def test_a_card_without_a_bridge_is_not_condemned(golden):
    plain = {"fabric": Fabric()}
    (finding,) = found(host_of({0: plain, 1: plain, 2: plain | links(down=range(18))}, count=3))
    assert (finding.severity, finding.evidence["action"]) == (Severity.WARNING, "monitor")
    golden(finding)


def test_modules_on_a_board_have_no_bridges(golden):
    board = {"name": "NVIDIA A100-SXM4-80GB", "fabric": Fabric()}
    (finding,) = found(host_of(dict.fromkeys(range(8), board) | {5: board | links(down=(3,))}))
    assert (finding.code, finding.gpus, finding.evidence["action"]) == ("GPU006.down", (uuid_of(5),), "reset")
    golden(finding)


def test_links_that_half_of_the_gpus_on_boards_lack_are_missing_there():
    missing = found(all_alike(links(down=[1, 4])), host_of(host=1))
    assert [(finding.code, finding.gpus) for finding in missing] == [("GPU006.down", (uuid_of(n),)) for n in range(8)]


@pytest.mark.parametrize(("changes", "severity"), [({"state": 2}, WARNING), ({"status": 999}, ERROR)])
def test_a_gpu_that_has_not_joined_and_on_which_cuda_starts_is_a_warning(changes, severity):
    row = devices.Data(torch="2", gpus=tuple(devices.TorchGpu("H100", uuid_of(index)) for index in range(8)))
    torch = seen_of(devices.CHECK, dict.fromkeys(range(8), row), size=8, ranks_per_node=8, gpus=8)
    run = together(seen(host_of({5: fabric(**changes)})), torch)
    assert [finding.severity for finding in nvswitch.CHECK.judge(run.of(nvswitch.CHECK))] == [severity]


def test_a_slice_is_harmless_for_a_single_rank():
    assert found(host_of({0: {"mig": True}}, count=1), size=1, gpus=1) == []


def with_slices(*uuids, backend="auto"):
    """What GPU002 and GPU008 say of a host with two GPUs that are cut, where the ranks take these slices."""
    rows = {
        rank: devices.Data(torch="2", cuda="13", gpus=(devices.TorchGpu("MIG", uuid),), chosen=0)
        for rank, uuid in enumerate(uuids)
    }
    world = {"size": len(uuids), "ranks_per_node": len(uuids), "gpus": 1, "options": RunOptions(backend=backend)}
    listed = Enumeration(gpus=tuple(ListedGpu(index=index, uuid=uuid_of(index), mig=True) for index in range(2)))
    run = seen_of(memory_errors.CHECK, {0: all_alike({"mig": True}, count=2)}, **world)
    run = together(run, seen_of(devices.CHECK, rows, **world))
    run = together(run, seen_of(present.CHECK, dict.fromkeys(rows, present.Data(nvml=listed, visible=1)), **world))
    return [list(check.judge(run.of(check))) for check in (devices.CHECK, other_users.CHECK)]


def test_ranks_that_share_a_slice_are_an_error(golden):
    (shared,), cut = with_slices("MIG-a", "MIG-a", "MIG-a")
    assert [(finding.code, finding.severity) for finding in cut] == [("GPU008.mig", Severity.WARNING)] * 2
    assert (shared.code, shared.severity, shared.ranks) == ("GPU002.shared", Severity.ERROR, (0, 1, 2))
    golden(shared)


def test_a_slice_for_each_rank_or_gloo_is_no_error():
    shared, cut = with_slices("MIG-a", "MIG-b")
    assert (shared, {finding.severity for finding in cut}) == ([], {Severity.WARNING})
    (shared,), _ = with_slices("MIG-a", "MIG-a", backend="gloo")
    assert shared.severity is Severity.WARNING


def test_a_torch_that_does_not_start_on_slices_is_an_error_with_their_fix():
    rows = {0: devices.Data(torch="2.6", cuda="12", error="device >= 0 && device < num_gpus INTERNAL ASSERT FAILED")}
    cut = seen_of(memory_errors.CHECK, {0: host_of({0: {"mig": True}})})
    (finding,) = devices.CHECK.judge(together(seen_of(devices.CHECK, rows, gpus=1), cut))
    assert (finding.code, finding.fix) == ("GPU002.cuda-start", devices.SLICES_FIX)


@pytest.mark.parametrize(
    ("views", "world", "groups"),
    [
        pytest.param(dict.fromkeys(range(8), ("a", "b")), {}, [(0,), (4,)], id="one of each host"),
        pytest.param({0: ("a",), 1: ("b",), 2: ("a",), 3: ("c",)}, {}, [(0,), (1,), (3,)], id="each that is bound"),
        pytest.param(dict.fromkeys(range(4), ()), {}, [(0,)], id="one where no GPU was seen"),
        pytest.param({}, {"size": 4}, [(0,), (1,), (2,), (3,)], id="all without an answer from GPU001"),
        pytest.param({0: ()}, {"size": 4, "gpus": 0}, [], id="none without GPUs"),
    ],
)
def test_each_gpu_is_looked_at_by_one_rank(views, world, groups):
    rows = {
        rank: present.Data(nvml=Enumeration(gpus=tuple(ListedGpu(index=i, uuid=u) for i, u in enumerate(uuids))))
        for rank, uuids in views.items()
    }
    before = seen_of(present.CHECK, rows, **({"ranks_per_node": 4, "gpus": 4} | world))
    trials = memory_errors.CHECK.plan(before.of(memory_errors.CHECK))
    assert [group for trial in trials for group in trial.groups] == groups


def test_gpus_are_looked_at_once():
    assert memory_errors.CHECK.plan(seen(host_of())) == ()


def test_no_gpu_is_no_ground(golden):
    golden(skip_text(memory_errors.CHECK, seen(gpus=0, size=1).world))
    assert skip_text(memory_errors.CHECK, seen(host_of()).world) is None


def test_the_report_has_the_counters_of_each_gpu():
    links_with_errors = {"nvlinks": tuple(NvLink(number=number, up=True, errors=number) for number in range(3))}
    sick = host_of({2: memory(corrected=7) | pcie(replays=3) | links_with_errors, 5: {"uuid": None}})
    rows = memory_errors.CHECK.report(seen(sick, host_of(host=1))).counters
    assert len(rows) == 15
    totals = {row.part: row.totals for row in rows if row.totals}
    assert totals == {uuid_of(2): {"correctable_memory_errors": 7, "nvlink_errors": 3, "pcie_replays": 3}}
    assert {row.host for row in rows if row.part in (uuid_of(0), uuid_of(0, 1))} == {"n0", "n1"}
