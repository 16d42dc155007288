"""Sightings in the light of each other: which explains the others, which is a consequence, and which comes first."""

from collections.abc import Sequence

from msgspec import structs

from ddpdiag.explain.card import Card, Role
from ddpdiag.explain.tally import Sighting

# A fallback that comes after a wait, or a warning, is listed after what others waited for.
_PLACES = {Role.CAUSE: 0, Role.FAILURE: 1, Role.HINT: 3, Role.WAIT: 4, Role.ECHO: 6, Role.NOTE: 7}
_AFTER_KNOWN_FAILURES, _AFTER_WAITS = 2, 5


def related(sightings: Sequence[Sighting], cards: Sequence[Card], *, is_log: bool) -> list[Sighting]:
    """The sightings with the roles that they have beside each other.

    Some only echo another one, some prove that ranks differ, and an unknown warning is the failure of a log that shows
    no other reason for one. A text without a log is asked about, so its warning is the failure.
    """
    by_name = {card.name: card for card in cards}
    seen = {one.card.name for one in sightings}
    changed = []
    for one in sightings:
        card = by_name[one.card.mismatch].filled({}) if one.calls and one.card.mismatch else one.card
        if not seen.isdisjoint(card.echo_of):
            card = structs.replace(card, role=Role.ECHO)
        changed.append(structs.replace(one, card=card))
    failures = [one for one in changed if one.card.role not in (Role.HINT, Role.NOTE)]
    has_reason = any(_names_a_reason(one.card) for one in failures)
    is_warned = not is_log or (bool(failures) and not has_reason)
    return [
        structs.replace(one, card=structs.replace(one.card, role=role))
        if (role := _role(one.card, has_reason=has_reason, is_warned=is_warned)) is not one.card.role
        else one
        for one in changed
    ]


def _role(card: Card, *, has_reason: bool, is_warned: bool) -> Role:
    """The role of a card beside others: of an unknown warning, and of a text after which the program tries again."""
    if _is_warning(card) and is_warned:
        return Role.FAILURE
    return Role.NOTE if card.is_retried and has_reason else card.role


def _is_warning(card: Card) -> bool:
    return card.fallback and card.role is Role.HINT


def _names_a_reason(card: Card) -> bool:
    return card.role in (Role.CAUSE, Role.WAIT) or (card.role is Role.FAILURE and card.vague != "library")


def in_order(sightings: Sequence[Sighting]) -> tuple[Sighting, ...]:
    """What explains the others first: by role, then by line.

    A rank that others waited for, and that waited itself, is not the missing one; ranks that waited only for such ranks
    are listed after those that waited for others.
    """
    waits = [one for one in sightings if one.card.role is Role.WAIT]
    waiting = {rank for one in waits for rank in (*one.ranks, one.card.waiting_rank)}
    settled = [
        structs.replace(one, missing=tuple(rank for rank in one.missing if rank not in waiting)) for one in sightings
    ]
    misled = {new.card.name for old, new in zip(sightings, settled, strict=True) if old.missing and not new.missing}
    is_known = any(one.card.role is Role.FAILURE and not one.card.vague and not one.card.fallback for one in sightings)

    def place(one: Sighting) -> tuple[int, bool, int]:
        number = _PLACES[one.card.role]
        if one.card.fallback and one.card.role in (Role.FAILURE, Role.HINT):
            is_late = _is_warning(one.card) or any(_may_be_before(wait, one) for wait in waits)
            number = _AFTER_WAITS if is_late else _AFTER_KNOWN_FAILURES if is_known else number
        return number, one.card.name in misled, one.line

    return tuple(sorted(settled, key=place))


def _may_be_before(wait: Sighting, other: Sighting) -> bool:
    """May the process that printed `other` have waited before? Of other ranks than those that waited, it has not."""
    return wait.line < other.line and not (_has_origin(wait) and _has_origin(other))


def _has_origin(one: Sighting) -> bool:
    return bool(one.ranks or one.local_ranks or one.tasks or one.hosts)
