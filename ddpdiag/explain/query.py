"""Find cards by a few words that are no line of a log, such as "Xid 79" or "SIGKILL"."""

import math
import re
from collections import Counter
from functools import cache

from ddpdiag.explain.card import Card, all_cards

_WORD = re.compile(r"(?<![\w-])-\d+|[a-z0-9]+")
# A word in the name of a card says more about it than a word in its explanation. Heavy fields come first.
_WEIGHT_BY_FIELD = {"also": 4.0, "name": 3.0, "anchor": 3.0, "example": 2.0, "meaning": 1.0}
# Words in more than this share of the cards, such as "is", find no card.
_MAX_COMMON_SHARE = 0.2
_MAX_QUERY_WORDS = 8
_MIN_SHARE = 0.5


def find_cards(query: str, limit: int = 3) -> tuple[list[Card], bool]:
    """The cards that have at least half of the query's words, the best first, and whether the first has all of them."""
    weights_by_card, card_counts, cards = _weights_by_card(), _card_counts(), all_cards()
    words = {word for word in _words(query) if card_counts[word] <= _MAX_COMMON_SHARE * len(cards)}

    def score(card: Card) -> tuple[bool, int, bool, float]:
        weights = weights_by_card[card.name]
        shared = words & weights.keys()
        rarity = sum(weights[word] * math.log(len(cards) / card_counts[word]) for word in shared)
        # Of two cards with the same words, the one with fewer other words fits better.
        return card.name == query.strip(), len(shared), not card.is_fallback, rarity - 0.01 * len(weights)

    if not 0 < len(words) <= _MAX_QUERY_WORDS:
        return [], False
    best = sorted(cards, key=score, reverse=True)[:limit]
    shares = [len(words & weights_by_card[card.name].keys()) / len(words) for card in best]
    return [card for card, share in zip(best, shares, strict=True) if share >= _MIN_SHARE], shares[0] == 1


def _words(text: str) -> list[str]:
    """The words of a text in lower case. "exit code" becomes one word, because torch prints "exitcode"."""
    return _WORD.findall(re.sub(r"\bexit[ -]code\b", "exitcode", text.lower()))


@cache
def _weights_by_card() -> dict[str, dict[str, float]]:
    """For each card the weight of each of its words."""
    weights: dict[str, dict[str, float]] = {card.name: {} for card in all_cards()}
    for card in all_cards():
        for name, weight in _WEIGHT_BY_FIELD.items():
            for word in _words(str(getattr(card, name))):
                weights[card.name].setdefault(word, weight)
    return weights


@cache
def _card_counts() -> Counter[str]:
    """The number of cards that have a word."""
    return Counter(word for weights in _weights_by_card().values() for word in weights)
