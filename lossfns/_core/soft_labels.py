"""Expected value of a term over a distribution of labels: soft labels, smoothing with class weights, binary labels.

The value of a row is the sum over its possible labels of probability times term, so that a mixture of two labels has
the mixture of their losses for any term. Only labels with a probability above 0 are measured.
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
from .normalization import weighted_count
from .rows import Rows, compute_dtype
from .signature import Term
from .term_loss import BoundTerm, bind

# Half-precision labels of a thousand classes sum to 1 within this tolerance.
SUM_TOLERANCE = 1e-2
BINARY_STATISTICS = ("log_prob", "outcome")


@dataclass(frozen=True)
class SoftRows:
    """The scored rows and the distribution over classes that each of them is scored against, on the host.

    Attributes:
        rows: row numbers of the flattened logits, `(R,)` int64.
        probs: `(R, C)` float64.
        shape: shape of the labels without the classes.
    """

    rows: Tensor
    probs: Tensor
    shape: torch.Size

    def smoothed(self, label_smoothing: float) -> SoftRows:
        """Return the distributions with `label_smoothing` of their mass spread evenly over all classes."""
        even = torch.full_like(self.probs, 1 / self.probs.shape[-1])
        return replace(self, probs=torch.lerp(self.probs, even, label_smoothing))

    def aligned(self, like: Tensor) -> tuple[Alignment, Tensor, Tensor]:
        """Return every pair of a row and a class of positive probability.

        Returns:
            The pairs as an alignment; the index of each pair's row in `rows`, `(n,)`; its probability, `(n,)`. On the
            device and in the compute dtype of `like`.
        """
        place, label = self.probs.nonzero(as_tuple=True)
        row, prob = self.rows[place], self.probs[place, label]
        moved = torch.stack([row, label, place]).to(like.device, non_blocking=True)
        aligned = Alignment(Rows(row, moved[0], moved[1]), moved[0], self.shape)
        return aligned, moved[2], prob.to(like.device, compute_dtype(like.dtype), non_blocking=True)


def soft_rows(labels: Tensor) -> SoftRows:
    """Read soft labels `(..., C)`, whose rows are distributions, or -100 throughout where a label is missing.

    Raises:
        ValueError: a row is neither of them.
    """
    host = labels.detach().to("cpu", torch.float64).flatten(0, -2)
    known = (host != IGNORED).any(-1)
    rows = known.nonzero().flatten()
    probs = host[rows]
    wrong = (probs < 0).any(-1) | ~((probs.sum(-1) - 1).abs() <= SUM_TOLERANCE)
    if bool(wrong.any()):
        raise ValueError(
            f"each soft label must be a distribution, non-negative with a sum of 1, or {IGNORED} throughout; got "
            f"{probs[wrong][0].tolist()}. For several labels per sample use multi_label_loss"
        )
    return SoftRows(rows, probs, labels.shape[:-1])


def certain_rows(aligned: Alignment, labels: Tensor, classes: int) -> SoftRows:
    """Return class ids on the host, of the logits' leading shape, as distributions."""
    index = aligned.rows.index
    return SoftRows(index, F.one_hot(labels.flatten()[index].long(), classes).double(), aligned.shape)


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
    """Return the sum over rows of the expected value of a term, divided by `count`, or by the sum of weights."""
    classes = logits.shape[-1]
    if weighted:
        aligned, _, prob = rows.aligned(logits)
        weights = bind(term, aligned, extras, classes=classes).weights()
        count = weighted_count(count, weights * prob, len(rows.rows))
    aligned, place, prob = rows.smoothed(label_smoothing).aligned(logits)
    bound = bind(term, aligned, extras, classes=classes)
    with autocast_off(logits.device):
        return bound.total(_measured(logits, rows.rows, aligned.rows.labels, place, bound), count, prob)


def _measured(logits: Tensor, rows: Tensor, labels: Tensor, place: Tensor, bound: BoundTerm) -> dict[str, Tensor]:
    """Return the statistics of each row, repeated for each of its labels."""
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
    """Return the sum of the expected value of a term over binary labels, one logit each, divided by `count`.

    Args:
        logits: `(..., C)`; the sigmoid of each is the probability that the label is present.
        labels: the same shape, on the host: the target probability in [0, 1], or -100.
        extras: the other tensors of the dict of labels.
        count: the divisor.
        term: a function of `log_prob` and `outcome`.
        pos_weight: weight of present labels, `(C,)`.
        label_smoothing: probability mass spread evenly over present and absent.
    """
    flat = labels.double().flatten()
    element = (flat != IGNORED).nonzero().flatten()
    prob = torch.lerp(flat[element], torch.full_like(flat[element], 0.5), label_smoothing)
    yes, no = prob > 0, prob < 1
    outcome = torch.cat([torch.ones_like(element[yes]), torch.zeros_like(element[no])])
    element, prob = torch.cat([element[yes], element[no]]), torch.cat([prob[yes], 1 - prob[no]])
    if pos_weight is not None:
        prob = torch.where(outcome == 1, prob * pos_weight[element % labels.shape[-1]], prob)
    moved = torch.stack([element, outcome]).to(logits.device, non_blocking=True)
    dtype = compute_dtype(logits.dtype)
    aligned = Alignment(Rows(element, moved[0], None), moved[0], labels.shape)
    bound = bind(term, aligned, extras, statistics=BINARY_STATISTICS)
    with autocast_off(logits.device):
        x, present = logits.flatten()[moved[0]].to(dtype), moved[1] == 1
        measured = {"log_prob": F.logsigmoid(torch.where(present, x, -x)), "outcome": present}
        return bound.total(measured, count, prob.to(logits.device, dtype, non_blocking=True))
