"""What ranks run with: versions, variables, and lines of NCCL's configuration files."""

from msgspec import Struct


class Value(Struct, frozen=True, kw_only=True):
    """A value that `count` ranks have (None: they lack the setting); `ranks` are the first of them, in rising order."""

    value: str | None
    count: int
    ranks: tuple[int, ...]


class Setting(Struct, frozen=True, kw_only=True):
    """One thing that is alike on all ranks, or is not. `kind` is "version", "variable" or "file".

    The most frequent value comes first; `more` counts further values.
    """

    kind: str
    name: str
    values: tuple[Value, ...]
    more: int = 0

    @property
    def alike(self) -> bool:
        """Have all ranks the same value?"""
        return len(self.values) + self.more == 1
