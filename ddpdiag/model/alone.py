"""What one process does by itself, without a peer."""

from msgspec import Struct


class Product(Struct, frozen=True, kw_only=True):
    """A product of two square matrices of `size` rows on one device, such as "GPU 3" or "the CPU".

    `wrong` elements differ from the exact product, and `seconds` is what it took, with the device's start; or `error`.
    """

    device: str
    size: int
    uuid: str | None = None
    wrong: int = 0
    seconds: float = 0.0
    error: str | None = None


class Group(Struct, frozen=True, kw_only=True):
    """A process group of one rank, and whether its sum was right; or why there was none."""

    backend: str
    right: bool = False
    seconds: float = 0.0
    error: str | None = None
