"""What `ddpdiag watch` tells people: looks, each with what is new of its notes, and sentences once."""

from collections.abc import Callable

from msgspec import structs

from ddpdiag.watch.model import Judged, Stall


class Mouth:
    """`show` gets a look, and keeps it if that was asked for; `say` gets a sentence."""

    def __init__(self, show: Callable[[Stall, Judged], None], say: Callable[[str], None]) -> None:
        self._show = show
        self._say = say
        self._told: set[str] = set()

    def tell(self, stall: Stall, verdict: Judged, why: str = "") -> None:
        """A look. That stacks are refused, and such, is noted once, and again to who asks; `why` every time."""
        new = tuple(note for note in verdict.notes if stall.asked or note == why or note not in self._told)
        self._told |= set(verdict.notes)
        self._show(stall, structs.replace(verdict, notes=new))

    def say_once(self, sentence: str) -> None:
        """Nothing where it is empty, or was said before."""
        if sentence and sentence not in self._told:
            self._told.add(sentence)
            self._say(sentence)
