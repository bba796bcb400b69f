"""Question answering: the loss against torch, and its count in the Trainer."""

import pytest
import torch
import torch.nn.functional as F

from lossfns import question_answering_loss, token_weighted
from lossfns.terms import cross_entropy
from tests import tiny
from tests.contract.probes import LossSpy
from tests.lossfns.cases import CASES, N


def normal(*shape, dtype=torch.float64, seed=0):
    return (2 * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))).to(dtype)


START, END = normal(4, 6), normal(4, 6, seed=1)
SPANS = torch.tensor([[1, 3], [0, 0], [N, 5], [N, N]])


def reference(start, end, spans=SPANS):
    """The mean over the five positions that count."""
    sums = [F.cross_entropy(x, y, reduction="sum", ignore_index=N) for x, y in zip((start, end), spans.T, strict=True)]
    return sum(sums) / (spans != N).sum()


@pytest.mark.parametrize("form", ["by name", "a tuple"])
def test_value_and_gradient(form):
    leaves = [[START.clone().requires_grad_(), END.clone().requires_grad_()] for _ in range(2)]
    start, end = leaves[0]
    outputs = (start, end, torch.zeros(4)) if form == "a tuple" else {"start_logits": start, "end_logits": end}
    question_answering_loss(outputs, SPANS).backward()
    reference(*leaves[1]).backward()
    torch.testing.assert_close(question_answering_loss(outputs, SPANS), reference(*leaves[1]), rtol=0, atol=1e-14)
    for found, expected in zip(*leaves, strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=0, atol=1e-14)


def test_one_weight_per_question():
    weights = torch.tensor([2.0, 0.5, 1.0, 9.0], dtype=torch.float64)
    labels = {"labels": SPANS, "token_weights": weights}
    found = question_answering_loss((START, END), labels, term=token_weighted(cross_entropy))
    nll = [F.cross_entropy(x, y, reduction="none", ignore_index=N) for x, y in zip((START, END), SPANS.T, strict=True)]
    torch.testing.assert_close(found, (sum(nll) * weights).sum() / 5, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("outputs", "labels", "message"),
    [
        ((START, END[:, :5]), SPANS, r"got logits \(4, 6\) and \(4, 5\)"),
        ((START, END), SPANS[:, :1], "pack_spans"),
        ((START, END), None, r"pack_spans\(collator\), with label_names"),
    ],
)
def test_inputs_that_are_refused(outputs, labels, message):
    with pytest.raises(ValueError, match=message):
        question_answering_loss(outputs, labels)


def test_the_trainer_counts_positions():
    spy, case = LossSpy(), CASES["answers"]
    tiny.trainer(case.model(), case.rows, spy, collator=case.collator).train()
    assert spy.counts == [16]
