"""Lists the facts an entity can have, sentences that state the facts, and questions about the facts.

A statement template has these slots: `{S}` the subject at a sentence start ("The Silver Heron", "It", "The vessel"),
`{P}` the subject's possessive at a sentence start ("The vessel's"), `{s}` the subject inside a sentence, `{v}` the
value and `{a}` the value's article. A question template has the slot `{E}`, the entity's name as written inside a
sentence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Attribute:
    """Describes one kind of fact.

    Attributes:
        pool: Pool of values: a key of `words.VALUES`, or "person" or "company" for another entity's name.
        statements: Sentences that state the fact, with the subject before the value.
        questions: Questions that ask for the fact.
        value_first: Sentences with the value before the subject, for a subject that is already known.
        links: Noun phrases for the value in a two-hop question.
        titles: Titles of a list of the fact; the list's rows hold only a name and a value.
        topic: Word that occurs in all `titles`, and in no title of another list.
        comparison: Question which of two entities comes first, for facts that are years.
    """

    pool: str
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    value_first: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    titles: tuple[str, ...] = ()
    topic: str = ""
    comparison: str = ""


@dataclass(frozen=True)
class EntityKind:
    """Describes a kind of entity: nouns that refer back to the entity, headings, opening sentences and attributes."""

    nouns: tuple[str, ...]
    headings: tuple[str, ...]
    openings: tuple[str, ...]
    attributes: dict[str, Attribute]


KINDS: Final[dict[str, EntityKind]] = {
    "person": EntityKind(
        nouns=(),
        headings=("{H}", "# {H}", "About {H}", "The life of {H}", "People: {H}"),
        openings=("This page is about {E}.", "{S} is well remembered.", "Many people still speak of {E}."),
        attributes={
            "birthplace": Attribute(
                "town",
                ("{S} was born in {v}.", "{S} came into the world in {v}.", "{P} birthplace was {v}."),
                ("Where was {E} born?", "In which town was {E} born?", "What was the birthplace of {E}?"),
                ("In {v} {s} was born.",),
                titles=("People and where they were born:", "Where they were born:"),
                topic="born",
            ),
            "trade": Attribute(
                "trade",
                ("{S} worked as {a} {v}.", "{S} trained as {a} {v}.", "{S} made a living as {a} {v}."),
                ("What was the profession of {E}?", "What did {E} work as?", "What trade did {E} have?"),
            ),
            "employer": Attribute(
                "company",
                ("{S} was employed by {v}.", "{S} took a post at {v}.", "{S} found a job at {v}."),
                ("Who employed {E}?", "Where did {E} take a post?", "Which company did {E} work for?"),
                ("For years {s} worked for {v}.",),
                ("the employer of {E}", "the company that employed {E}"),
            ),
            "teacher": Attribute(
                "person",
                ("{S} was taught by {v}.", "{S} learned the craft from {v}.", "{P} teacher was {v}."),
                ("Who taught {E}?", "Who was the teacher of {E}?"),
                (),
                ("the teacher of {E}", "the person who taught {E}"),
            ),
            "instrument": Attribute(
                "instrument",
                ("{S} played the {v}.", "{S} loved to play the {v}.", "{S} practised the {v} every evening."),
                ("Which instrument did {E} play?", "What instrument did {E} practise?"),
                ("In the evenings {s} practised the {v}.",),
            ),
            "pet": Attribute(
                "animal",
                ("{S} kept a pet {v}.", "{S} owned a tame {v}.", "{P} only pet was a {v}."),
                ("Which animal did {E} keep?", "What pet did {E} own?"),
                ("At home {s} had a {v}.",),
            ),
            "dish": Attribute(
                "dish",
                ("{S} was very fond of {v}.", "{S} liked to eat {v}.", "{P} favourite dish was {v}."),
                ("What did {E} like to eat?", "What was the favourite dish of {E}?"),
            ),
            "settled": Attribute(
                "town",
                ("{S} later moved to {v}.", "{S} finally settled in {v}.", "{S} retired to {v}."),
                ("Where did {E} later move?", "In which town did {E} settle?", "Where did {E} retire?"),
                ("In old age {s} retired to {v}.",),
                titles=("People and where they settled:", "Where they settled:"),
                topic="settled",
            ),
            "medal": Attribute(
                "year",
                ("{S} won a medal in {v}.", "{S} received the medal in {v}."),
                ("In what year did {E} win a medal?", "When did {E} receive the medal?"),
                ("In {v} {s} won a medal.",),
                comparison="Who won a medal first, {a} or {b}?",
            ),
            "points": Attribute(
                "number",
                ("{S} scored {v} points in the final.", "{S} finished the cup with {v} points."),
                ("How many points did {E} score?", "How many points did {E} have in the cup?"),
                ("In the tournament {s} scored {v} points.",),
            ),
        },
    ),
    "company": EntityKind(
        nouns=("the company", "the firm"),
        headings=("{H}", "# {H}", "About {H}", "{H}: a short history", "Company: {H}"),
        openings=("This page is about {E}.", "{S} is an old company.", "Many people know {E}."),
        attributes={
            "founded": Attribute(
                "year",
                ("{S} was founded in {v}.", "{S} opened in {v}.", "{S} was established in {v}."),
                ("In what year was {E} founded?", "When was {E} established?", "When did {E} open?"),
                ("In {v} {s} was established.",),
                titles=("Each was founded in:", "Years in which each was founded:"),
                topic="founded",
                comparison="Which was founded first, {a} or {b}?",
            ),
            "founder": Attribute(
                "person",
                ("{S} was started by {v}.", "{S} was the creation of {v}.", "{P} founder was {v}."),
                ("Who was the founder of {E}?", "Who started {E}?"),
                (),
                ("the founder of {E}", "the person who started {E}"),
                titles=("Who started each of them:", "Each was started by:"),
                topic="started",
            ),
            "manager": Attribute(
                "person",
                ("{S} is managed by {v}.", "{S} is now run by {v}.", "{P} manager is {v}."),
                ("Who is the manager of {E}?", "Who runs {E} now?"),
                (),
                ("the manager of {E}", "the person who runs {E}"),
                titles=("Who runs each of them now:", "Who runs what:"),
                topic="runs",
            ),
            "office": Attribute(
                "town",
                ("{S} is based in {v}.", "{S} has its main office in {v}.", "{P} main office is in {v}."),
                ("Where is {E} based?", "In which town is the main office of {E}?"),
            ),
            "product": Attribute(
                "product",
                ("{S} makes {v}.", "{S} is known for its {v}.", "{S} sells many {v} every year."),
                ("What does {E} make?", "What is {E} known for?"),
                ("Every year {s} sells many {v}.",),
            ),
            "staff": Attribute(
                "number",
                ("{S} employs {v} people.", "{S} has {v} workers.", "{P} staff counts {v} people."),
                ("How many people does {E} employ?", "How many workers does {E} have?"),
            ),
            "emblem": Attribute(
                "emblem",
                ("{S} uses {a} {v} as its emblem.", "{P} emblem is {a} {v}.", "{S} prints {a} {v} on every box."),
                ("What is the emblem of {E}?", "Which emblem does {E} use?"),
            ),
            "rival": Attribute(
                "company",
                ("{S} competes with {v}.", "{P} great rival is {v}.", "{S} once sued {v}."),
                ("Who is the rival of {E}?", "Which company does {E} compete with?"),
                (),
                ("the rival of {E}",),
            ),
            "carts": Attribute(
                "colour",
                ("{S} owns a row of {v} carts.", "{P} delivery carts are {v}.", "{S} paints its carts {v}."),
                ("What colour are the carts of {E}?", "What colour are the delivery carts of {E}?"),
            ),
            "prize": Attribute(
                "year",
                ("{S} won a prize in {v}.", "{S} was given a prize in {v}."),
                ("When did {E} win a prize?", "In what year was {E} given a prize?"),
                ("In {v} {s} won a prize.",),
                titles=("Won a prize in:", "Years in which each won a prize:"),
                topic="prize",
                comparison="Which won a prize first, {a} or {b}?",
            ),
        },
    ),
    "observatory": EntityKind(
        nouns=("the observatory",),
        headings=("{H}", "# {H}", "About {E}", "Notes from {E}", "{H}: notes"),
        openings=("This page is about {E}.", "{S} is a fine observatory.", "Many people know {E}."),
        attributes={
            "built": Attribute(
                "year",
                ("{S} was built in {v}.", "{S} was completed in {v}.", "{S} saw first light in {v}."),
                ("In what year was {E} built?", "When was {E} completed?"),
                ("In {v} {s} saw first light.",),
                comparison="Which was built first, {a} or {b}?",
            ),
            "director": Attribute(
                "person",
                ("{S} is led by {v}.", "{S} has {v} as its director.", "{P} director is {v}."),
                ("Who is the director of {E}?", "Who leads {E}?"),
                (),
                ("the director of {E}", "the person who leads {E}"),
                titles=("Who leads each of them:", "Who leads what:"),
                topic="leads",
            ),
            "planner": Attribute(
                "person",
                ("{S} was planned by {v}.", "{S} was drawn by {v}.", "{P} architect was {v}."),
                ("Who was the architect of {E}?", "Who planned {E}?"),
                (),
                ("the architect of {E}", "the person who planned {E}"),
                titles=("Who planned each of them:", "Each was planned by:"),
                topic="planned",
            ),
            "near": Attribute(
                "town",
                ("{S} stands on a hill near {v}.", "{S} lies close to {v}.", "{P} nearest town is {v}."),
                ("Which town is close to {E}?", "Near which town does {E} stand?"),
            ),
            "sky": Attribute(
                "sky",
                ("{S} studies {v}.", "{S} is famous for finding {v}.", "{S} watches for {v} each night."),
                ("What does {E} study?", "What is {E} famous for finding?"),
                ("Each night {s} watches for {v}.",),
            ),
            "telescopes": Attribute(
                "number",
                ("{S} has {v} telescopes.", "{S} operates {v} telescopes."),
                ("How many telescopes does {E} have?", "How many telescopes does {E} operate?"),
            ),
            "sponsor": Attribute(
                "company",
                ("{S} is paid for by {v}.", "{S} gets its money from {v}.", "{P} sponsor is {v}."),
                ("Who is the sponsor of {E}?", "Who pays for {E}?"),
                (),
                ("the sponsor of {E}", "the company that pays for {E}"),
                titles=("Who pays for each of them:", "Who pays for what:"),
                topic="pays",
            ),
            "lens": Attribute(
                "company",
                ("{S} bought its great lens from {v}.", "{P} great lens came from {v}."),
                ("Who made the great lens of {E}?", "From which company did {E} buy its great lens?"),
                (),
                ("the maker of the great lens of {E}",),
                titles=("Who made each great lens:", "Where each great lens came from:"),
                topic="lens",
            ),
            "dome": Attribute(
                "colour",
                ("{S} has {a} {v} dome.", "{P} dome is {v}.", "{P} great dome was painted {v}."),
                ("What colour is the dome of {E}?", "Which colour does the dome of {E} have?"),
            ),
            "guard": Attribute(
                "animal",
                ("{S} keeps a {v} in the yard.", "{P} gate is guarded by a {v}."),
                ("Which animal lives at {E}?", "What animal does {E} keep?"),
            ),
        },
    ),
    "ship": EntityKind(
        nouns=("the ship", "the vessel"),
        headings=("{H}", "# {H}", "About {E}", "Log of {E}", "{H}: ship's papers"),
        openings=("This page is about {E}.", "{S} is a sturdy ship.", "Many sailors know {E}."),
        attributes={
            "launched": Attribute(
                "year",
                ("{S} was launched in {v}.", "{S} first sailed in {v}.", "{S} left the docks in {v}."),
                ("In what year was {E} launched?", "When did {E} first sail?"),
                ("In {v} {s} left the docks.",),
                titles=("Each was launched in:", "Years in which each was launched:"),
                topic="launched",
                comparison="Which was launched first, {a} or {b}?",
            ),
            "captain": Attribute(
                "person",
                ("{S} is commanded by {v}.", "{S} sails under captain {v}.", "{P} captain is {v}."),
                ("Who is the captain of {E}?", "Who commands {E}?"),
                (),
                ("the captain of {E}", "the person who commands {E}"),
                titles=("Who commands each of them:", "Who commands what:"),
                topic="commands",
            ),
            "cook": Attribute(
                "person",
                ("{S} took on {v} as cook.", "{P} cook is {v}.", "{S} has {v} in the kitchen."),
                ("Who is the cook of {E}?", "Who cooks on {E}?"),
                (),
                ("the cook of {E}",),
                titles=("Who cooks on each of them:", "Who cooks where:"),
                topic="cooks",
            ),
            "port": Attribute(
                "town",
                ("{S} is registered in {v}.", "{P} home port is {v}.", "{S} returns every winter to {v}."),
                ("What is the home port of {E}?", "Where is {E} registered?"),
                ("Every winter {s} returns to {v}.",),
            ),
            "cargo": Attribute(
                "cargo",
                ("{S} carries {v}.", "{S} was loaded with {v}.", "{P} usual cargo is {v}."),
                ("What does {E} carry?", "What is the cargo of {E}?"),
            ),
            "crew": Attribute(
                "number",
                ("{S} has a crew of {v}.", "{S} sails with {v} sailors.", "{P} crew counts {v} sailors."),
                ("How many sailors does {E} have?", "How large is the crew of {E}?"),
            ),
            "builder": Attribute(
                "company",
                ("{S} was made by {v}.", "{S} came from the yard of {v}.", "{P} builder was {v}."),
                ("Who was the builder of {E}?", "Which company made {E}?"),
                (),
                ("the builder of {E}", "the company that made {E}"),
            ),
            "hull": Attribute(
                "colour",
                ("{S} has {a} {v} hull.", "{P} hull is {v}.", "{P} sides are painted {v}."),
                ("What colour is the hull of {E}?", "Which colour does the hull of {E} have?"),
            ),
            "figurehead": Attribute(
                "emblem",
                ("{S} carries {a} {v} as figurehead.", "{P} figurehead is {a} {v}."),
                ("What is the figurehead of {E}?", "Which figurehead does {E} have?"),
            ),
            "refit": Attribute(
                "year",
                ("{S} was repaired in {v}.", "{S} got a new mast in {v}."),
                ("When was {E} repaired?", "In what year did {E} get a new mast?"),
                ("In {v} {s} was repaired.",),
                titles=("Each was repaired in:", "Years in which each was repaired:"),
                topic="repaired",
            ),
        },
    ),
}
