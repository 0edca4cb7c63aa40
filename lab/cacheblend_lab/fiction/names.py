"""Draws names of fictional entities, unique within a context; training names and held-out names are disjoint."""

from __future__ import annotations

from hashlib import blake2b
from random import Random

from cacheblend_lab.fiction import words

_HELD_OUT_SHARE = 8


def is_held_out(name: str) -> bool:
    """Return whether `name` belongs to the eighth of all names that training never uses."""
    return blake2b(name.encode(), digest_size=8).digest()[0] % _HELD_OUT_SHARE == 0


def article(word: str) -> str:
    """Return the indefinite article of `word`."""
    return "an" if word[0].lower() in "aeiou" else "a"


class NameMaker:
    """Draws entity names and invented words for one context.

    Args:
        rng: Source of randomness.
        held_out: Whether to draw held-out names only, or training names only.
        unseen_syllables: Whether to build every invented word from syllables that training never uses (needs
            `held_out`).
        distinct_first_names: Whether to reuse first names of people only after all have been used.
    """

    def __init__(
        self, rng: Random, *, held_out: bool, unseen_syllables: bool = False, distinct_first_names: bool = False
    ) -> None:
        self._rng = rng
        self._distinct = distinct_first_names
        self._held_out = held_out
        self._unseen = unseen_syllables
        self._used: set[str] = set()

    def draw(self, kind: str) -> tuple[str, str]:
        """Return a new name of `kind` as written inside a sentence, and its pronoun.

        The distinguishing word of a name (surname, or a ship's two words) is not repeated within the context.
        """
        rng = self._rng
        while True:
            pronoun, first = "it", ""
            if kind == "person":
                woman = rng.random() < 0.5
                pronoun = "she" if woman else "he"
                key = self._word(words.SURNAMES)
                pool = words.WOMEN if woman else words.MEN
                free = [name for name in pool if name not in self._used] if self._distinct else pool
                first = rng.choice(free or pool)
                name = f"{first} {key}"
            elif kind == "company":
                key = self._word(words.SURNAMES)
                name = f"{key} {rng.choice(words.COMPANY_WORDS)}"
            elif kind == "observatory":
                key = self._word(words.SURNAMES)
                name = f"the {key} Observatory"
            else:
                first = rng.choice(words.SHIP_FIRST)
                second = self._word(words.SURNAMES) if self._unseen else rng.choice(words.SHIP_SECOND)
                name = key = f"the {first} {second}"
            if key not in self._used and is_held_out(name) == self._held_out:
                self._used |= {key, first} if self._distinct else {key}
                return name, pronoun

    def town(self) -> str:
        """Return a town's name; towns may repeat."""
        return self._word(words.TOWNS)

    def nickname(self, kind: str) -> str:
        """Return a new nickname for an entity of `kind`."""
        while True:
            name = f"{self._rng.choice(words.NICK_FIRST)} {self._rng.choice(words.NICK_SECOND)}"
            if name not in self._used:
                self._used.add(name)
                return name if kind == "person" else f"the {name}"

    def _word(self, known: tuple[str, ...]) -> str:
        rng = self._rng
        if self._unseen:
            parts = (words.UNSEEN_ONSETS, "aeiou", words.UNSEEN_ONSETS, "aeiou", words.UNSEEN_CODAS)
            return "".join(rng.choice(part) for part in parts).capitalize()
        draw = rng.random()
        if draw < 0.72:
            return rng.choice(known)
        if draw < 0.9:
            fronts, backs = rng.choice(((words.NAME_FRONTS, words.NAME_BACKS), (words.TOWN_FRONTS, words.TOWN_BACKS)))
            return rng.choice(fronts) + rng.choice(backs)
        return self._spelled()

    def _spelled(self) -> str:
        """Return a pronounceable word of random letters."""
        rng = self._rng
        syllables = [rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") for _ in range(rng.randint(2, 3))]
        return ("".join(syllables) + rng.choice(["", "n", "r", "s", "x", "lt"])).capitalize()
