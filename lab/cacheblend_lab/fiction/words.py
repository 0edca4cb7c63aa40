"""Lists the words of the fictional world: names, places and the values of facts."""

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

# Syllables that training never uses: names made of them test whether the model copies spelling instead of known words.
UNSEEN_ONSETS: Final = _split("thr pl zw gn sk ch bl vl kw dr pt sz str spr cl tw")
UNSEEN_CODAS: Final = _split("nth ks lp rd rp nd f sk b sh ck mb rg pf")

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
