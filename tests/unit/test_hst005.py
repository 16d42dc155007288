"""Products and a group of one, as HST005 judges them."""

from dataclasses import replace

from msgspec import structs
from seen import seen_of

from ddpdiag.checks.gpu import devices
from ddpdiag.checks.host.alone import CHECK, LOOPBACK, Data
from ddpdiag.judgement.selection import selected
from ddpdiag.model import Finding, Options, Recording, Severity
from ddpdiag.model.measurements import Group, Product

RIGHT = Group(backend="gloo", right=True)
CPU = Product(device="the CPU", size=512)


def findings(*products: Product, group: Group = RIGHT) -> list[Finding]:
    return list(CHECK.judge(seen_of(CHECK, {0: Data(products=products or (CPU,), group=group)}, gpus=len(products))))


def test_right_values_are_silent():
    assert findings() == []


def test_wrong_elements_are_an_error_of_that_gpu(golden):
    sick = Product(device="GPU 1", size=512, uuid="GPU-5f2c91aa", wrong=3)
    (finding,) = findings(Product(device="GPU 0", size=512, uuid="GPU-a"), sick)
    assert (finding.code, finding.severity, finding.gpus) == ("HST005.wrong", Severity.ERROR, ("GPU-5f2c91aa",))
    assert finding.hosts == ("n0",)
    golden(finding)


def test_a_gpu_that_cannot_compute_is_named_with_what_torch_said(golden):
    (finding,) = findings(Product(device="GPU 0", size=512, uuid="GPU-5f2c91aa", error="CUDA error: out of memory"))
    assert finding.code == "HST005.failed"
    golden(finding)


def test_a_group_of_one_that_fails_or_sums_wrong_is_an_error(golden):
    (failed,) = findings(group=Group(backend="nccl", error="unhandled system error"))
    (wrong,) = findings(group=Group(backend="gloo", right=False))
    assert (failed.code, wrong.code) == ("HST005.group", "HST005.group")
    golden(failed, wrong)


def test_without_cuda_its_group_is_no_second_finding():
    seen = seen_of(CHECK, {0: Data(products=(CPU,), group=Group(backend="nccl", error="built without nccl"))}, gpus=1)
    built = seen_of(devices.CHECK, {0: devices.Data(torch="2.13.0+cpu")}, gpus=1).recording
    (outcome,) = built.outcomes
    (trial,) = built.trials
    recording = structs.replace(
        seen.recording,
        outcomes=(*seen.recording.outcomes, structs.replace(outcome, trial=2)),
        trials=(*seen.recording.trials, structs.replace(trial, number=2)),
    )
    assert list(CHECK.judge(replace(seen, recording=recording))) == []


def test_it_stays_on_the_loopback_interface():
    seen = seen_of(CHECK, {})
    (trial,) = CHECK.plan(replace(seen, recording=Recording(header=seen.recording.header)))
    assert dict(trial.env) == LOOPBACK
    assert set(LOOPBACK.values()) == {"lo"}


def test_only_a_host_that_is_asked_alone_takes_it_unnamed():
    assert not selected(CHECK, Options())
    assert not selected(CHECK, Options(select=("HST",)))
    assert selected(CHECK, Options(select=("HST005",)))
    assert selected(CHECK, Options(alone=True))
