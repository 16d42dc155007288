"""Products, as HST005 judges them."""

import pytest
from seen import seen_of

from ddpdiag.checks.host.arithmetic import CHECK, Data
from ddpdiag.judgement.selection import is_selected
from ddpdiag.model import Finding, RunOptions, Severity
from ddpdiag.model.measurements import Product

CPU = Product(device="the CPU", size=512)


def findings(*products: Product) -> list[Finding]:
    return list(CHECK.judge(seen_of(CHECK, {0: Data(products=products or (CPU,))}, gpus=len(products))))


def test_right_values_are_silent():
    assert findings() == []


@pytest.mark.parametrize(
    ("word", "fault"), [("wrong", {"wrong": 3}), ("failed", {"error": "CUDA error: out of memory"})]
)
def test_a_gpu_that_computes_wrongly_or_not_at_all_is_named(golden, word, fault):
    sick = Product(device="GPU 1", size=512, uuid="GPU-5f2c91aa", **fault)
    (finding,) = findings(Product(device="GPU 0", size=512, uuid="GPU-a"), sick)
    assert (finding.code, finding.severity) == (f"HST005.{word}", Severity.ERROR)
    assert (finding.hosts, finding.gpus) == (("n0",), ("GPU-5f2c91aa",))
    golden(finding)


def test_only_a_host_that_is_asked_alone_takes_it_unnamed():
    assert not is_selected(CHECK, RunOptions())
    assert not is_selected(CHECK, RunOptions(select=("HST",)))
    assert is_selected(CHECK, RunOptions(select=("HST005",)))
    assert is_selected(CHECK, RunOptions(alone=True))
