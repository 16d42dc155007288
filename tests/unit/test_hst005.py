"""Products, as HST005 judges them."""

from seen import seen_of

from ddpdiag.checks.host.alone import CHECK, Data
from ddpdiag.judgement.selection import selected
from ddpdiag.model import Finding, Options, Severity
from ddpdiag.model.measurements import Product

CPU = Product(device="the CPU", size=512)


def findings(*products: Product) -> list[Finding]:
    return list(CHECK.judge(seen_of(CHECK, {0: Data(products=products or (CPU,))}, gpus=len(products))))


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


def test_only_a_host_that_is_asked_alone_takes_it_unnamed():
    assert not selected(CHECK, Options())
    assert not selected(CHECK, Options(select=("HST",)))
    assert selected(CHECK, Options(select=("HST005",)))
    assert selected(CHECK, Options(alone=True))
