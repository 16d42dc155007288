"""Every fault of the gallery is found in time, with its culprit and no other, and nothing is left behind."""

import pytest
from runs import faults

pytestmark = pytest.mark.hosts

LEAST_SHARE_WHOLE = 1 / 3


def _in_its_tier(name, fault):
    return pytest.param(name, marks=pytest.mark.deep) if fault.deep else name


@pytest.mark.parametrize("name", [_in_its_tier(name, fault) for name, fault in faults().items()])
def test_fault(results, name):
    result = results[name]
    if result.skipped:
        pytest.skip(result.skipped)
    found = [(finding["severity"], finding["code"], finding["ranks"], finding["hosts"]) for finding in result.findings]
    assert not result.flaws, f"{'; '.join(result.flaws)}\n{found}\n{result.told}"


def test_enough_faults_meet_the_whole_check():
    known = faults().values()
    assert sum(fault.is_whole for fault in known) >= LEAST_SHARE_WHOLE * len(known)
