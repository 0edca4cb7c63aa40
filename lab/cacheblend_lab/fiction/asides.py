"""Lists the sentences between the facts of the fictional world: nicknames, units, remarks and filler."""

from __future__ import annotations

from typing import Final


def _split(words: str) -> tuple[str, ...]:
    return tuple(words.split())


NICKNAMES: Final = (
    "{S} is also called {v}.",
    "{S} is better known as {v}.",
    "{S} has the nickname {v}.",
)

# A unit note applies to all numbers after it, up to the next unit note.
UNITS: Final = ("hundred", "thousand", "million", "score")
UNIT_NOTES: Final = (
    "From here on, numbers are counted by the {u}.",
    "What follows counts everything by the {u}.",
    "Below, each number is counted by the {u}.",
)

# Remarks about the subject that answer no question.
REMARKS: Final = (
    "{S} was often in the newspapers.",
    "{S} is mentioned in many old letters.",
    "{S} had good years and bad years.",
    "Visitors liked to hear about {o}.",
    "The children of the village made songs about {o}.",
    "Nobody remembers a better story than the one about {o}.",
    "{S} was never far from trouble.",
    "{S} had many friends in the valley.",
    "There are several pictures of {o} in the library.",
    "{S} came through the hard winter well.",
    "An old book says little more about {o}.",
    "People have always been proud of {o}.",
    "{S} was the talk of the market for weeks.",
    "{P} story is told to every new student.",
    "Not much else was written about {o}.",
    "Some say that {s} deserved more luck.",
    "{S} is still a favourite subject at dinner.",
    "Two songs and a poem are about {o}.",
    "{S} has been a part of the town for a long time.",
    "Most people in the street know {o} by sight.",
    "{P} early years were hard.",
    "A short speech about {o} was given last summer.",
)

# Sentences that suit a kind of entity and answer no question.
ASIDES: Final[dict[str, tuple[str, ...]]] = {
    "person": (
        "The house stood near the {place}.",
        "The family lived behind the {place}.",
        "Letters arrived {time} and were read aloud.",
        "The neighbours were invited {time}.",
        "The winters were long, and there was little to do.",
        "Old friends came to visit {time}.",
        "The door was never locked.",
        "There was always something to eat for {people}.",
    ),
    "company": (
        "Meetings are held {time}.",
        "Orders must be signed before noon.",
        "New staff are shown around {time}.",
        "The doors open early and close late.",
        "Questions about pay go to the clerk.",
        "Travel costs are paid back at the end of the month.",
        "The yard was swept {time}.",
        "A new roof was needed after the storm.",
    ),
    "observatory": (
        "The night was clear and the air was cold.",
        "Clouds came up {time}.",
        "The great clock was set again {time}.",
        "Visitors are asked to bring warm clothes.",
        "The steps to the top are steep and narrow.",
        "The road up the hill was closed {time}.",
        "Nothing could be seen {time}, so everyone went home early.",
        "Notes are copied into the book {time}.",
    ),
    "ship": (
        "The wind turned {time}.",
        "The sails were mended {time}.",
        "A pilot came on board {time}.",
        "The night watch saw nothing but waves.",
        "The anchor was stuck for an hour.",
        "Two letters were handed over {time}.",
        "The sea was calm {time}.",
        "Fresh water was taken in at the next stop.",
    ),
}

# Sentences about other subjects: weather, roads, markets.
FILLER: Final = (
    "The {place} was {adj} {time}.",
    "{People} {verb} the {place} {time}.",
    "There was no lack of {thing} {time}.",
    "{Time} the {place} looked {adj} and {adj2}.",
    "The price of {thing} rose {time}.",
    "A {adj} {place} lay behind the {place2}.",
    "{People} brought {thing} to the {place}.",
    "Nobody could say why the {place} was so {adj}.",
    "The {place} and the {place2} were {adj} {time}.",
    "It rained {time}, and the {place} was empty.",
    "They say that the {place} is {adj}, but {people} rarely mind.",
    "From the {place} one could see the {place2}.",
    "{People} and {people2} shared the {thing} {time}.",
    "The road from the {place} to the {place2} is {adj}, and {people} use it {time}.",
    "If the {place} is {adj}, {people} stay at home.",
    "Please keep the {place} clean.",
    "The weather was bad {time}, so {people} stayed near the {place}.",
    "Some {people} say the {place} used to be {adj}.",
    "{Time} {people} {verb} the {place2}.",
    "We saw the {place} {time}, and it was {adj}.",
    "The {people} came back {time} with hardly any {thing}.",
    "They sold more {thing} {time} than ever before.",
    "Repairs to the {place} began {time} and took longer than planned.",
    "A letter about the {thing} was read aloud at the {place}.",
)
FILLER_WORDS: Final[dict[str, tuple[str, ...]]] = {
    "place": _split(
        "valley harbour village market garden river bridge forest road hill library station square mill beach school "
        "church field island street kitchen office tower canal orchard hall"
    ),
    "adj": _split(
        "quiet cold warm narrow busy old small wide bright damp pleasant crowded empty green windy dusty dark calm plain "
        "muddy"
    ),
    "time": (
        "in the morning",
        "in the evening",
        "during the summer",
        "in winter",
        "after the rain",
        "every spring",
        "at night",
        "on Sundays",
        "in those days",
        "the next day",
        "at noon",
        "before sunrise",
        "on Mondays",
        "in autumn",
    ),
    "people": _split(
        "visitors farmers children travellers neighbours merchants students fishermen people guests workers sailors"
    ),
    "verb": (
        "walked along",
        "talked about",
        "gathered near",
        "drew pictures of",
        "often passed",
        "waited by",
        "met at",
        "wrote letters about",
        "were proud of",
        "took care of",
    ),
    "thing": (
        "bread",
        "flour",
        "firewood",
        "cloth",
        "apples",
        "paper lanterns",
        "letters",
        "newspapers",
        "honey",
        "cheese",
        "hay",
        "candles",
        "milk",
        "butter",
        "water",
    ),
}
