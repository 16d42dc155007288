"""The report for scripts."""

import json
import math

from reports import NO_GPU, SLOW, fit, rank_row, unfit

from ddpdiag.codec import decode
from ddpdiag.codec import indented_json as render
from ddpdiag.model import Report


def test_the_contract_holds():
    report = json.loads(render(unfit()))
    assert report["schema"] == "ddpdiag.report/1"
    assert (report["verdict"], report["exit_code"], report["seconds"]) == ("unfit", 1, 7.912)
    world = {"size": 4, "hosts": ["n0", "n1"], "launcher": "torchrun", "backend": "gloo", "hosts_by_leaf_switch": {}}
    assert report["world"] == world | {"scheduler": ""}
    assert report["ranks"][0]["gpu_uuid"] is None
    assert report["stages"][0] == {
        "name": "launch",
        "status": "done",
        "seconds": 0.05,
        "severity": None,
        "codes": [],
        "detail": "",
    }
    assert report["checks"][4]["skipped_because"] == NO_GPU
    assert report["findings"][2]["env"] == SLOW.env
    assert report["measurements"]["allreduce_bytes"] == 67108864


def test_it_is_indented_and_ends_its_last_line():
    text = render(fit())
    assert text.startswith('{\n  "schema"')
    assert text.endswith("}\n")


def test_a_non_finite_number_is_not_null():
    text = render(fit(ranks=(rank_row(0, loss=math.nan),), measurements={"slope": math.inf}))
    report = json.loads(text, parse_constant=lambda word: word)
    assert report["ranks"][0]["loss"] == "nan"
    assert report["measurements"]["slope"] == "inf"


def test_it_reads_back_as_the_same_report():
    assert decode(render(unfit()).encode(), Report) == unfit()
