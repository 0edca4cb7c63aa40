"""The drawn figures of the documentation: `python docs/draw.py` writes them into docs/images.

Colours follow the reader's light or dark mode by themselves, on GitHub and on the site.
"""

from __future__ import annotations

from pathlib import Path

IMAGES = Path(__file__).parent / "images"
STYLE = """<style>
  .ground { fill: #ffffff } text { fill: #222222; font: 16px system-ui, sans-serif } .small { font-size: 14px }
  .head { font-weight: 600 } .none { fill: #00000000; stroke: #b8b8b8 } .exact { fill: #56b4e9 } .stored { fill: #0072b2 }
  .fresh { fill: #e69f00 } .mark { fill: #d55e00 } .line { stroke: #777777; fill: none; stroke-width: 1.5 }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #1a1c1e } text { fill: #dddddd } .none { stroke: #55595d } .stored { fill: #3d8fd1 } .exact { fill: #a5d8f6 }
  }
</style>"""
LEGEND = {"exact": "stored, exact", "stored": "stored elsewhere", "fresh": "computed now", "none": "not there"}

# The prompt of the pictures: each part's name and how many tokens (columns) it has.
PARTS = {"header": 1, "chunk A": 5, "chunk B": 5, "chunk C": 5, "question": 2}
COLUMNS = sum(PARTS.values())
EXACT = range(6)
STALE = range(6, 16)
QUESTION = range(16, 18)
CHOSEN = frozenset({7, 12})
LAYERS, CHECK = 6, 2
CELL, GAP = 15, 4


def part_edges() -> list[int]:
    """Return the column at which each part begins."""
    edges, column = [], 0
    for width in PARTS.values():
        edges.append(column)
        column += width
    return edges


def x_of(column: int) -> float:
    """Return where a column stands: parts are set apart."""
    return column * CELL + GAP * sum(edge <= column for edge in part_edges()[1:])


WIDTH = x_of(COLUMNS - 1) + CELL


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """Return words at a place."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{words}</text>'


def rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    """Return a box."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2" class="{kind}"/>'


def legend(y: float, *kinds: str) -> str:
    """Return what the colours mean, from left to right."""
    parts, x = [], 20.0
    for kind in kinds:
        parts += [rect(x, y - 12, 14, 14, kind), text(x + 20, y, LEGEND[kind], "small")]
        x += 46 + 7.2 * len(LEGEND[kind])
    return "".join(parts)


def grid(
    x: float, y: float, title: str, words: list[str], kinds: list[list[str]], marked: frozenset[int] = frozenset()
) -> str:
    """Return a panel: a title, tokens by layers (the first layer at the bottom), the parts' letters, and words below."""
    parts = [text(x, y, title, "head")]
    top = y + 24
    for layer, row in enumerate(kinds):
        for column, kind in enumerate(row):
            parts.append(rect(x + x_of(column), top + (LAYERS - 1 - layer) * CELL, CELL - 2, CELL - 2, kind))
    parts += [f'<path class="mark" d="M{x + x_of(c) + 1:g} {top - 11:g}h11l-5.5 8z"/>' for c in sorted(marked)]
    foot = top + LAYERS * CELL + 14
    parts += [
        text(x + x_of(edge), foot, name[-1] if "chunk" in name else name[0], "small")
        for edge, name in zip(part_edges(), PARTS, strict=True)
    ]
    parts += [text(x, foot + 20 + 18 * line, each, "small") for line, each in enumerate(words)]
    return "".join(parts)


def cells(fresh_below: int = 0, chosen: bool = False) -> list[list[str]]:
    """Return what each cell is, layer by layer.

    Args:
        fresh_below: All tokens outside the exact prefix are computed below this layer.
        chosen: The chosen tokens and the question are computed in every layer.
    """

    def kind(layer: int, column: int) -> str:
        if column in EXACT:
            return "exact"
        if layer < fresh_below or (chosen and column in CHOSEN.union(QUESTION)):
            return "fresh"
        return "stored" if column in STALE else "none"

    return [[kind(layer, column) for column in range(COLUMNS)] for layer in range(LAYERS)]


def write(name: str, said: str, width: float, height: float, *parts: str) -> None:
    """Write one figure."""
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    ground = f'<rect width="{width:g}" height="{height:g}" rx="8" class="ground"/>'
    whole = "\n".join([head, f"<title>{said}</title>", STYLE, ground, *parts, "</svg>\n"])
    (IMAGES / f"{name}.svg").write_text(whole, encoding="utf-8")


def place_of(number: int) -> tuple[float, float]:
    """Return where a panel stands, two in a row."""
    return 20 + (number % 2) * (WIDTH + 40), 28 + number // 2 * 210


def draw_blend() -> None:
    """Place, dense, select, sparse: the policy `hkvd`."""
    dense = cells(fresh_below=CHECK)
    steps = [
        grid(
            *place_of(0), "1. place", ["Stored KV goes to its place,", "keys rotated to their new positions."], cells()
        ),
        grid(
            *place_of(1),
            "2. dense pass",
            ["All tokens run up to the check layer:", "how far is stored KV from fresh KV?"],
            dense,
        ),
        grid(*place_of(2), "3. select", ["The few tokens that deviate most", "are chosen."], dense, CHOSEN),
        grid(
            *place_of(3),
            "4. sparse pass",
            ["They and the question", "run through all layers."],
            cells(CHECK, True),
            CHOSEN,
        ),
    ]
    write_panels("blend", "A blend in four steps: place, dense pass, select, sparse pass", steps)


def draw_static() -> None:
    """The same without a dense pass: the policy `static`."""
    steps = [
        grid(
            *place_of(0),
            "1. place",
            ["As before. Each chunk brings its ranking,", "made when it was indexed."],
            cells(),
            CHOSEN,
        ),
        grid(
            *place_of(1),
            "2. sparse pass",
            ["The highest in rank and the question", "run. Nothing else is computed."],
            cells(0, True),
            CHOSEN,
        ),
    ]
    write_panels("static", "A blend by static deviation: place, then the sparse pass", steps)


def write_panels(name: str, said: str, steps: list[str]) -> None:
    """Write panels that stand two in a row, and what their colours mean."""
    height = (len(steps) + 1) // 2 * 210 + 30
    write(name, said, 2 * WIDTH + 80, height, *steps, legend(height - 14, "exact", "stored", "fresh", "none"))


def draw_methods() -> None:
    """What each method computes of one prompt."""
    rows = {
        "full recompute": (set(), "right, late"),
        "prefix caching": (set(EXACT), "right, hardly sooner"),
        "full KV reuse": (set(EXACT) | set(STALE), "soon, wrong where chunks refer to each other"),
        "blend": (set(EXACT) | set(STALE) - CHOSEN, "soon, and as right as full recompute"),
    }
    parts, left, cell = [], 170.0, 20
    for number, (name, (reused, words)) in enumerate(rows.items()):
        y = 40 + 62 * number
        parts.append(text(20, y + 16, name, "head"))
        for column in range(COLUMNS):
            kind = "fresh" if column not in reused else "exact" if column in EXACT else "stored"
            parts.append(rect(left + x_of(column) * cell / CELL, y, cell - 3, 22, kind))
        parts.append(text(left, y + 40, words, "small"))
    parts += [
        text(left + x_of(edge) * cell / CELL, 28, name, "small")
        for edge, name in zip(part_edges(), PARTS, strict=True)
        if name != "header"
    ]
    height = 40 + 62 * len(rows) + 34
    write(
        "methods",
        "What four methods compute of the same prompt",
        left + WIDTH * cell / CELL + 24,
        height,
        *parts,
        legend(height - 14, "exact", "stored", "fresh"),
    )


def main() -> None:
    """Draw them all."""
    draw_blend()
    draw_static()
    draw_methods()


if __name__ == "__main__":
    main()
