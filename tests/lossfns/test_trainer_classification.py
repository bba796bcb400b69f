"""Every loss of classes and real values in the stock Trainer: the same gradient however a window is split.

The window is eight samples, some without a label; one micro-batch of two has none at all. What is right comes from
torch alone, on all eight at once. Broken losses, transformers' own among them, must be found by the same comparison.
"""

import pickle
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lossfns import (
    asymmetric,
    classification_loss,
    corn_levels,
    focal,
    gaussian_nll,
    huber,
    multi_label_loss,
    ordinal_loss,
    regression_loss,
    token_classification_loss,
)
from lossfns.collators.labels import mask_missing, replace_labels
from tests import tiny
from tests.contract import probes

N = tiny.IGNORED
MISSING = (1, 4, 5)
WEIGHTS = [0.5, 1.0, 2.0]
SPLITS = {
    "one batch": {},
    "4 x 2": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    "3 x 3": {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 3},
}


# --- labels of eight samples -----------------------------------------------------------------------------------------


def without_some(labels: torch.Tensor) -> torch.Tensor:
    return labels.index_fill(0, torch.tensor(MISSING), N)


def ids(classes: int) -> torch.Tensor:
    return without_some(torch.arange(8) * 5 % 7 % classes)


def real(*shape: int) -> torch.Tensor:
    return torch.randn(8, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


MULTI = without_some((real(3) > 0).double())
MULTI[0, 1] = MULTI[2, 2] = N
TARGETS = without_some(real(3))
TARGETS[7, 0] = N


# --- what is right, by torch alone -----------------------------------------------------------------------------------


def known(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = (labels if labels.ndim > 1 else labels[:, None]).ne(N).any(1)
    return logits[rows], labels[rows]


def soft_mean(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(*known(logits, labels))


def focal_mean(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    x, y = known(logits, labels)
    nll = F.cross_entropy(x, y, reduction="none")
    return (torch.tensor(WEIGHTS)[y] * (1 - (-nll).exp()) ** 2 * nll).mean()


def smoothed_mean(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    x, y = known(logits, labels)
    return F.cross_entropy(x, y, torch.tensor(WEIGHTS).double(), label_smoothing=0.1, reduction="sum") / len(y)


def bce_mean(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(logits[labels != N], labels[labels != N])


def asymmetric_mean(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    p, y = logits[labels != N].sigmoid(), labels[labels != N]
    shifted = (p - 0.05).clamp(min=0)
    return -(y * p.log() + (1 - y) * shifted**4 * (1 - shifted).log()).mean()


def coral_mean(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    x, y = known(logits, labels)
    return 3 * F.binary_cross_entropy_with_logits(x, (y[:, None] > torch.arange(3)).double())


def corn_mean(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    x, y = known(logits, labels)
    values = F.binary_cross_entropy_with_logits(x, (y[:, None] > torch.arange(3)).double(), reduction="none")
    return values[y[:, None] >= torch.arange(3)].sum() / len(y)


def real_mean(function: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    x = logits.view(labels.shape)
    return function(x[labels != N], labels[labels != N])


def gaussian_mean(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    x, y = known(logits, labels)
    return F.gaussian_nll_loss(x[:, 0], y, x[:, 1].exp(), full=True)


# name: (loss, labels, number of logits, the mean over all samples)
LOSSES: dict[str, tuple[Any, torch.Tensor, int, Any]] = {
    "classes": (classification_loss, ids(3), 3, soft_mean),
    "focal with alpha": (partial(classification_loss, term=focal, class_weights=WEIGHTS), ids(3), 3, focal_mean),
    "weighted and smoothed": (
        partial(classification_loss, class_weights=WEIGHTS, label_smoothing=0.1),
        ids(3),
        3,
        smoothed_mean,
    ),
    "soft labels": (classification_loss, without_some(real(3).softmax(-1)), 3, soft_mean),
    "multi-label": (multi_label_loss, MULTI, 3, bce_mean),
    "asymmetric": (partial(multi_label_loss, term=asymmetric), MULTI, 3, asymmetric_mean),
    "CORAL": (ordinal_loss, ids(4), 3, coral_mean),
    "CORN": (partial(ordinal_loss, levels=corn_levels), ids(4), 3, corn_mean),
    "one target": (regression_loss, without_some(real()), 1, partial(real_mean, F.mse_loss)),
    "three targets": (partial(regression_loss, term=huber), TARGETS, 3, partial(real_mean, F.huber_loss)),
    "Gaussian": (partial(regression_loss, term=gaussian_nll), without_some(real()), 2, gaussian_mean),
}


def rows_with(labels: torch.Tensor, model: str) -> list[tiny.Row]:
    rows = tiny.image_rows(8) if model == "vit" else tiny.class_rows(8)
    return [row | {"labels": label} for row, label in zip(rows, labels, strict=True)]


def collate(rows: list[tiny.Row]) -> tiny.Row:
    """`tiny.pad`, but labels of a sample are no sequence to be padded."""
    inputs = tiny.pad([{name: value for name, value in row.items() if name != "labels"} for row in rows])
    return inputs | {"labels": torch.stack([row["labels"] for row in rows])}


def head(model: str, logits: int) -> Any:
    return tiny.model(model, num_labels=logits)


def whole(model: Any, rows: list[tiny.Row], mean: Any, collator: Any = collate) -> torch.Tensor:
    """The gradient of the mean over all samples at once."""
    batch = collator(rows)
    labels = batch.pop("labels")
    return probes.gradient(model, mean(model(**batch).logits, labels))


def trained(model: Any, rows: list[tiny.Row], loss: Any, *, collator: Any = collate, **settings: Any) -> torch.Tensor:
    return tiny.gradient_of(tiny.trainer(model, rows, loss, collator=collator, **settings))


# --- tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "splits"),
    [("bert_cls", tuple(SPLITS)), ("llama_cls", ("one batch", "4 x 2")), ("vit", ("one batch", "4 x 2"))],
)
@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_does_not_depend_on_the_split(name, model, splits):
    loss, labels, logits, mean = LOSSES[name]
    rows = rows_with(labels, model)
    expected = whole(head(model, logits), rows, mean)
    assert expected.abs().max() > 1e-3
    for split in splits:
        found = trained(head(model, logits), rows, loss, **SPLITS[split])
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("split", SPLITS)
def test_tokens(split):
    rows = tiny.token_rows(8)
    for place in MISSING:
        rows[place]["labels"].fill_(N)
    expected = whole(
        head("bert_token", 3),
        rows,
        lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), label_smoothing=0.1),
        tiny.pad,
    )
    loss = partial(token_classification_loss, label_smoothing=0.1)
    found = trained(head("bert_token", 3), rows, loss, collator=tiny.pad, **SPLITS[split])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("split", SPLITS)
def test_multiple_choice(split):
    """Four answers of one length a question; the model returns logits (questions, answers)."""
    generator = torch.Generator().manual_seed(0)
    rows = [
        {"input_ids": torch.randint(4, tiny.VOCAB, (4, 6), generator=generator), "labels": label} for label in ids(4)
    ]
    expected = whole(tiny.model("bert_choice"), rows, soft_mean)
    found = trained(tiny.model("bert_choice"), rows, classification_loss, **SPLITS[split])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-12)


def plain_mean(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return F.cross_entropy(*known(outputs["logits"], labels)) if labels.ne(N).any() else outputs["logits"].sum() * 0


def counted_elements(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return F.cross_entropy(*known(outputs["logits"], labels), reduction="sum") / num_items_in_batch


@pytest.mark.parametrize(
    ("loss", "labels", "split"),
    [(plain_mean, ids(3), "4 x 2"), (counted_elements, without_some(real(3).softmax(-1)), "one batch")],
)
def test_wrong_divisors_are_found(loss, labels, split):
    rows = rows_with(labels, "bert_cls")
    expected = whole(head("bert_cls", 3), rows, soft_mean)
    found = trained(head("bert_cls", 3), rows, loss, **SPLITS[split])
    assert (found - expected).abs().max() > 0.1 * expected.abs().max()


def test_stock_loss_of_sequence_classification_fails_the_comparison():
    """CONTRACT 13: its gradients grow with the accumulation steps."""
    rows = rows_with(torch.arange(8) % 3, "bert_cls")
    expected = whole(head("bert_cls", 3), rows, soft_mean)
    torch.testing.assert_close(trained(head("bert_cls", 3), rows, None), expected, rtol=1e-6, atol=1e-12)
    found = trained(head("bert_cls", 3), rows, None, **SPLITS["4 x 2"])
    torch.testing.assert_close(found, 4 * expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("name", ["classes", "soft labels", "multi-label", "CORN", "three targets"])
def test_a_window_without_labels_changes_nothing(name):
    loss, labels, logits, _ = LOSSES[name]
    trainer = tiny.trainer(
        head("bert_cls", logits), rows_with(torch.full_like(labels, N), "bert_cls"), loss, collator=collate
    )
    assert not tiny.gradient_of(trainer).any()
    assert tiny.logged(trainer) == [0.0]


def test_collators_mark_what_is_missing():
    labels = ids(3)
    rows = rows_with(labels.masked_fill(labels == N, 255), "bert_cls")
    expected = whole(head("bert_cls", 3), rows_with(labels, "bert_cls"), soft_mean)
    found = trained(
        head("bert_cls", 3), rows, classification_loss, collator=replace_labels(collate, {255: N}), **SPLITS["4 x 2"]
    )
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-12)
    rows = rows_with(TARGETS.masked_fill(TARGETS == N, torch.nan), "bert_cls")
    expected = whole(head("bert_cls", 3), rows_with(TARGETS, "bert_cls"), partial(real_mean, F.mse_loss))
    found = trained(head("bert_cls", 3), rows, regression_loss, collator=mask_missing(collate), **SPLITS["4 x 2"])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("labels", [torch.tensor([[1, 255], [0, 2]], dtype=torch.uint8), torch.tensor([255, 1, 0])])
def test_replaced_labels_of_any_shape(labels):
    """All at once, so that two ids can change places; and no id is written into a dtype that cannot hold it."""
    collator = pickle.loads(pickle.dumps(replace_labels(torch.utils.data.default_convert, {255: N, 0: 1, 1: 0})))
    found = collator({"labels": labels, "pixels": labels})
    expected = [{255: N, 0: 1, 1: 0}.get(label, label) for label in labels.flatten().tolist()]
    assert found["labels"].flatten().tolist() == expected
    assert found["pixels"] is labels


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_masked_labels_keep_their_dtype(dtype):
    collator = pickle.loads(pickle.dumps(mask_missing(torch.utils.data.default_convert)))
    labels = torch.tensor([[0.5, torch.nan], [torch.nan, 2.0]], dtype=dtype)
    found = collator({"labels": labels})["labels"]
    assert found.dtype == dtype
    assert found.tolist() == [[0.5, N], [N, 2.0]]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: replace_labels(collate, {255.0: N}), TypeError, "map integers to integers"),
        (lambda: replace_labels(collate, {255: None}), TypeError, "map integers to integers"),
        (
            lambda: replace_labels(dict, {255: N})({"labels": torch.zeros(2)}),
            ValueError,
            "integer labels, got torch.fl",
        ),
        (lambda: replace_labels(dict, {255: N})({}), ValueError, "got NoneType"),
        (lambda: mask_missing(dict)({"labels": torch.zeros(2).long()}), ValueError, "floating labels, got torch.int64"),
    ],
)
def test_collators_raise(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_several_devices_under_data_parallel():
    loss, labels, logits, mean = LOSSES["soft labels"]
    rows = rows_with(labels, "bert_cls")
    expected = whole(head("bert_cls", logits), rows, mean)
    found = trained(head("bert_cls", logits), rows, loss, replicas=2, per_device_train_batch_size=4)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-12)


def differences() -> dict[str, float]:
    """On one of two ranks: how far each loss is from the mean over all samples."""
    found = {}
    for name, (loss, labels, logits, mean) in LOSSES.items():
        rows = rows_with(labels, "bert_cls")
        settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
        difference = trained(head("bert_cls", logits), rows, loss, **settings)
        difference -= whole(head("bert_cls", logits), rows, mean)
        found[name] = difference.abs().max().item()
    return found


@pytest.mark.distributed
def test_two_ranks_train_as_one_process():
    for found in tiny.run_distributed(differences):
        assert found.keys() == LOSSES.keys()
        assert max(found.values()) < 1e-7, found
