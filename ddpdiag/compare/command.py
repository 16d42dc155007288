"""`ddpdiag compare`: two runs, each a recording or a JSON report."""

import sys
from dataclasses import dataclass

from ddpdiag.cli.outputs import is_one_file, show, terminal
from ddpdiag.codec import readable
from ddpdiag.compare import text
from ddpdiag.compare.reports import compare
from ddpdiag.errors import UsageError
from ddpdiag.judgement.saved_report import read_report
from ddpdiag.render.files import check_writable, write


@dataclass(frozen=True, kw_only=True)
class Files:
    """Files to write; '-' is standard output."""

    json: str | None = None
    markdown: str | None = None

    @property
    def named(self) -> dict[str, str]:
        both = {"--json": self.json, "--markdown": self.markdown}
        return {option: path for option, path in both.items() if path is not None}


def run(old: str, new: str, files: Files) -> int:
    """0 no regression, 1 regression, 3 not known; UsageError (2) for what cannot be read."""
    for option, path in files.named.items():
        if any(is_one_file(path, given) for given in (old, new)):
            raise UsageError(f"{option} {path} would overwrite a run that is read; give it another file")
        check_writable(path)
    if len(set(files.named.values())) < len(files.named):
        raise UsageError("--json and --markdown name one file; give each its own")
    found = compare(read_report(old), read_report(new), old_source=readable(old), new_source=readable(new))
    makers = {"--json": text.as_json, "--markdown": text.as_markdown}
    for option, path in files.named.items():
        write(path, makers[option](found))
    stream = sys.stderr if "-" in files.named.values() else sys.stdout
    width, color = terminal(stream)
    show(text.render(found, width=width, color=color), stream)
    return found.exit_code
