"""Terms expected over a distribution of labels: soft labels, smoothing under class weights, several yes-or-no labels.

The value of an item is the sum, over what its label might be, of that chance times the term: mixing two labels mixes
their losses, whatever the term. Only outcomes with a chance are measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from .alignment import Alignment
from .autograd import autocast_off
from .block import row_statistics
from .checks import IGNORED
from .normalization import weigh
from .rows import Rows, compute_dtype
from .signature import Term
from .term_loss import BoundTerm, bind

# Half-precision labels of a thousand classes add up to 1 within this.
SUM_TOLERANCE = 1e-2
BINARY_STATISTICS = ("log_prob", "outcome")


@dataclass(frozen=True)
class SoftRows:
    """The scored rows and the distribution over classes that each is scored against, on the host.

    Attributes:
        rows: row numbers of the flattened logits, `(R,)` int64.
        chances: `(R, C)` float64.
        shape: the shape of the items.
    """

    rows: Tensor
    chances: Tensor
    shape: torch.Size

    def smoothed(self, label_smoothing: float) -> SoftRows:
        """Keep `1 - label_smoothing` of every distribution and spread the rest evenly."""
        even = torch.full_like(self.chances, 1 / self.chances.shape[-1])
        return replace(self, chances=torch.lerp(self.chances, even, label_smoothing))

    def pairs(self, like: Tensor) -> tuple[Alignment, Tensor, Tensor]:
        """Each row beside each class that it may be.

        Returns:
            The pairs, `(n,)`; the place of each among `rows`; its chance. On the device and in the compute dtype of
            `like`.
        """
        place, label = self.chances.nonzero(as_tuple=True)
        row, chance = self.rows[place], self.chances[place, label]
        moved = torch.stack([row, label, place]).to(like.device, non_blocking=True)
        pairs = Alignment(Rows(row, moved[0], moved[1]), moved[0], self.shape)
        return pairs, moved[2], chance.to(like.device, compute_dtype(like.dtype), non_blocking=True)


def soft_rows(labels: Tensor) -> SoftRows:
    """Read soft labels `(..., C)`, whose rows are distributions, or -100 throughout where nothing is known.

    Raises:
        ValueError: a row is neither.
    """
    host = labels.detach().to("cpu", torch.float64).flatten(0, -2)
    known = (host != IGNORED).any(-1)
    rows = known.nonzero().flatten()
    chances = host[rows]
    wrong = (chances < 0).any(-1) | ~((chances.sum(-1) - 1).abs() <= SUM_TOLERANCE)
    if bool(wrong.any()):
        raise ValueError(
            f"soft label {chances[wrong][0].tolist()} is not a distribution: each row must be non-negative and add up "
            f"to 1, or be {IGNORED} throughout; for labels that hold side by side use multi_label_loss"
        )
    return SoftRows(rows, chances, labels.shape[:-1])


def certain_rows(pairs: Alignment, labels: Tensor, classes: int) -> SoftRows:
    """Class ids on the host, of the logits' leading shape, as distributions."""
    index = pairs.rows.index
    return SoftRows(index, F.one_hot(labels.flatten()[index].long(), classes).double(), pairs.shape)


def soft_loss(
    logits: Tensor,
    rows: SoftRows,
    extras: Mapping[str, Tensor],
    count: Tensor,
    term: Term,
    *,
    label_smoothing: float = 0.0,
    weighted: bool = False,
) -> Tensor:
    """Expectation of a term over the distribution of each row, summed and divided by `count`, or by weight."""
    classes = logits.shape[-1]
    if weighted:
        pairs, _, chance = rows.pairs(logits)
        count = weigh(count, bind(term, pairs, extras, classes=classes).weights() * chance, len(rows.rows))
    pairs, place, chance = rows.smoothed(label_smoothing).pairs(logits)
    bound = bind(term, pairs, extras, classes=classes)
    with autocast_off(logits.device):
        return bound.total(_measured(logits, rows.rows, pairs.rows.classes, place, bound), count, chance)


def _measured(logits: Tensor, rows: Tensor, labels: Tensor, place: Tensor, bound: BoundTerm) -> dict[str, Tensor]:
    """Statistics of each row, repeated for each of its pairs; the log-probabilities of all classes at once."""
    flat, on_device = logits.flatten(0, -2), rows.to(logits.device, non_blocking=True)
    fields = [name for name in bound.fields if name != "log_prob"]
    measured = row_statistics(flat, Rows(rows, on_device, None), fields) if fields else {}
    measured = {name: values[place] for name, values in measured.items()}
    if "log_prob" in bound.fields:
        block = flat.index_select(0, on_device).to(compute_dtype(logits.dtype))
        measured["log_prob"] = block.log_softmax(-1)[place, labels]
    return measured


def binary_loss(
    logits: Tensor,
    labels: Tensor,
    extras: Mapping[str, Tensor],
    count: Tensor,
    term: Term,
    *,
    pos_weight: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Expectation of a term over yes-or-no labels, one logit each, summed and divided by `count`.

    Args:
        logits: `(..., C)`; the sigmoid of each is the chance of yes.
        labels: the same shape, on the host: 0 to 1, or -100.
        extras: the other tensors of the dict of labels.
        count: what the sum is divided by.
        term: a function of `log_prob` and `outcome`.
        pos_weight: weight of a yes, `(C,)`.
        label_smoothing: mass spread evenly over yes and no.
    """
    flat = labels.double().flatten()
    element = (flat != IGNORED).nonzero().flatten()
    chance = torch.lerp(flat[element], torch.full_like(flat[element], 0.5), label_smoothing)
    yes, no = chance > 0, chance < 1
    outcome = torch.cat([torch.ones_like(element[yes]), torch.zeros_like(element[no])])
    element, chance = torch.cat([element[yes], element[no]]), torch.cat([chance[yes], 1 - chance[no]])
    if pos_weight is not None:
        chance = torch.where(outcome == 1, chance * pos_weight[element % labels.shape[-1]], chance)
    moved = torch.stack([element, outcome]).to(logits.device, non_blocking=True)
    dtype = compute_dtype(logits.dtype)
    pairs = Alignment(Rows(element, moved[0], None), moved[0], labels.shape)
    bound = bind(term, pairs, extras, statistics=BINARY_STATISTICS)
    with autocast_off(logits.device):
        x, present = logits.flatten()[moved[0]].to(dtype), moved[1] == 1
        measured = {"log_prob": F.logsigmoid(torch.where(present, x, -x)), "outcome": present}
        return bound.total(measured, count, chance.to(logits.device, dtype, non_blocking=True))
