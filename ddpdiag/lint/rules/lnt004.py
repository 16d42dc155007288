"""The local rank is expected as an option that no launcher gives.

What: argparse knows `--local_rank`, the script reads args.local_rank, and nothing reads the variable LOCAL_RANK.

Why: torchrun gives no such option; the value stays at its default, and all ranks take one GPU. Since torch 2.0,
torch.distributed.launch writes `--local-rank`, and argparse answers "unrecognized arguments: --local-rank=0". With both
spellings it is a hint only (`--details`): torch.distributed.launch works, torchrun and srun do not.

    parser.add_argument("--local_rank", type=int)       # torch before 2.0
    local_rank = int(os.environ["LOCAL_RANK"])          # any launcher

Fix: read LOCAL_RANK from the environment.

Source: https://docs.pytorch.org/docs/stable/distributed.html#launch-utility ("Changed in version 2.0.0");
https://docs.pytorch.org/docs/stable/elastic/run.html#transitioning-from-torch-distributed-launch-to-torchrun;
https://github.com/huggingface/pytorch-image-models/issues/1724.
"""

import ast
import re
from collections.abc import Iterator

from ddpdiag.lint.reading import Reading
from ddpdiag.lint.rule import Hit, Rule
from ddpdiag.lint.syntax import text_of
from ddpdiag.model import Severity

_SETS_UP = re.compile(r"dist|setup|set_up|init", re.IGNORECASE)


def look(read: Reading) -> Iterator[Hit]:
    """The option, if it is all that the script knows its local rank from."""
    option = read.script.options.get("local_rank")
    if option is None or {"LOCAL_RANK", "SLURM_LOCALID"} & read.script.texts or not _is_needed(read):
        return
    spellings = {text_of(arg) for arg in option.args}
    if "--local-rank" not in spellings:
        yield Hit(
            option,
            "torchrun gives no --local_rank, and torch.distributed.launch writes --local-rank since torch 2.0: "
            "the script stops, or all ranks take one GPU",
            'Read int(os.environ["LOCAL_RANK"]) instead.',
        )
    elif "--local_rank" in spellings or len(spellings) == 1:
        yield Hit(
            option,
            "torchrun and srun give no --local-rank; only torch.distributed.launch, which is deprecated, does",
            'Read int(os.environ["LOCAL_RANK"]) instead.',
            Severity.INFO,
        )


def _is_needed(read: Reading) -> bool:
    """Is args.local_rank read, and never set?"""
    uses = [node for node in read.script.nodes if isinstance(node, ast.Attribute) and node.attr == "local_rank"]
    holders = {node.value.id for node in uses if isinstance(node.value, ast.Name)} - {"self"}
    is_set = any(isinstance(node.ctx, ast.Store) for node in uses)
    return bool(uses) and not is_set and not read.script.starts and not _are_filled_in(read, holders)


def _are_filled_in(read: Reading, holders: set[str]) -> bool:
    """Do the arguments go to a helper of another file that sets up the job, such as init_distributed_mode(args)?"""
    return any(
        isinstance(given, ast.Name)
        and given.id in holders
        and not read.script.targets(call)
        and _SETS_UP.search(read.script.callee(call).rpartition(".")[2])
        for call in read.script.calls
        for given in call.args
    )


RULE = Rule("LNT004", "local-rank-option", Severity.ERROR, __doc__ or "", look)
