"""docs/report.schema.json is the contract of the JSON report, generated from the structs."""

import json
from pathlib import Path

import jsonschema
import msgspec
import pytest
from reports import fit, unfit, unknown

from ddpdiag.codec import indented_json
from ddpdiag.model import Report

SCHEMA = Path(__file__).parents[2] / "docs" / "report.schema.json"


def test_the_schema_is_that_of_the_structs(request: pytest.FixtureRequest) -> None:
    text = json.dumps(msgspec.json.schema(Report), indent=1) + "\n"
    if request.config.getoption("update_golden"):
        SCHEMA.write_text(text, encoding="utf-8")
    assert SCHEMA.read_text(encoding="utf-8") == text, "accept it with: python -m pytest --update-golden"


@pytest.mark.parametrize("report", [fit(), unfit(), unknown()], ids=lambda report: report.verdict.value)
def test_a_report_fits_the_schema(report: Report) -> None:
    jsonschema.validate(json.loads(indented_json(report)), json.loads(SCHEMA.read_text(encoding="utf-8")))
