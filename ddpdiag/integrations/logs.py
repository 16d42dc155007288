"""Logs of torchrun that are explained when the job fails (`torchrun --logs-specs ddpdiag`)."""

import atexit
import os
import shutil
import sys
from contextlib import suppress
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from ddpdiag.cli.outputs import show, terminal_style
from ddpdiag.errors import UsageError
from ddpdiag.explain.command import explain_files, files_below
from ddpdiag.explain.render import lead_sentence, log_blocks, render
from ddpdiag.probes.host.programs import write_error_file


class ExplainedLogs(DefaultLogsSpecs):
    """torch's default log files. If the job fails, `ddpdiag explain` reads those of all attempts on this host.

    Without --redirects and --tee there are no files, so the output of the ranks is also written to files.
    """

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401 - torch's own, which differ by version
        if not settings.get("redirects") and not settings.get("tee"):
            settings["tee"] = Std.ALL
        self._is_temporary = settings.get("log_dir") is None
        super().__init__(**settings)
        # torchrun calls nothing of this class at its end.
        atexit.register(self._end)

    def _end(self) -> None:
        """Explain the logs if ranks failed. Without any error, remove logs that no one asked for."""
        error = getattr(sys, "last_value", None)
        if isinstance(error, ChildFailedError) and self._run_log_dir:
            with suppress(UsageError):  # there is no text in the logs
                _explain(self._run_log_dir, error)
        elif error is None and self._is_temporary:
            shutil.rmtree(self.root_log_dir, ignore_errors=True)


def _explain(folder: str, error: ChildFailedError) -> None:
    """Print the explanation on standard error, and write its lead to the error file of torchrun, if it has one."""
    explanation = explain_files(files_below(folder))
    width, color = terminal_style(sys.stderr)
    show(render(log_blocks(explanation), width=width, color=color), sys.stderr)
    if sentence := lead_sentence(explanation):
        # torch has copied the error of the first rank into the file, if that rank recorded one.
        _, failure = error.get_first_failure()
        write_error_file(os.environ, sentence, keep=os.path.isfile(failure.error_file))
