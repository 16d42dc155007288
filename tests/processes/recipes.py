"""Recipes as a reader would use them: copied, with the line changed that says where ddpdiag lies."""

import sys
from pathlib import Path

RECIPES = Path(__file__).parents[2] / "recipes"
SCRIPTS = Path(sys.executable).parent
BASH = "import os, sys; os.execvp('bash', ['bash', *sys.argv[1:]])"
_INSTALLED = "/opt/ddpdiag/bin/ddpdiag"


def changed(name: str, folder: Path, *changes: tuple[str, str]) -> Path:
    """A copy of the recipe in `folder`, with these texts changed; each must be there."""
    text = (RECIPES / name).read_text()
    for old, new in ((_INSTALLED, str(SCRIPTS / "ddpdiag")), *changes):
        assert old in text, f"{name} has no {old!r}"
        text = text.replace(old, new)
    copy = folder / name
    copy.write_text(text)
    copy.chmod(0o755)
    return copy
