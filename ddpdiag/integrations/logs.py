"""Logs of torchrun that are explained when the job fails (`torchrun --logs-specs ddpdiag`)."""

import atexit
import sys
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from ddpdiag.explain.command import run as explain


class ExplainedLogs(DefaultLogsSpecs):
    """torch's default log files. If the job fails, `ddpdiag explain` reads those of the last attempt.

    Without --redirects and --tee there are no files, so the output of the ranks is also written to files.
    """

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401 - torch's own, which differ by version
        if not settings.get("redirects") and not settings.get("tee"):
            settings["tee"] = Std.ALL
        super().__init__(**settings)
        atexit.register(self._explain)

    def _explain(self) -> None:
        """Explain the logs on standard error if torchrun ends because ranks failed."""
        if isinstance(getattr(sys, "last_value", None), ChildFailedError) and self._run_log_dir:
            sys.stdout = sys.stderr
            explain([self._run_log_dir])
