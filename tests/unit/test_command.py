"""Commands from declared options."""

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from ddpdiag.cli.options import option
from ddpdiag.cli.parsing import command
from ddpdiag.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Colours:
    paint: str = option("red", "The colour.", "-p", metavar="NAME")
    set_: tuple[str, ...] = option(("a", "b"), "Some words (repeatable).")
    coats: int | None = option(None, "How often.", min=1)
    dry: bool = option(False, "Wait.")


def run(body, *words: str, before: dict[str, object] | None = None):
    app = typer.Typer()
    app.command()(command(body))
    return CliRunner().invoke(app, words, obj=before)


def received(*words: str, before: dict[str, object] | None = None) -> Colours:
    seen = []

    def body(colours: Colours) -> None:
        seen.append(colours)

    done = run(body, *words, before=before)
    assert done.exit_code == 0, done.output
    return seen[0]


def test_what_is_given_is_taken_under_each_of_its_names():
    given = received("-p", "blue", "--set", "x", "--set", "y", "--coats", "2", "--dry")
    assert given == Colours(paint="blue", set_=("x", "y"), coats=2, dry=True)


def test_what_stands_before_the_command_counts_where_nothing_is_given():
    assert received(before={"coats": 3}).coats == 3
    assert received("--coats", "2", before={"coats": 3}).coats == 2


def test_a_number_beyond_its_limits_is_refused():
    with pytest.raises(AssertionError, match="x>=1"):
        received("--coats", "0")


def test_of_a_group_that_names_fields_only_these_are_options():
    def body(colours: Annotated[Colours, "dry", "coats"]) -> None:
        typer.echo(colours)

    assert run(body, "--dry").output.strip() == str(Colours(dry=True))
    assert run(body, "--paint", "blue").exit_code == 2


@pytest.mark.parametrize(("words", "subject"), [(["", "x"], "FILE"), (["f", "--set", "x", "--set", ""], "--set")])
def test_an_empty_text_is_refused(words, subject):
    def body(files: Annotated[list[str], typer.Argument(metavar="FILE...")], colours: Colours) -> None:
        raise AssertionError((files, colours))

    error = run(body, *words).exception
    assert isinstance(error, UsageError)
    assert str(error).startswith(f"{subject}: the value is empty")
