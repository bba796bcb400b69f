"""Where a peer is better: each figure of each result in which somebody else's beats ours, found in the files alone."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from . import harness
from .harness import Result, Row, Spread

SHOWN = 3  # cases of a line that the report names
CLOSE = 0.99  # bytes and errors nearer to ours than this are the same


@dataclass(frozen=True)
class Comparison:
    """How the rows of a benchmark compare: the smaller figure is the better one.

    Attributes:
        name: the key of what was measured.
        case: keys in which rows must agree to be compared, and how the report writes them.
        figures: what is compared, and its key.
        ours: the name of ours that stands against another name in a row; None for our own, and for what has none.
    """

    name: str
    case: Mapping[str, str]
    figures: Mapping[str, str]
    ours: Callable[[Row], str | None]


@dataclass(frozen=True)
class Lead:
    """One figure of one case in which a peer is better: its figure over ours."""

    peer: str
    ours: str
    figure: str
    case: str
    ratio: float


def leads(result: Result, comparison: Comparison) -> Iterator[Lead]:
    """Those of one result. Of times the whole middle half of the rounds has to be better."""
    key = comparison.name
    rows = {(_case(row, comparison), row[key]): row for row in result.rows if key in row}
    for (case, peer), row in rows.items():
        name = comparison.ours(row)
        own = rows.get((case, name))
        if own is None or row.get("computed"):
            continue
        for figure, column in comparison.figures.items():
            over = _over(row.get(column), own.get(column))
            if over is not None:
                yield Lead(peer, own[key], figure, case, over)


def _case(row: Row, comparison: Comparison) -> str:
    return ", ".join(text.format(row.get(name)) for name, text in comparison.case.items())


def _over(peers: float | list[float] | None, own: float | list[float] | None) -> float | None:
    """The peer's figure over ours where it is better."""
    if peers is None or own is None:
        return None
    if isinstance(peers, list):
        same = len(peers) == len(own)
        over = harness.ratio(peers, own) if same else Spread.of([Spread.of(peers).median / Spread.of(own).median])
        return over.median if over.high < 1 else None
    return peers / own if peers < CLOSE * own else None


def table(found: Mapping[str, Sequence[Lead]]) -> str:
    """A line for each peer and figure, under the names of what was measured."""
    cells = []
    for where, of_result in found.items():
        for kind in dict.fromkeys((lead.peer, lead.ours, lead.figure) for lead in of_result):
            own = [lead for lead in of_result if (lead.peer, lead.ours, lead.figure) == kind]
            ratios = sorted(lead.ratio for lead in own)
            over = f"{ratios[0]:.2g}" if len(own) == 1 else f"{ratios[0]:.2g} to {ratios[-1]:.2g}"
            cases = "; ".join(lead.case for lead in own[:SHOWN]) + "; ..." * (len(own) > SHOWN)
            cells.append([where, *kind, over, str(len(own)), cases])
    if not cells:
        return "Nowhere in these results."
    header = ("measured", "peer", "beside", "better in", "theirs over ours", "cases", "which")
    return harness.table(header, cells)
