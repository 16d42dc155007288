"""GPU006: NVLinks."""

from cards import LINKS, host_of, judged, links, uuid_of, with_fifth

from ddpdiag.checks.gpu.nvlink import CHECK
from ddpdiag.model import Severity
from ddpdiag.probes.gpu.links import Fabric, NvLink


def test_a_link_that_the_siblings_have_up_is_an_error(golden):
    (finding,) = with_fifth(CHECK, **links(down=[7]))
    assert (finding.code, finding.severity, finding.gpus) == ("GPU006.down", Severity.ERROR, (uuid_of(5),))
    assert finding.evidence["links_down"] == [7]
    golden(finding)


def test_a_card_without_a_bridge_is_not_condemned(golden):
    plain = {"fabric": Fabric()}
    sick = dict.fromkeys(range(2), plain) | {2: {**plain, **links(down=range(18))}}
    (finding,) = judged(CHECK, host_of(sick, count=3))
    assert (finding.severity, finding.evidence["action"]) == (Severity.WARNING, "monitor")
    golden(finding)


def test_slices_have_no_links():
    assert with_fifth(CHECK, mig=True, **links(down=range(18))) == []


def test_links_that_all_have_down_are_how_the_board_is_made():
    assert judged(CHECK, host_of({index: links(down=[12, 13]) for index in range(8)})) == []


def test_another_model_has_other_links():
    changes = {"name": "NVIDIA A100-PCIE-40GB", **links(down=range(18))}
    assert judged(CHECK, host_of({4: changes, 5: changes})) == []


def test_a_bridge_on_other_numbers_is_no_missing_link():
    def bridged(numbers):
        return {"nvlinks": tuple(NvLink(number=number, up=number in numbers) for number in range(12))}

    sick = {index: bridged(range(4)) for index in range(3)} | {3: bridged(range(4, 8))}
    assert judged(CHECK, host_of(sick, count=4)) == []


def test_links_of_which_some_are_not_told_are_no_finding():
    assert with_fifth(CHECK, nvlinks=LINKS[:6]) == []


def test_replays_and_recoveries_are_a_warning(golden):
    (finding,) = with_fifth(CHECK, **links(link3={"errors": 94}))
    assert (finding.code, finding.severity) == ("GPU006.errors", Severity.WARNING)
    golden(finding)


def test_modules_on_a_board_have_no_bridges(golden):
    board = {"name": "NVIDIA A100-SXM4-80GB", "fabric": Fabric()}
    changes = {index: board | (links(down=(3,)) if index == 5 else {}) for index in range(8)}
    (finding,) = judged(CHECK, host_of(changes))
    assert (finding.code, finding.gpus, finding.evidence["action"]) == ("GPU006.down", (uuid_of(5),), "reset")
    golden(finding)


def test_links_that_half_of_the_gpus_on_boards_lack_are_missing_there():
    lacking = host_of({index: links(down=[1, 4]) for index in range(8)})
    found = judged(CHECK, lacking, host_of(host=1))
    assert [(finding.code, finding.gpus) for finding in found] == [("GPU006.down", (uuid_of(n),)) for n in range(8)]
