"""Text for prompts: seeded, and about one token a word in the vocabularies of common models."""

from __future__ import annotations

import random

from .errors import BenchError

MOST_WORDS = 100_000_000
TEXT_WORDS = 200
"""What a text costs besides its words: a request takes a kilobyte by itself."""
_COMMON = (
    "the of and to in for is on that by this with you it not or be are from at as your all have new more an "
    "was we will home can us about if page my has search free but our one other do no information time they "
    "site he up may what which their news out use any there see only so his when contact here business who web "
    "also now help get view online first been would how were services some these click its like service than "
    "find price date back top people had list name just over state year day into email two health world next "
    "used go work last most products music buy data make them should product system post her city add policy "
    "number such please available copyright support message after best software then good video well where "
    "info rights public books high school through each links she review years order very privacy book items "
    "company read group need many user said set under general research university map reviews program life "
    "know games way days management part could great united hotel real item international center must store "
    "travel comments made development report off member details line terms before hotels did send right type "
    "because local those using results office education national car design take posted internet address "
    "community within states area want phone shipping reserved subject between forum family long based code "
    "show even black check special prices website index being women much sign file link "
)
WORDS = tuple(_COMMON.split())


class Source(random.Random):
    """Seeded source of the words of one workload. It gives up where they are more than a client can hold."""

    def __init__(self, seed: str) -> None:
        super().__init__(seed)
        self._taken = 0

    def take(self, words: int) -> None:
        """Count a text of `words` words. Raises BenchError."""
        self._taken += words + TEXT_WORDS
        if self._taken > MOST_WORDS:
            raise BenchError(
                f"the workload has more requests and words than this client holds (a round's words, and {TEXT_WORDS} "
                f"for each text, may be {MOST_WORDS:,}): give smaller options"
            )


def text(rng: random.Random, words: int) -> str:
    """Build `words` words, as sentences of 6 to 18. Raises BenchError where they are too many of a `Source`."""
    if isinstance(rng, Source):
        rng.take(words)
    parts: list[str] = []
    while len(parts) < words:
        sentence = rng.choices(WORDS, k=min(rng.randint(6, 18), words - len(parts)))
        sentence[0] = sentence[0].capitalize()
        sentence[-1] += "."
        parts += sentence
    return " ".join(parts)
