"""GPU001: the GPUs that should be there."""

import pytest
from seen import seen_of

from ddpdiag.checks.gpu.present import CHECK, Data
from ddpdiag.model import Options, Severity
from ddpdiag.probes.gpu.nvml import Enumeration, ListedGpu, Trouble
from ddpdiag.probes.gpu.visibility import PciFunction


def found(*rows, ranks_per_node=1, **world):
    return list(CHECK.judge(seen_of(CHECK, dict(enumerate(rows)), ranks_per_node=ranks_per_node, **world)))


def codes(*rows, **world):
    return [finding.code for finding in found(*rows, **world)]


def gpu(index, host=0, **changes):
    own = {"name": "NVIDIA H100", "uuid": f"GPU-{host}-{index}", "pci": f"0000:{index}b:00.0"}
    return ListedGpu(index=index, **(own | changes))


def functions(count, driver: str | None = "nvidia"):
    return tuple(PciFunction(f"0000:{index}b:00.0", driver) for index in range(count))


def healthy(count, host=0, **changes):
    nvml = Enumeration(gpus=tuple(gpu(index, host) for index in range(count)), driver="580.1")
    return Data(**({"nvml": nvml, "functions": functions(count), "visible": count} | changes))


# NVML's own texts.
ERRORS = {
    Trouble.ABSENT: "NVML Shared Library Not Found",
    Trouble.MISMATCH: "Driver/library version mismatch",
    Trouble.OTHER: "Unknown Error",
}


def without(trouble=Trouble.ABSENT, **changes):
    return Data(nvml=Enumeration(trouble=trouble, error=ERRORS[trouble]), **changes)


def test_all_gpus_there_is_silent():
    assert found(healthy(8), healthy(8, host=1)) == []


def test_a_host_without_any_sign_of_a_gpu_is_a_cpu_host():
    assert found(without()) == []


def test_a_gpu_on_the_bus_without_a_driver_is_an_error_that_names_host_and_pci_id(golden):
    (finding,) = found(without(functions=functions(1, driver=None)))
    assert (finding.code, finding.severity, finding.hosts) == ("GPU001.fewer", Severity.ERROR, ("n0",))
    assert finding.evidence["pci"] == ["0000:0b:00.0"]
    golden(finding)


def test_cpus_can_be_meant():
    options = Options(expect_gpus=0)
    assert found(without(functions=functions(1, driver="nouveau")), options=options) == []


@pytest.mark.parametrize(
    ("rows", "options", "host"),
    [
        pytest.param([without(promised=2)], Options(), "n0", id="than-a-variable-names"),
        pytest.param([without(visible=2)], Options(), "n0", id="than-the-driver-lists"),
        pytest.param([healthy(8), healthy(8, host=1), without()], Options(), "n2", id="than-other-hosts-have"),
        pytest.param([healthy(8), healthy(7, host=1)], Options(expect_gpus=8), "n1", id="than-an-option-says"),
    ],
)
def test_fewer_gpus_are_an_error_of_their_host(golden, rows, options, host):
    (finding,) = found(*rows, options=options)
    assert (finding.code, finding.severity, finding.hosts) == ("GPU001.fewer", Severity.ERROR, (host,))
    golden(finding)


def test_a_gpu_that_fell_off_the_bus_is_named_by_its_pci_id(golden):
    (finding,) = found(healthy(7, functions=functions(8)))
    assert (finding.code, finding.severity) == ("GPU001.fewer", Severity.ERROR)
    assert finding.evidence["pci"] == ["0000:7b:00.0"]
    golden(finding)


def test_a_share_of_the_hosts_gpus_is_enough_when_it_was_promised():
    assert found(healthy(2, functions=functions(8), promised=2), healthy(8, host=1)) == []


@pytest.mark.parametrize(
    ("row", "severity"),
    [
        pytest.param({"promised": 1, "cuda_visible_devices": "8"}, Severity.ERROR, id="a-wrong-index-all"),
        pytest.param(
            {"visible": 2, "promised": 3, "cuda_visible_devices": "0,1,9"},
            Severity.ERROR,
            id="a-wrong-index-what-follows",
        ),
        pytest.param({"cuda_visible_devices": ""}, Severity.WARNING, id="an-empty-variable"),
        pytest.param({}, Severity.WARNING, id="no-variable"),
        pytest.param({"functions": ()}, Severity.WARNING, id="what-no-procfs-lists"),
    ],
)
def test_gpus_that_are_hidden_are_told_with_the_variable(golden, row, severity):
    (finding,) = found(healthy(8, **({"visible": 0} | row)))
    assert (finding.code, finding.severity, finding.hosts) == ("GPU001.hidden", severity, ("n0",))
    assert "CUDA_VISIBLE_DEVICES" in finding.fix
    golden(finding)


def test_only_the_rank_with_the_wrong_variable_is_named():
    rows = [healthy(2, visible=1, promised=1, cuda_visible_devices=value) for value in ("0", "1")]
    wrong = healthy(2, visible=0, promised=1, cuda_visible_devices="2")
    (finding,) = found(rows[0], wrong, ranks_per_node=2)
    assert finding.ranks == (1,)


def test_hidden_gpus_are_an_error_where_they_are_expected_and_silent_where_cpus_are(golden):
    row = healthy(8, visible=0, cuda_visible_devices="")
    (finding,) = found(row, options=Options(expect_gpus=8))
    assert (finding.code, finding.severity) == ("GPU001.hidden", Severity.ERROR)
    assert "--expect-gpus" in finding.message
    golden(finding)
    assert found(row, options=Options(expect_gpus=0)) == []


def test_hidden_gpus_are_an_error_where_they_were_promised_or_others_have_some():
    (promised,) = found(healthy(8, visible=0, promised=8, cuda_visible_devices=""))
    (odd,) = found(healthy(8), healthy(8, host=1, visible=0, cuda_visible_devices=""))
    assert (promised.severity, odd.severity, odd.hosts) == (Severity.ERROR, Severity.ERROR, ("n1",))


def test_gloo_that_was_asked_for_needs_no_gpu():
    row = healthy(8, visible=0, promised=8, cuda_visible_devices="")
    assert [f.severity for f in found(row, options=Options(backend="gloo"))] == [Severity.WARNING]


def test_gpus_of_ranks_that_did_not_answer_are_not_missed():
    rows = {0: healthy(4, visible=1, promised=4, cuda_visible_devices="0")}
    assert list(CHECK.judge(seen_of(CHECK, rows, size=4, ranks_per_node=4))) == []


def test_gpus_bound_to_ranks_are_counted_together():
    rows = [
        Data(nvml=Enumeration(gpus=(gpu(index),)), functions=functions(4), visible=1, promised=4) for index in range(4)
    ]
    assert codes(*rows, ranks_per_node=4) == ["GPU001.isolated"]


def test_mig_slices_are_not_counted_against_nvml():
    nvml = Enumeration(gpus=(gpu(0, mig=True),))
    assert found(Data(nvml=nvml, functions=functions(1), visible=1, promised=7)) == []


@pytest.mark.parametrize(
    "row", [without(functions=None), without(Trouble.OTHER)], ids=["an-unreadable-bus", "nvml-that-fails"]
)
def test_a_number_that_is_unknown_is_not_healthy(golden, row):
    (finding,) = found(row)
    assert (finding.code, finding.severity) == ("GPU001.unreadable", Severity.WARNING)
    golden(finding)


def test_an_unreadable_bus_does_not_matter_when_all_that_was_promised_is_there():
    assert found(healthy(8, functions=None, promised=8)) == []


def test_a_driver_that_differs_from_its_library_is_one_error():
    (finding,) = found(without(Trouble.MISMATCH, functions=functions(8)))
    assert (finding.code, finding.severity) == ("GPU001.mismatch", Severity.ERROR)


def test_nvml_that_fails_where_the_number_is_known_leaves_nothing_unknown(golden):
    (cpus,) = found(without(Trouble.OTHER), options=Options(expect_gpus=0))
    (second,) = found(healthy(2), without(Trouble.OTHER, functions=functions(2), visible=2), ranks_per_node=2)
    assert cpus.code == second.code == "GPU001.nvml"
    golden(cpus, second)


def test_a_lost_gpu_is_named_once(golden):
    nvml = Enumeration(gpus=(gpu(0), ListedGpu(index=1, error="GPU is lost")))
    (finding,) = found(Data(nvml=nvml, functions=functions(2), visible=2))
    assert (finding.code, finding.hosts) == ("GPU001.lost", ("n0",))
    assert "0000:1b:00.0" in finding.message
    golden(finding)


# Peers that are hidden from each other --------------------------------------------------------------------------------


def bound(index, **changes):
    """A rank that its cgroup shows one GPU, as its cuda:0."""
    nvml = Enumeration(gpus=(gpu(0, uuid=f"GPU-{index}", pci=f"0000:{index}b:00.0"),))
    return Data(**({"nvml": nvml, "functions": functions(4), "visible": 1} | changes))


def test_ranks_that_a_cgroup_shows_one_gpu_each_are_a_warning_with_the_remedy(golden):
    (finding,) = found(*(bound(index, cuda_visible_devices="0") for index in range(4)), ranks_per_node=4)
    assert (finding.code, finding.severity, finding.hosts) == ("GPU001.isolated", Severity.WARNING, ("n0",))
    assert finding.env == {}  # nothing was tried
    assert "--gpu-bind=none" in finding.fix
    assert "NCCL_CUMEM_ENABLE" not in finding.fix
    assert "NCCL_P2P_DISABLE=1" in finding.fix
    golden(finding)


def test_only_the_host_whose_ranks_are_apart_is_named():
    open_host = [healthy(2, host=1) for _ in range(2)]
    (finding,) = [f for f in found(bound(0), bound(1), *open_host, ranks_per_node=2) if f.code == "GPU001.isolated"]
    assert (finding.hosts, finding.ranks) == (("n0",), (0, 1))


def test_one_rank_on_a_host_has_no_peer_to_be_hidden_from():
    assert found(*(bound(n, functions=functions(1)) for n in range(2)), ranks_per_node=1) == []


def test_ranks_that_see_all_gpus_in_another_order_are_not_apart():
    rows = [healthy(2, cuda_visible_devices=value) for value in ("0,1", "1,0")]
    assert found(*rows, ranks_per_node=2) == []


def test_a_gpu_that_one_rank_cannot_open_is_lost_and_not_hidden():
    lost = Data(
        nvml=Enumeration(gpus=(gpu(0), ListedGpu(index=1, error="GPU is lost"))), functions=functions(2), visible=2
    )
    assert codes(healthy(2), lost, ranks_per_node=2) == ["GPU001.lost"]
