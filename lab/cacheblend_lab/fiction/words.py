"""Lists the words of the fictional world: names, places, the values of facts, and sentences between the facts."""

from __future__ import annotations

from itertools import product
from random import Random
from typing import Final


def _split(words: str) -> tuple[str, ...]:
    return tuple(words.split())


def _compounds(count: int, seed: int, fronts: tuple[str, ...], backs: tuple[str, ...]) -> tuple[str, ...]:
    """Return `count` distinct words "front + back"; equal seeds give equal words."""
    everything = [front + back for front, back in product(fronts, backs)]
    return tuple(Random(seed).sample(everything, count))


NAME_FRONTS: Final = _split(
    "Hal Bren Tor Vel Kar Mor Lun Dra Fen Gar Jor Kel Lor Mar Nor Os Per Quin Ros Sel Tam Ul Var Wen Yor Zan Al "
    "Bel Cor Dun Er Fal Gris Hax Iv Jas Kes Lam Nel Pem"
)
NAME_BACKS: Final = _split(
    "vorsen moor wick dale ston mann berg ley ford sund haven rick vik low mere gate holt quist by combe nell "
    "rath sey tane"
)
TOWN_FRONTS: Final = _split(
    "Aber Ash Cal Dor Ems Glen Hol Ink Jas Kir Lin Mel Nar Oak Pol Rav Sto Tarn Ux Vin Whit Yar Bram Crow"
)
TOWN_BACKS: Final = _split("bury port mouth field bridge cliff ness tor villa grad wald shire beck stead")

SURNAMES: Final = _compounds(190, 7, NAME_FRONTS, NAME_BACKS)
TOWNS: Final = _compounds(110, 11, TOWN_FRONTS, TOWN_BACKS)

WOMEN: Final = _split(
    "Ana Clara Dora Edith Flora Greta Hanna Ida Julia Katya Lena Mira Nora Olga Petra Rosa Sonia Tilda Ursula "
    "Vera Wilma Yara Zelda Agnes Bianca Celia Daphne Elsa Frida Gilda Helga Irena Judith Karin Lydia Marta "
    "Nadia Odile Paula Renata"
)
MEN: Final = _split(
    "Adam Bruno Carl David Emil Felix Georg Hugo Ivan Jonas Klaus Leon Magnus Niels Oscar Pavel Rolf Simon "
    "Tomas Viktor Walter Xavier Yuri Zeno Arthur Boris Casper Dmitri Edgar Franz Gustav Henrik Igor Julius "
    "Konrad Lars Milan Nestor Otto Piotr"
)
COMPANY_WORDS: Final = _split(
    "Works Mills Foundry Motors Press Brewery Optics Textiles Glass Shipyard Bank Chemicals Bakery Tools"
)
SHIP_FIRST: Final = _split(
    "Silver Golden Grey Scarlet Northern Southern Silent Brave Swift Lonely Royal Crystal Iron Amber Ivory "
    "Velvet Copper Hidden Distant Proud Gentle Bright Western Morning"
)
SHIP_SECOND: Final = _split(
    "Heron Falcon Otter Whale Comet Lantern Anchor Tide Gull Dolphin Spirit Queen Prince Arrow Breeze Harbor "
    "Pilgrim Rover Star Wolf Petrel Maiden Compass Herald"
)
NICK_FIRST: Final = _split("Old Little Big Lucky Crazy Quiet Happy Mad Sweet Dusty Wild Sleepy Merry Rusty")
NICK_SECOND: Final = _split(
    "Moth Duke Badger Button Thunder Pepper Turnip Goblin Biscuit Kettle Feather Giant Raven Cricket Pebble "
    "Barrel Candle Thimble"
)

VALUES: Final[dict[str, tuple[str, ...]]] = {
    "town": TOWNS,
    "year": tuple(str(year) for year in range(1850, 2000)),
    "number": tuple(str(number) for number in range(10, 100)),
    "trade": _split(
        "painter surgeon carpenter botanist teacher lawyer sculptor baker geologist poet engineer weaver chemist "
        "gardener printer tailor miner judge nurse architect"
    ),
    "instrument": _split(
        "violin cello flute harp piano trumpet organ guitar drums oboe lute banjo clarinet zither horn accordion"
    ),
    "animal": _split(
        "parrot tortoise ferret goat rabbit monkey goose donkey hedgehog lizard pony hamster spaniel canary peacock "
        "snake"
    ),
    "dish": _split(
        "dumplings pancakes porridge sausages mushrooms herring noodles trout pickles almonds figs plums cherries "
        "lentils"
    ),
    "product": _split(
        "clocks bicycles lenses carpets engines paper whisky pianos tractors soap cameras gloves bottles ropes "
        "lamps radios boots paint knives umbrellas"
    ),
    "colour": _split("red blue green yellow black white purple orange brown pink"),
    "cargo": _split("salt timber coffee wool coal spices grain sugar cotton tea tin wine marble tobacco oil rice"),
    "sky": _split("comets pulsars quasars asteroids nebulae meteors galaxies sunspots planets supernovae moons dwarfs"),
    "emblem": _split("lion eagle oak rose bear crown tower wheel anvil swan stag thistle key ship sun bee"),
}


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
