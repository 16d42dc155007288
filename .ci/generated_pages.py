"""Pages that the code itself writes: the manual, and the fields of the JSON report."""

import inspect
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from ddpdiag.model.report import Report

INTRODUCTION = """\
# The JSON report

`--json FILE` writes it, `-` is standard output. Its schema is `ddpdiag.report/1` (docs/report.schema.json); until the
first release fields may change, and the changelog says so. Numbers are in SI units, with the unit in the name
(`seconds`, `bytes_per_s`). `null` means that the value is not known; a number that is not finite is the text "nan",
"inf" or "-inf".
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages; mkdocs calls this."""
    command = [sys.executable, "-m", "ddpdiag", "manual"]
    manual = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    files.append(File.generated(config, "manual.md", content=manual))
    files.append(File.generated(config, "json.md", content="\n".join(_json_page())))
    return files


def _json_page() -> Iterator[str]:
    (_,), components = msgspec.json.schema_components([Report], ref_template="{name}")
    yield INTRODUCTION
    # The report first.
    for name in sorted(components, key=lambda name: (name != "Report", name)):
        schema = components[name]
        yield f"## {name}\n\n{inspect.cleandoc(schema.get('description', ''))}\n"
        if "properties" in schema:
            yield "| field | type |\n|---|---|"
            yield from (f"| `{key}` | {_type(own)} |" for key, own in schema["properties"].items())
        else:
            yield f"One of {', '.join(f'`{value}`' for value in schema['enum'])}."
        yield ""


def _type(schema: dict[str, Any]) -> str:
    """A type in words, with a link to the table of an object."""
    match schema:
        case {"$ref": name}:
            return f"[{name}](#{name.lower()})"
        case {"anyOf": kinds}:
            return " or ".join(map(_type, kinds))
        case {"type": "array", "items": dict(items)}:
            return f"array of {_type(items)}"
        case {"type": "array"}:
            return "array"
        case {"type": "object", "additionalProperties": dict(values)}:
            return f"object of {_type(values)}"
        case _:
            return str(schema.get("type", "any"))
