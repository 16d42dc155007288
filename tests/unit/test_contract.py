"""What scripts rely on stays: JSON fields with their types and values, exit codes, options. Additions are allowed.

tests/data/contract.txt holds those of commit cf7c8f8, and is never updated. Recordings have tests of their own.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer

from ddpdiag.cli.app import app
from ddpdiag.cli.parsing import normalized
from ddpdiag.compare.reports import Comparison
from ddpdiag.comparison.benchmarks import _File as Baseline
from ddpdiag.errors import ExitCode
from ddpdiag.lint.formats import LintReport
from ddpdiag.model.report import Report
from ddpdiag.strategies.launchers import LaunchersReport
from ddpdiag.watch.model import Stall

CONTRACT = Path(__file__).parents[1] / "data" / "contract.txt"
DOCUMENTS = {
    "report": Report, "lint": LintReport, "watch": Stall, "comparison": Comparison, "launchers": LaunchersReport,
    "baseline": Baseline,
}  # fmt: skip


def fields(kind: type[msgspec.Struct]) -> set[str]:
    """Each field with a type or a value that it may have, as "findings[].severity = info"."""
    (schema,), components = msgspec.json.schema_components([kind], ref_template="{name}")
    return set(_fields("", schema, components))


def _fields(path: str, schema: dict[str, Any], components: dict[str, Any]) -> Iterator[str]:
    schema = components[schema["$ref"]] if "$ref" in schema else schema
    for one in schema.get("anyOf", ()):
        yield from _fields(path, one, components)
    if "type" in schema:
        yield f"{path}: {schema['type']}"
    yield from (f"{path} = {value}" for value in schema.get("enum", ()))
    for name, own in schema.get("properties", {}).items():
        yield from _fields(f"{path}.{name}", own, components)
    for key, mark in (("items", "[]"), ("additionalProperties", "{}")):
        if isinstance(schema.get(key), dict):
            yield from _fields(f"{path}{mark}", schema[key], components)
    for number, own in enumerate(schema.get("prefixItems", ())):
        yield from _fields(f"{path}[{number}]", own, components)


def options() -> set[str]:
    """Each option and argument of each command."""
    commands = {"": typer.main.get_command(app), **typer.main.get_command(app).commands}  # type: ignore[attr-defined]
    return {
        f"{name} {word}".strip()
        for name, command in commands.items()
        for parameter in command.params
        for word in ((*parameter.opts, *parameter.secondary_opts) if parameter.param_type_name == "option" else ["-"])
    }


def contract() -> dict[str, set[str]]:
    exits = {f"{code.name} = {code.value}" for code in ExitCode}
    return {**{name: fields(kind) for name, kind in DOCUMENTS.items()}, "exit codes": exits, "options": options()}


def promised() -> dict[str, set[str]]:
    sections: dict[str, set[str]] = {}
    for line in CONTRACT.read_text().splitlines():
        if line.startswith("## "):
            section = sections.setdefault(line[3:], set())
        elif line:
            section.add(line)
    return sections


def still_accepted(option: str) -> str:
    """The command and option that the command line takes this one for."""
    command, dashes, name = option.rpartition("--")
    return f"{command}--{normalized(name)}" if dashes else option


@pytest.mark.parametrize("section", promised())
def test_what_scripts_rely_on_is_still_there(section):
    old = promised()[section]
    assert ({still_accepted(one) for one in old} if section == "options" else old) - contract()[section] == set()
