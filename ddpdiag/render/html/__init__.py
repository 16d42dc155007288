"""The report as one page: a file to attach to a ticket, read without network and without script.

The page is built in three steps: a `Page` of plain data from the report, pictures by `render/plots`, and markup by the
templates beside this file. Whatever a host calls itself, and whatever an error says, is escaped there: Jinja2 with
autoescape on, and a policy in the page that forbids all scripts but its own, and all requests. Of many ranks, hosts and
findings the worst are shown, and a sentence says how many there are.
"""

from base64 import b64encode
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from importlib.resources import files
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ddpdiag.errors import UsageError
from ddpdiag.model import Report
from ddpdiag.render import Sections
from ddpdiag.render.plots.drawing import drawing, page_style

if TYPE_CHECKING:
    from jinja2 import Environment

_MISSING = "--html needs {}: pip install 'ddpdiag[html]'"


def check_available() -> None:
    """UsageError if Jinja2 or matplotlib is missing; neither is imported."""
    for module, name in (("jinja2", "Jinja2"), ("matplotlib", "matplotlib")):
        if find_spec(module) is None:
            raise UsageError(_MISSING.format(name))


def render(report: Report, features: Sequence[Sections] = ()) -> str:
    """The page; UsageError if it cannot be made here."""
    check_available()
    from ddpdiag.render.html.build import page_of

    with drawing("--html", "html"), page_style():
        page = page_of(report, features)
    script = _source("script.js")
    # The only script that may run is this one, whatever else got into the page.
    policy = b64encode(sha256(script.encode()).digest()).decode()
    return _environment().get_template("page.html").render(page=page, script=script, policy=policy)


def _source(name: str) -> str:
    return (files(__name__) / "templates" / name).read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def _environment() -> "Environment":
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    return Environment(
        loader=FunctionLoader(_source), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
