"""Logs of torchrun that are explained when the job fails (`torchrun --logs-specs ddpdiag`)."""

import atexit
import shutil
import sys
from contextlib import redirect_stdout
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from ddpdiag.explain.command import run as explain


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
        """Explain the logs on standard error if ranks failed. Without any error, remove logs that no one asked for."""
        error = getattr(sys, "last_value", None)
        if isinstance(error, ChildFailedError) and self._run_log_dir:
            with redirect_stdout(sys.stderr):
                explain([self._run_log_dir])
        elif error is None and self._is_temporary:
            shutil.rmtree(self.root_log_dir, ignore_errors=True)
