"""Every rank trains on all of the data.

What: a DataLoader with shuffle=True and without any sampler feeds the training of a DistributedDataParallel; nothing
else in the script gives each rank a part of its own.

Why: each rank goes through the whole dataset in an order of its own, so that an epoch does the work of one rank, as
many times as there are ranks. Nothing fails; it is only not faster.

Fix: DataLoader(data, sampler=DistributedSampler(data)), and sampler.set_epoch(epoch) in every epoch.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html ("does not chunk
or otherwise shard the input").
"""

import ast
from collections.abc import Iterator

from ddpdiag.lint.reading import Reading
from ddpdiag.lint.rule import Hit, Rule
from ddpdiag.lint.syntax import has_unpacking, is_constant, keyword, trains
from ddpdiag.model import Severity


def look(read: Reading) -> Iterator[Hit]:
    """Loaders of a training loop, where no word is said of samplers."""
    if not read.script.wrappings or not read.script.groups or _speaks_of_samplers(read):
        return
    for loader in read.script.loaders:
        shuffled = is_constant(keyword(loader, "shuffle", 2), True) and not has_unpacking(loader)
        if shuffled and _is_plain(read, keyword(loader, "dataset", 0)) and _feeds_training(read, loader):
            yield Hit(
                loader,
                "every rank goes through all of the data: DistributedDataParallel does not share it out",
                "Give the DataLoader sampler=DistributedSampler(dataset), without shuffle.",
            )


def _speaks_of_samplers(read: Reading) -> bool:
    for node in read.script.nodes:
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)) | ast.alias(name=name):
                if "sampler" in name.lower() or "shard" in name.lower() or name == "IterableDataset":
                    return True
    return False


def _is_plain(read: Reading, dataset: ast.expr | None) -> bool:
    """Is it surely a dataset that holds everything, made without a look at the rank?"""
    if dataset is None or read.values.may_be_own(dataset):
        return False
    return all(
        isinstance(origin, ast.Call)
        and read.script.callee(origin).startswith(("torchvision.datasets.", "torch.utils.data.TensorDataset"))
        for origin in read.values.origins(dataset)
    )


def _feeds_training(read: Reading, loader: ast.Call) -> bool:
    for loop in read.script.nodes:
        if isinstance(loop, ast.For) and trains(loop):
            names = [each for each in ast.walk(loop.iter) if isinstance(each, (ast.Name, ast.Attribute))]
            if any(origin is loader for name in names for origin in read.values.origins(name)):
                return True
    return False


RULE = Rule("LNT009", "no-sampler", Severity.WARNING, __doc__ or "", look)
