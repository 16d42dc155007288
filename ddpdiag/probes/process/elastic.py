"""torchrun's failure summary: where it looks for the reason of a failure, so that ours appears there.

torchrun turns every exit code but 0 into 1 and prints a summary with "traceback : <message>" for each rank, which says
nothing unless the rank left an error file (torch.distributed.elastic.multiprocessing.errors.ErrorHandler).
"""

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def write_error_file(env: Mapping[str, str], sentence: str) -> None:
    """Leave the sentence for torchrun's summary, if torchrun is there; a courtesy, so failing to write is no error."""
    path = env.get(ERROR_FILE)
    # Moving a file onto /dev/null as root would break the machine.
    if not path or (os.path.exists(path) and not os.path.isfile(path)):
        return
    with contextlib.suppress(OSError):
        _write_whole(Path(path), _content(sentence, int(time.time())))


def _content(sentence: str, epoch_seconds: int) -> str:
    """The form that torchrun can also give an exit code; without "py_callstack" it shows "message"."""
    return json.dumps({"message": {"message": sentence, "extraInfo": {"timestamp": str(epoch_seconds)}}})


def _write_whole(path: Path, text: str) -> None:
    """Write by another name and move: torchrun may read at any moment, and dies of a file that is cut off."""
    descriptor, temporary = tempfile.mkstemp(prefix=".ddpdiag-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise
