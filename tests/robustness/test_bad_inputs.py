"""Whatever goes into a public function: it ends in an error with a message, not in a wrong number or a hang.

Each entry is a call that works and, for each of its arguments, values with which it must not. `(ValueError, TypeError,
RuntimeError)` are what the docstrings promise; an IndexError, AttributeError or KeyError was never thought of.
"""

import contextlib
import inspect
import itertools
import operator
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn

import lossfns
import metrics
import reducers
from lossfns import collators
from metrics import plots, testing
from metrics._core.evaluation import leaves, mapped

PROMISED = (ValueError, TypeError, RuntimeError)
NAN, INF = float("nan"), float("inf")

NO_TENSOR = ["text", 3, [1, 2], np.zeros(2)]
NO_NUMBER = ["text", [1.0, 2.0], None]
NOT_POSITIVE = [0.0, -1.0, NAN, *NO_NUMBER]
NEGATIVE = [-1.0, NAN, *NO_NUMBER]
NO_CHANCE = [-0.1, 1.1, NAN, *NO_NUMBER]
NO_SHIFT = [-1, 1.0, "1", True, None]
NO_COUNT = [0, -1, 1.5, "2", None]
NO_FUNCTION = ["text", 3]
NO_SOURCE = ["text", nn.Linear(2, 2)]

LOGITS = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([[0, 1, 2], [3, -100, 4]])
ROWS, CLASSES = LOGITS[0], torch.tensor([0, -100, 4])
FEW = LOGITS[..., 0]
PAIRS = torch.stack([LABELS[:1], LABELS[1:]], -1)
IMAGES, PIXELS = torch.randn(1, 3, 2, 2), torch.zeros(1, 4, 4, dtype=torch.int64)
LOG_PROBS = torch.tensor([-0.5, -1.0])

# What is wrong wherever ids of classes are labels of LOGITS or ROWS.
BAD_LABELS = [
    *NO_TENSOR,
    None,
    LABELS.double(),
    LABELS.bool(),
    LABELS + 1,
    LABELS - 1,
    LABELS[:1],
    LABELS[:, :, None],
    torch.tensor(1),
    torch.zeros(2, 4, dtype=torch.int64),
    {},
    {"labels": [[0, 1, 2]] * 2},
    {"labels": None},
    LABELS.to("meta"),
]
BAD_CLASSES = [
    *NO_TENSOR,
    None,
    CLASSES.float(),
    CLASSES.bool(),
    CLASSES + 1,
    CLASSES[:2],
    CLASSES[:, None],
    {"x": CLASSES},
]
BAD_LOGITS = [
    *NO_TENSOR,
    None,
    (),
    {},
    {"logits": None},
    LABELS,
    LOGITS[:1],
    LOGITS[:, :2],
    LOGITS[0, 0],
    LOGITS[0, 0, 0],
]
BAD_ROWS = [*NO_TENSOR, None, (), {}, {"logits": [1.0]}, CLASSES, ROWS[:2], ROWS[0], ROWS[0, 0]]
BAD_COUNTS = ["3", [3], 1j, True]
BAD_TERMS = [
    "text",
    3,
    None,
    lambda: 0,
    lambda *tensors: 0,
    lambda log_prob, unknown: log_prob,
    lambda log_prob: log_prob.sum(),
    lambda log_prob: log_prob[:1],
    lambda log_prob: 0.0,
    lambda log_prob=None: log_prob,
]


class Causal(nn.Module):
    """The least that can be a language model."""

    def forward(self, input_ids, logits_to_keep=0):
        return torch.zeros(*input_ids.shape, 5)

    def get_decoder(self):
        return nn.Identity()

    def get_output_embeddings(self):
        return nn.Identity()


class Entry(NamedTuple):
    """A function, a call of it that works, and what must not work in the place of each argument."""

    function: Callable[..., Any]
    good: dict[str, Any]
    bad: Mapping[str, list[Any]] = MappingProxyType({})
    called: Callable[[Any], Any] | None = None  # what is done with the result, where the error comes no sooner
    name: str = ""

    @property
    def title(self) -> str:
        return self.name or self.function.__name__

    def __call__(self, **changed: Any) -> Any:
        result = self.function(**self.good | changed)
        return self.called(result) if self.called else result


def token_loss(function: Callable[..., Any], **options: list[Any]) -> Entry:
    bad = {
        "outputs": BAD_LOGITS,
        "labels": BAD_LABELS,
        "num_items_in_batch": BAD_COUNTS,
        "term": BAD_TERMS,
        "normalize": ["sequences", "weights", "mean", None, 1],
        "select": [*NO_FUNCTION, lambda outputs: None, lambda outputs: LABELS],
        "source": NO_SOURCE,
    }
    return Entry(function, {"outputs": LOGITS, "labels": LABELS}, bad | options)


def class_loss(function: Callable[..., Any], good: dict[str, Any], labels: list[Any], outputs: list[Any]) -> Entry:
    numbers = ["abc", 3.0, [1.0] * 4, [[1.0] * 5], [NAN] * 5, [INF] * 5]
    soft = torch.full((*good["labels"].shape, 5), 0.2)
    bad = {
        "outputs": outputs,
        "labels": [*labels, soft * 2, soft * NAN, soft - 0.1, soft[..., :4]],
        "num_items_in_batch": BAD_COUNTS,
        "term": BAD_TERMS,
        "class_weights": [*numbers, [-1.0] * 5],
        "label_smoothing": NO_CHANCE,
        "logit_adjustment": numbers,
        "margins": numbers,
        "normalize": ["sequences", "weights", None],
    }
    return Entry(function, good, bad)


def binary(function: Callable[..., Any], good: dict[str, Any], **bad: list[Any]) -> Entry:
    terms = ["text", None, lossfns.z_loss, lambda log_prob: log_prob.sum()]
    return Entry(function, good, {"num_items_in_batch": BAD_COUNTS, "term": terms} | bad)


LOSSES = [
    token_loss(lossfns.causal_lm_loss, shift=NO_SHIFT),
    token_loss(lossfns.masked_lm_loss),
    token_loss(lossfns.seq2seq_lm_loss),
    class_loss(lossfns.classification_loss, {"outputs": ROWS, "labels": CLASSES}, BAD_CLASSES, BAD_ROWS),
    class_loss(lossfns.token_classification_loss, {"outputs": LOGITS, "labels": LABELS}, BAD_LABELS, BAD_LOGITS),
    binary(
        lossfns.multi_label_loss,
        {"outputs": ROWS, "labels": torch.ones(3, 5)},
        outputs=[*BAD_ROWS, ROWS[:, :4]],
        labels=[*NO_TENSOR, None, torch.ones(3, 4), torch.full((3, 5), 2), torch.full((3, 5), NAN), torch.tensor(1)],
        pos_weight=["abc", 3.0, [1.0] * 4, [-1.0] * 5, [NAN] * 5],
        label_smoothing=NO_CHANCE,
    ),
    binary(
        lossfns.ordinal_loss,
        {"outputs": ROWS, "labels": CLASSES},
        outputs=BAD_ROWS,
        labels=[*NO_TENSOR, None, CLASSES.float(), CLASSES + 2, CLASSES[:2]],
        levels=["text", None, lambda labels, thresholds: torch.zeros(1), lambda labels, thresholds: labels],
    ),
    Entry(
        lossfns.regression_loss,
        {"outputs": FEW, "labels": FEW},
        {
            "outputs": [*NO_TENSOR, None, LABELS, FEW[:1], FEW[:, 0], FEW[0, 0]],
            "labels": [*NO_TENSOR, None, FEW * NAN, FEW * INF, FEW[:1], FEW.T, FEW + 1j, FEW[0, 0]],
            "num_items_in_batch": BAD_COUNTS,
            "term": ["text", None, lossfns.cross_entropy, lossfns.gaussian_nll, lambda prediction: prediction.mean()],
        },
    ),
    Entry(
        lossfns.regression_loss,
        {"outputs": FEW[:, :2], "labels": FEW[:, 0], "term": lossfns.gaussian_nll},
        {"outputs": [FEW, FEW[:, :1], FEW[0, 0]], "labels": [FEW, torch.tensor(1.0)]},
        name="regression_loss(term=gaussian_nll)",
    ),
    binary(
        lossfns.question_answering_loss,
        {"outputs": {"start_logits": ROWS, "end_logits": ROWS}, "labels": torch.tensor([[0, 1], [-100, 4], [2, 2]])},
        outputs=[
            *NO_TENSOR,
            None,
            ROWS,
            (ROWS,),
            (torch.tensor(1.0), ROWS, ROWS),
            {"start_logits": ROWS},
            {"start_logits": ROWS, "end_logits": None},
            {"start_logits": ROWS, "end_logits": ROWS[:2]},
        ],
        labels=[*NO_TENSOR, None, CLASSES, torch.full((3, 2), 5), torch.zeros(3, 2)],
        term=BAD_TERMS,
    ),
    Entry(
        lossfns.ctc_loss,
        {"outputs": LOGITS, "labels": {"labels": torch.tensor([[1], [-100]]), "input_lengths": torch.tensor([3, 3])}},
        {
            "outputs": [*NO_TENSOR, None, LABELS, ROWS, LOGITS[:1]],
            "labels": [
                *NO_TENSOR,
                None,
                torch.tensor([[5], [1]]),
                torch.tensor([[0], [1]]),
                torch.tensor([[1, 1, 1], [2, 2, 2]]),
                torch.tensor([[1.0], [2.0]]),
                torch.tensor([1, 2]),
                {"labels": torch.tensor([[1], [2]]), "input_lengths": [3, 3]},
                {"labels": torch.tensor([[1], [2]]), "input_lengths": torch.tensor([4, 3])},
                {"labels": torch.tensor([[1], [2]]), "input_lengths": torch.tensor([3])},
                {"labels": torch.tensor([[1], [2]]), "lengths": torch.tensor([3, 3])},
            ],
            "num_items_in_batch": BAD_COUNTS,
            "blank": [-1, 5, 1, "0", None, 0.5],
        },
    ),
    Entry(
        lossfns.segmentation_loss,
        {"outputs": IMAGES, "labels": PIXELS},
        {
            "outputs": [*NO_TENSOR, None, PIXELS, ROWS, IMAGES[0], torch.randn(1, 3, 8, 8), IMAGES[..., :0]],
            "labels": [*NO_TENSOR, None, PIXELS + 3, PIXELS.float(), PIXELS[0], PIXELS.bool()],
            "num_items_in_batch": BAD_COUNTS,
            "term": [*BAD_TERMS[:2], None, *BAD_TERMS[3:]],
            "dice": NEGATIVE,
        },
    ),
    Entry(
        lossfns.clip_loss,
        {"outputs": {"logits_per_text": torch.eye(3)}, "labels": torch.arange(3)},
        {
            "outputs": [
                *NO_TENSOR,
                None,
                {},
                *({"logits_per_text": x} for x in (ROWS, LABELS, LOGITS, torch.tensor(1.0))),
            ],
            "labels": [*NO_TENSOR, {}, torch.zeros(3), torch.arange(2), torch.zeros(3, 3, dtype=torch.int64)],
            "num_items_in_batch": BAD_COUNTS[:3],
        },
    ),
    Entry(
        lossfns.info_nce_loss,
        {"outputs": None, "labels": None, "select": lambda outputs: (ROWS, ROWS)},
        {
            "select": [
                *NO_FUNCTION,
                None,
                lambda outputs: ROWS,
                lambda outputs: (ROWS, ROWS[:2]),
                lambda outputs: (1, 2),
            ],
            "temperature": NOT_POSITIVE,
            "labels": [*NO_TENSOR, {}, torch.zeros(3), torch.arange(2)],
        },
    ),
    Entry(
        lossfns.triplet_loss,
        {"outputs": ROWS, "labels": torch.tensor([0, 0, 1])},
        {
            "outputs": [*NO_TENSOR, None, LABELS, ROWS[:2], LOGITS],
            "labels": [*NO_TENSOR, None, torch.zeros(3), torch.arange(2), torch.tensor(1)],
            "num_items_in_batch": BAD_COUNTS,
            "margin": NOT_POSITIVE,
            "mining": ["text", None, lambda *_: torch.tensor(1.0), lambda distances, *_: distances],
        },
    ),
    Entry(
        lossfns.preference_loss,
        {"outputs": LOGITS, "labels": PAIRS, "objective": lossfns.simpo},
        {
            "outputs": BAD_LOGITS,
            "labels": [*NO_TENSOR, None, PAIRS.float(), PAIRS + 1, LABELS[:1], PAIRS[:, :, :1], CLASSES],
            "num_items_in_batch": [3, *BAD_COUNTS],
            "objective": ["text", None, lossfns.dpo, lambda chosen: chosen.mean(), lambda chosen, unknown: chosen],
            "shift": NO_SHIFT,
            "source": NO_SOURCE,
        },
    ),
    Entry(
        lossfns.reward_loss,
        {"outputs": ROWS[:2, :1], "labels": torch.tensor([0])},
        {
            "outputs": [*NO_TENSOR, None, LABELS, ROWS, ROWS[:1, :1]],
            "labels": [*NO_TENSOR, None, torch.tensor([[0]]), torch.tensor(0), torch.tensor([0, 0])],
            "objective": ["text", None, lambda chosen: chosen.mean()],
        },
    ),
    Entry(
        lossfns.sequence_log_probs,
        {"outputs": LOGITS, "labels": LABELS},
        {"outputs": BAD_LOGITS, "labels": BAD_LABELS, "shift": NO_SHIFT, "source": NO_SOURCE},
    ),
    Entry(
        lossfns.distillation_loss,
        {"outputs": LOGITS, "labels": {"labels": LABELS, "teacher_logits": LOGITS}},
        {
            "outputs": BAD_LOGITS,
            "labels": [
                *BAD_LABELS,
                LABELS,
                *({"labels": LABELS, "teacher_logits": x} for x in ([1.0], LABELS, ROWS, LOGITS[:1], LOGITS[:, :1])),
                {"labels": LABELS, "teacher_ids": [1], "teacher_log_probs": [1.0]},
                {"labels": LABELS, "teacher_ids": LABELS[..., None].abs() % 5},
                {"labels": LABELS, "teacher_ids": LABELS[..., None] * 0 + 9, "teacher_log_probs": LOGITS[..., :1]},
                {
                    "labels": LABELS,
                    "teacher_ids": LABELS[..., None] * 0,
                    "teacher_log_probs": LOGITS[..., :1],
                    "teacher_logits": LOGITS,
                },
            ],
            "divergence": ["text", None, lambda p, q: p.sum(), lambda p, q: p, lambda p, q: 0.0],
            "temperature": NOT_POSITIVE,
            "shift": NO_SHIFT,
            "teacher": ["text", nn.Linear(2, 2)],
            "source": NO_SOURCE,
        },
    ),
    Entry(
        lossfns.multi_token_loss,
        {"outputs": {"logits": LOGITS}, "labels": LABELS, "heads": ("logits",), "weights": (1.0,)},
        {
            "outputs": [*NO_TENSOR, None, LOGITS, {}, {"logits": LABELS}],
            "labels": BAD_LABELS[:5],
            "heads": ["logits", (), ("other",), ("logits", "logits")],
            "weights": [(), (1.0, 2.0), 1.0],
            "num_items_in_batch": BAD_COUNTS,
            "term": BAD_TERMS,
        },
    ),
    Entry(
        lossfns.token_statistics,
        {"logits": LOGITS, "labels": LABELS},
        {
            "logits": BAD_LOGITS,
            "labels": BAD_LABELS,
            "fields": ["log_prob", ("other",), ("rank", "rank"), None, 3],
            "shift": NO_SHIFT,
            "ignore_index": [None, "text", 1.5, [1]],
        },
    ),
    Entry(
        lossfns.head_token_statistics,
        {"hidden": LOGITS, "head": nn.Linear(5, 5), "labels": LABELS},
        {
            "hidden": [LABELS, LOGITS[:1], LOGITS[..., :3]],
            "head": [None, "text", nn.Linear(3, 5)],
            "labels": BAD_LABELS,
            "fields": ["log_prob", ("other",), ("rank", "rank")],
            "shift": NO_SHIFT,
            "softcap": [0.0, -1.0, NAN, "text"],
            "scale": ["text", None],
        },
    ),
    Entry(
        lossfns.add_losses,
        {"parts": {"ce": (1.0, lossfns.causal_lm_loss)}},
        {
            "parts": [
                {},
                [],
                None,
                3,
                {"ce": 1.0},
                {"ce": (lossfns.causal_lm_loss, 1.0)},
                {"ce": ("1", lossfns.causal_lm_loss)},
            ]
        },
    ),
    Entry(
        lossfns.with_aux_loss,
        {"loss": lossfns.causal_lm_loss, "field": "aux", "weight": 0.1},
        {
            "shift": [shift for shift in NO_SHIFT if shift is not None],  # None is the loss's own
            "field": ["other", None],
            "weight": ["text", None],
            "loss": ["text", None],
        },
        called=lambda loss: loss({"logits": LOGITS, "aux": torch.tensor(1.0)}, LABELS),
    ),
    Entry(lossfns.hidden_states, {"model": Causal()}, {"model": [None, "text", nn.Linear(2, 2)]}),
    Entry(
        lossfns.precompute_reference_log_probs,
        {
            "model": Causal(),
            "dataset": [{"chosen": [1, 2], "rejected": [1, 3]}],
            "collator": collators.stack_pairs(
                lambda rows: {"input_ids": torch.tensor(rows), "labels": torch.tensor(rows)}, shift=1
            ),
        },
        {
            "batch_size": NO_COUNT,
            "shift": NO_SHIFT,
            "dataset": [[{"chosen": [1, 2]}], [[1, 2]], 3],
            "collator": [None, "text"],
        },
    ),
]

PAIR = {"chosen": LOG_PROBS, "rejected": LOG_PROBS}
REFERENCE = {"reference_chosen": LOG_PROBS, "reference_rejected": LOG_PROBS}
TOKENS = {"chosen_tokens": -LOG_PROBS, "rejected_tokens": -LOG_PROBS}
REAL = {"prediction": LOG_PROBS, "target": LOG_PROBS}
ROW_PAIR = {"log_p": ROWS.log_softmax(-1), "log_q": ROWS.log_softmax(-1)}

TERMS = [
    Entry(
        lossfns.smoothed_cross_entropy,
        {"log_prob": LOG_PROBS, "log_normalizer": LOG_PROBS, "mean_logit": LOG_PROBS},
        {"label_smoothing": NO_CHANCE},
    ),
    Entry(lossfns.focal, {"log_prob": LOG_PROBS}, {"gamma": [-1.0, NAN, "text", None]}),
    Entry(lossfns.poly1, {"log_prob": LOG_PROBS}, {"epsilon": [-1.1, NAN, "text", None]}),
    Entry(
        lossfns.asymmetric,
        {"log_prob": LOG_PROBS, "outcome": LOG_PROBS > -0.7},
        {"gamma_pos": [-1.0, NAN], "gamma_neg": [-1.0, NAN], "clip": [-0.1, 1.0, NAN, "text", None]},
    ),
    Entry(lossfns.eaft, {"log_prob": LOG_PROBS, "entropy": -LOG_PROBS}, {"alpha": NEGATIVE, "scale": NOT_POSITIVE}),
    Entry(
        lossfns.policy_gradient,
        {"log_prob": LOG_PROBS, "old_log_prob": LOG_PROBS, "advantages": LOG_PROBS},
        {"clip_range": [0.0, 1.0, -1.0, NAN, "text", None]},
    ),
    Entry(lossfns.huber, REAL, {"delta": NOT_POSITIVE}),
    Entry(lossfns.quantile, REAL, {"q": [0.0, 1.0, NAN, "text", None]}),
    Entry(lossfns.dpo, PAIR | REFERENCE, {"beta": NOT_POSITIVE, "label_smoothing": NO_CHANCE}),
    Entry(lossfns.ipo, PAIR | REFERENCE | TOKENS, {"beta": NOT_POSITIVE}),
    Entry(lossfns.simpo, PAIR | TOKENS, {"beta": NOT_POSITIVE, "gamma": ["text", None]}),
    Entry(lossfns.orpo, PAIR | TOKENS, {"weight": ["text", None]}),
    Entry(lossfns.cpo, PAIR | {"chosen_tokens": -LOG_PROBS}, {"beta": NOT_POSITIVE}),
    Entry(
        lossfns.kto,
        {"log_ratio": LOG_PROBS, "desirable": LOG_PROBS > -0.7, "reference_point": 0.0},
        {"beta": NOT_POSITIVE, "reference_point": ["text", None]},
    ),
    Entry(lossfns.bradley_terry, PAIR, {"margin": ["text", None], "centering": ["text", None]}),
    Entry(lossfns.jensen_shannon, ROW_PAIR, {"beta": [0.0, 1.0, NAN, "text", None]}),
    Entry(
        partial(lossfns.class_weighted, lossfns.cross_entropy),
        {"weights": [1.0]},
        {"weights": ["abc", 1.0, [-1.0], [NAN]]},
        name="class_weighted",
    ),
    Entry(lossfns.token_weighted, {"term": lossfns.focal}, {"term": ["text", None, 3]}),
    Entry(
        lambda *, part: lossfns.weighted_sum(part),
        {"part": (1.0, lossfns.focal)},
        {
            "part": [
                1.0,
                (lossfns.focal, 1.0),
                ("1", lossfns.focal),
                (NAN, lossfns.focal),
                (INF, lossfns.focal),
                (1.0, "focal"),
            ]
        },
        name="weighted_sum",
    ),
]

BAD_IDS = ["abc", None, 3, [0.5], [True], ["a"], [2], [-1]]
WEIGHTS = [
    Entry(
        lossfns.class_counts, {"labels": [0, 1], "num_classes": 2}, {"labels": BAD_IDS, "num_classes": [1, *NO_COUNT]}
    ),
    Entry(
        lossfns.balanced_class_weights,
        {"labels": [0, 1], "num_classes": 2},
        {"labels": [[0], [], *BAD_IDS], "num_classes": [1, 3, *NO_COUNT]},
    ),
    Entry(
        lossfns.effective_number_weights,
        {"labels": [0, 1], "num_classes": 2},
        {"labels": [[0], [], *BAD_IDS], "beta": [-0.1, 1.0, NAN, "text", None]},
    ),
    Entry(
        lossfns.balanced_pos_weight,
        {"labels": [[1, 0], [0, 1]], "num_classes": 2},
        {
            "labels": [
                [[1, 0, 1], [0, 1, 0], [1, 1, 1], [0, 0, 0]],
                [[1], [0, 1]],
                [1, 0],
                [[2, 0]],
                [[NAN, 0.0]],
                [],
                3,
            ],
            "num_classes": [1, 3, 0, "2", None],
        },
    ),
    Entry(
        lossfns.ldam_margins,
        {"counts": [1, 2]},
        {"counts": [[0, 1], [-1, 1], [NAN], 3, "abc"], "max_margin": NOT_POSITIVE},
    ),
]


# --- collators --------------------------------------------------------------------------------------------------------


def returning(**batch: Any) -> Callable[[Any], dict[str, Any]]:
    return lambda rows: dict(batch)


PAIR_ROW = [{"chosen": [1], "rejected": [2]}]
NO_LABELS = [returning(labels=labels) for labels in (None, [1], LABELS.float(), LABELS[0], LABELS.bool())]


def wrapper(function: Callable[..., Any], bad: list[Any], rows: Any = (), **others: Any) -> Entry:
    good = {"collator": returning(labels=LABELS)} | others.pop("good", {})
    return Entry(function, good, {"collator": [*bad, None, "text"]} | others, called=lambda collate: collate(rows))


COLLATORS = [
    wrapper(collators.mask_first_label, NO_LABELS),
    wrapper(collators.keep_supervised_logits, NO_LABELS),
    wrapper(
        collators.mask_sequence_starts,
        [*NO_LABELS, returning(labels=LABELS), returning(labels=LABELS, position_ids=LABELS[0])],
        good={"collator": returning(labels=LABELS, position_ids=LABELS)},
    ),
    wrapper(
        collators.mask_missing, [*NO_LABELS[:2], returning(labels=LABELS)], good={"collator": returning(labels=FEW)}
    ),
    wrapper(
        collators.replace_labels,
        NO_LABELS[:3],
        good={"replacements": {3: 4}},
        replacements=[3, [3, 4], {3: 4.0}, {"3": 4}],
    ),
    wrapper(collators.count_sequences, NO_LABELS, good={"shift": 1}, shift=NO_SHIFT),
    wrapper(collators.count_pairs, [*NO_LABELS, returning(labels=LABELS[:1])], good={"shift": 1}, shift=NO_SHIFT),
    wrapper(collators.stack_pairs, NO_LABELS[1:], PAIR_ROW, good={"shift": 1}, shift=NO_SHIFT),
    wrapper(
        collators.pack_spans,
        [returning(), returning(start_positions=1, end_positions=2)],
        good={"collator": returning(input_ids=LABELS, start_positions=CLASSES[:2], end_positions=CLASSES[:2])},
    ),
    wrapper(
        collators.with_extras,
        [returning(), returning(labels=None)],
        [{"weights": 1.0}, {"weights": 2.0}],
        good={"names": ["weights"], "shift": 1},
        names=["weights", ["other"], [3], None],
        shift=NO_SHIFT,
    ),
    wrapper(
        collators.with_decoder_inputs,
        NO_LABELS,
        good={"model": SimpleNamespace(config=SimpleNamespace(decoder_start_token_id=0, pad_token_id=1))},
        model=[None, nn.Linear(2, 2), SimpleNamespace(config=SimpleNamespace(pad_token_id=1))],
    ),
    wrapper(
        collators.teacher_inputs,
        [returning(labels=LABELS)],
        [{}, {}],
        good={"collator": returning(labels=LABELS, input_ids=LABELS, attention_mask=LABELS), "shift": 1},
        shift=NO_SHIFT,
    ),
]


# --- reducers ---------------------------------------------------------------------------------------------------------


def token_reducer(function: Callable[..., Any], *, needs_labels: bool = True, **options: Any) -> Entry:
    shapes = [LABELS[:1], LABELS[:, :, None], torch.tensor(1), torch.zeros(2, 4, dtype=torch.int64)]
    bad = {
        "logits": BAD_LOGITS[:-4] if needs_labels else [x for x in BAD_LOGITS[:-4] if x is not LOGITS],
        "labels": BAD_LABELS if needs_labels else [*NO_TENSOR, *shapes, {}, {"labels": None}],
        "shift": NO_SHIFT,
        "source": NO_SOURCE,
        "select": [*NO_FUNCTION, lambda outputs: None],
    }
    good = {"logits": LOGITS, "labels": LABELS, "shift": 1} | options.pop("good", {})
    return Entry(function, good, {name: values for name, values in (bad | options).items() if values})


SPANS = {"logits": (ROWS, ROWS), "labels": None}
REDUCERS = [
    token_reducer(reducers.argmax, needs_labels=False),
    token_reducer(reducers.top_k, needs_labels=False, good={"k": 2}, k=[6, *NO_COUNT]),
    token_reducer(reducers.token_log_probs),
    token_reducer(reducers.label_rank),
    token_reducer(reducers.sample_sums, top_k=[*NO_COUNT, [1, 0], [1.5], True]),
    token_reducer(reducers.calibration_bins, bins=NO_COUNT),
    token_reducer(reducers.confusion_counts, source=[]),
    token_reducer(
        reducers.answer_logits,
        good={"token_ids": [0, 1]},
        token_ids=[[], [5], [-1], [0.5], ["a"], [0, 0], None, 3, "ab"],
        source=[],
    ),
    Entry(
        reducers.text_lengths,
        {"logits": (), "labels": LABELS, "lengths": {"bytes": torch.arange(5)}, "shift": 1},
        {
            "labels": [*NO_TENSOR, None, CLASSES, LABELS.float(), LABELS + 1, LABELS - 1, {}],
            "lengths": [{}, {"bytes": [1, 2]}, {"bytes": torch.ones(5, 2)}, {"bytes": torch.arange(2)}],
            "shift": NO_SHIFT,
        },
    ),
    Entry(
        reducers.segmentation_counts,
        {"logits": IMAGES, "labels": PIXELS},
        {
            "logits": [*NO_TENSOR, None, PIXELS, ROWS, IMAGES[0], IMAGES[:0]],
            "labels": [*NO_TENSOR, None, PIXELS + 3, PIXELS - 1, PIXELS.float(), PIXELS.bool(), PIXELS[0], {}],
        },
    ),
    Entry(
        reducers.spans,
        SPANS,
        {
            "logits": [
                *NO_TENSOR[:2],
                None,
                ROWS,
                (ROWS,),
                (ROWS, ROWS[:2]),
                (LABELS, LABELS),
                (ROWS[:0],) * 2,
                (ROWS[:, :0],) * 2,
            ],
            "top_n": NO_COUNT,
            "max_length": NO_COUNT,
        },
    ),
    Entry(
        reducers.generated_ids,
        {"logits": LABELS, "labels": None},
        {"logits": [*NO_TENSOR, None, (), {}, LOGITS, CLASSES, LABELS > 0]},
    ),
    Entry(
        reducers.ctc_greedy,
        {"logits": LOGITS, "labels": {"labels": LABELS, "input_lengths": torch.tensor([3, 2])}},
        {
            "logits": [*NO_TENSOR, None, LABELS, ROWS, IMAGES],
            "blank": [-1, 5, "0", None],
            "labels": [{"input_lengths": torch.tensor([3])}, {"input_lengths": "text"}],
        },
    ),
    Entry(
        reducers.embeddings,
        {"logits": ROWS, "labels": None, "select": lambda outputs: outputs},
        {
            "select": [
                lambda outputs: (ROWS,),
                lambda outputs: LABELS,
                lambda outputs: LOGITS,
                lambda outputs: {"a": 1},
            ]
        },
    ),
    Entry(
        reducers.probabilities,
        {"logits": ROWS, "labels": CLASSES},
        {"logits": [*NO_TENSOR, None, (), LABELS, LOGITS, ROWS[:, :1]], "labels": [*NO_TENSOR, {}]},
    ),
    Entry(
        reducers.ordinal_ids,
        {"logits": ROWS, "labels": CLASSES},
        {"logits": [*NO_TENSOR, None, (), LABELS, LOGITS], "labels": [*NO_TENSOR, {}]},
    ),
    Entry(
        reducers.preference_rewards,
        {
            "logits": LOGITS,
            "labels": {"labels": PAIRS, "reference_chosen": torch.zeros(1), "reference_rejected": torch.zeros(1)},
            "shift": 1,
        },
        {
            "logits": BAD_LOGITS[:-4],
            "labels": [
                *NO_TENSOR,
                None,
                LABELS,
                PAIRS + 1,
                PAIRS.float(),
                {"labels": PAIRS, "reference_chosen": torch.zeros(1)},
                {"labels": PAIRS, "reference_chosen": torch.zeros(1, 1), "reference_rejected": torch.zeros(1, 1)},
                {"labels": PAIRS, "reference_chosen": torch.zeros(2), "reference_rejected": torch.zeros(2)},
                {"labels": PAIRS, "reference_chosen": [0.0], "reference_rejected": [0.0]},
            ],
            "shift": NO_SHIFT,
            "beta": NOT_POSITIVE,
            "source": NO_SOURCE,
        },
    ),
    Entry(
        reducers.reward_scores,
        {"logits": ROWS[:2, :1], "labels": torch.tensor([0])},
        {
            "logits": [*NO_TENSOR, None, LABELS, ROWS],
            "labels": [*NO_TENSOR, None, torch.tensor([0, 0]), torch.tensor([[0]]), {}],
        },
    ),
    Entry(
        reducers.pair_margins,
        {"logits": ROWS[:2, :1], "labels": torch.tensor([0])},
        {
            "logits": [*NO_TENSOR, None, LABELS, ROWS],
            "labels": [*NO_TENSOR, None, torch.tensor([0, 0]), torch.tensor([[0]]), {}],
            "rewards": ["text", None, lambda x, y: x, lambda x, y: {"pairs": y}],
        },
    ),
    Entry(
        lambda reducer: reducers.combine(ids=reducer)(ROWS, CLASSES),
        {"reducer": reducers.argmax},
        {
            "reducer": [
                "text",
                None,
                lambda x, y: x.mean(),
                lambda x, y: x > 0,
                lambda x, y: None,
                lambda x, y: x[:2],
                lambda x, y: x.half(),
            ]
        },
        name="combine",
    ),
    Entry(
        reducers.token_bytes,
        {"tokenizer": SimpleNamespace(get_vocab=lambda: {"\u0120a": 0}, all_special_ids=[])},
        {"tokenizer": [SimpleNamespace(get_vocab=lambda: {"##a": 0}, all_special_ids=[])]},
    ),
]


# --- metrics ----------------------------------------------------------------------------------------------------------


def evaluation(predictions: Any, labels: Any) -> SimpleNamespace:
    return SimpleNamespace(predictions=predictions, label_ids=labels)


TRUE, IDS = np.array([0, 1, -100]), np.array([0, 1, 1])
CLASSIFIED = evaluation(IDS, TRUE)
LETTERS = SimpleNamespace(batch_decode=lambda rows, **_: [bytes(row).decode() for row in rows])
TEXT = np.array([[*b"a text of five words"]])
BINS = {name: [[1, 3]] for name in ("bin_labels", "bin_confidence", "bin_correct")}
SUMS = {name: np.ones(3) for name in ("nll", "tokens", "correct", "all_correct")}
CHANCES = np.full((3, 2), 0.5)
VECTORS = {"queries": np.eye(3), "documents": np.eye(3)}
EXAMPLES = [{"id": 7, "context": "It rains.", "answers": {"text": ["rains"]}}]
FEATURES = [{"example_id": 7, "offset_mapping": [None, (0, 2), (3, 8), (8, 9)]}]
SPAN = {"starts": np.array([[2]]), "ends": np.array([[2]]), "scores": np.array([[1.0]]), "null_scores": np.zeros(1)}
REWARDS = {"reward_chosen": np.ones(3), "reward_rejected": np.zeros(3), "pairs": np.ones(3)}
TAGS = {0: "O", 1: "B-PER", 2: "I-PER"}
NO_KS = [(0,), (-1,), (1.5,), ("1",)]
NO_METRIC = [None, "text", 3, lambda evaluated: {}]
NO_DRAWS = [1, *NO_COUNT, NAN, True, [2]]
NO_SEED = [-1, 1.5, NAN, "abc", None, True, [1]]
NO_UNIT = ["ab", 3, {"a": 1}, {"a"}, [1, "1", 2], np.array(1), np.zeros((3, 2))]
NO_TOKENIZER = [None, "text", 3, SimpleNamespace(batch_decode=3), SimpleNamespace(decode=print), type(LETTERS)]
NO_DIRECTION = ["yes", 1, NAN]

# A metric, an evaluation, and what cannot stand for its predictions and for its labels.
EVALUATIONS: dict[str, tuple[Callable[..., Any], Any, Any, list[Any], list[Any]]] = {
    "classification": (
        metrics.classification(2),
        IDS,
        TRUE,
        [
            IDS + 1,
            IDS.astype(float),
            IDS[:, None],
            {},
            {"probabilities": CHANCES * NAN},
            {"probabilities": CHANCES * 2},
            {"confusion": -np.ones((3, 4))},
        ],
        [TRUE + 1, TRUE.astype(float), TRUE > 0, TRUE[:, None]],
    ),
    "multi_label": (
        metrics.multi_label(2),
        {"probabilities": CHANCES},
        np.ones((3, 2), np.int64),
        [
            CHANCES,
            {},
            *({"probabilities": x} for x in (CHANCES * NAN, CHANCES * 4, CHANCES[:, :1], np.ones((3, 2), int))),
        ],
        [np.full((3, 2), 2), np.full((3, 2), 0.5), np.full((3, 2), NAN), np.ones((3, 3)), np.ones(3)],
    ),
    "regression": (
        metrics.regression(rank_correlation=True),
        np.arange(3.0),
        np.arange(3.0),
        [np.arange(3), {}, np.zeros((3, 3)), np.array(["a"] * 3)],
        [np.full(3, NAN), np.zeros((3, 2)), np.array(["a"] * 3)],
    ),
    "language_modeling": (
        metrics.language_modeling(),
        SUMS,
        np.zeros(3),
        [{}, IDS, SUMS | {"nll": np.ones((3, 2))}, {"nll": np.ones(3)}, {"a": SUMS, "b": SUMS}],
        [],
    ),
    "label_ranking": (metrics.label_ranking(), {"ranks": IDS}, np.zeros(3), [{}, IDS, {"ranks": IDS * 1.0}], []),
    "calibration": (
        metrics.calibration(),
        {name: np.ones((3, 2)) for name in ("bin_labels", "bin_confidence", "bin_correct")},
        np.zeros(3),
        [{}, IDS, {"bin_labels": np.ones((3, 2))}],
        [],
    ),
    "retrieval": (
        metrics.retrieval(),
        CHANCES,
        np.ones((3, 2)),
        [{}, CHANCES > 0, CHANCES[:, :1], CHANCES * NAN, CHANCES[:, 0]],
        [np.full((3, 2), -1), np.full((3, 2), NAN), np.full((3, 2), INF), np.ones(3)],
    ),
    "paired_retrieval": (
        metrics.paired_retrieval(),
        VECTORS,
        np.zeros(3),
        [{}, {"queries": np.eye(3)}, VECTORS | {"queries": np.eye(3)[:, :2]}],
        [],
    ),
    "preferences": (
        metrics.preferences(),
        REWARDS,
        np.zeros(3),
        [{}, IDS, {name: x[:, None] for name, x in REWARDS.items()}],
        [],
    ),
    "entity_f1": (
        metrics.entity_f1(TAGS, scheme="IOB2"),
        np.array([[1, 2]]),
        np.array([[1, -100]]),
        [np.array([[3, 0]]), np.array([[1.0, 0]]), {}],
        [np.array([1]), np.array([[3, 0]])],
    ),
    "segmentation": (
        metrics.segmentation(2),
        np.zeros((1, 2, 2), int),
        np.zeros((1, 2, 2), int),
        [np.full((1, 2, 2), 2), np.zeros((1, 2, 3), int)],
        [np.full((1, 2, 2), 2)],
    ),
    "extractive_qa": (
        metrics.extractive_qa(EXAMPLES, FEATURES),
        SPAN,
        np.zeros((1, 2)),
        [
            {},
            SPAN | {"starts": np.array([2])},
            SPAN | {"scores": np.ones((1, 2))},
            SPAN | {"null_scores": np.zeros((1, 1))},
        ],
        [],
    ),
    **{
        function.__name__: (
            function(LETTERS),
            {"generated": TEXT},
            TEXT,
            [TEXT * 1.0, TEXT[:, :3], {"generated": TEXT[0]}],
            [TEXT * 1.0, TEXT[0], (TEXT, TEXT)],
        )
        for function in (metrics.text_match, metrics.translation, metrics.summarization, metrics.transcription)
    },
    "glue": (metrics.glue("rte"), IDS, TRUE, [IDS + 1], [TRUE + 1]),
    "by_group": (metrics.by_group(metrics.classification(2), "aab"), IDS, TRUE, [IDS + 1], [TRUE + 1]),
    "bootstrap": (metrics.bootstrap(metrics.classification(2), n=5), IDS, TRUE, [IDS + 1], [TRUE + 1]),
    "build": (metrics.build(metrics.classification(2), num_samples=3), IDS, TRUE, [IDS + 1], [TRUE + 1]),
    "with_labels_from": (
        metrics.with_labels_from(metrics.classification(2), "answers"),
        {"ids": IDS, "answers": TRUE},
        TRUE,
        [{"ids": IDS}, IDS],
        [],
    ),
    "by_dataset": (
        metrics.by_dataset(metrics.build(metrics.classification(2), num_samples=3)),
        IDS,
        TRUE,
        [IDS + 1],
        [TRUE + 1],
    ),
    "from_sklearn": (
        metrics.from_sklearn(np.dot, kind="ids", greater_is_better=None),
        IDS,
        TRUE,
        [IDS * 1.0, IDS[:, None]],
        [(TRUE, TRUE)],
    ),
}

NAMES = {"num_classes": [0, -1, 2.5, "2", True, [2], None], "id2label": [["a", "b"], {0: "a", 1: "b"}, 3]}
BUILDERS = [
    Entry(
        metrics.classification,
        {"num_classes": 2},
        NAMES | {"average": ["other", None, 3, ["macro", 3]], "pos_label": [2, "other", None]},
    ),
    Entry(
        metrics.multi_label,
        {"num_classes": 2},
        NAMES | {"average": ["weighted", None], "threshold": [-0.1, 1.1, NAN, [0.5] * 3, [[0.5], []], "text", None]},
    ),
    Entry(metrics.segmentation, {"num_classes": 2}, NAMES),
    Entry(
        metrics.classification,
        {"id2label": {0: "a"}},
        {"id2label": [{}, {1: "a"}, {0: "a", 1: "a"}, {0: "a", "0": "b"}, {0.5: "a"}, {"x": "a"}, ["a"], 3, None]},
        name="classification(id2label)",
    ),
    Entry(metrics.label_ranking, {}, {"hits": NO_KS}),
    Entry(metrics.retrieval, {}, {"ks": NO_KS}),
    Entry(metrics.paired_retrieval, {}, {"ks": NO_KS}),
    Entry(
        metrics.entity_f1,
        {"id2label": TAGS, "scheme": "IOB2"},
        {"id2label": [{}, {0: "O"}, {0: "O", 1: "X-A"}, {0: "", 1: "O"}, ["O"], None], "scheme": ["other", None, 3]},
    ),
    Entry(
        metrics.extractive_qa,
        {"examples": EXAMPLES, "features": FEATURES},
        {
            "examples": [
                *([], [3], "text"),
                *([{**EXAMPLES[0], "answers": answers}] for answers in (["a"], None, {"texts": ["a"]})),
                *([{**EXAMPLES[0], "answers": {"text": answers}}] for answers in ("rains", None, 3, [3])),
                [{**EXAMPLES[0], "context": None}],
                *([{key: EXAMPLES[0][key] for key in EXAMPLES[0] if key != name}] for name in EXAMPLES[0]),
            ],
            "features": [
                *([], [3], "text"),
                *([{**FEATURES[0], "offset_mapping": offsets}] for offsets in ([3], [(1, 2, 3)], ["ab"])),
                *([{key: FEATURES[0][key] for key in FEATURES[0] if key != name}] for name in FEATURES[0]),
                *([{**FEATURES[0], "start_positions": end, "end_positions": end}] for end in ("a", None, [1, 2])),
                [{**FEATURES[0], "start_positions": 1, "end_positions": [1, 2]}],
            ],
            "null_threshold": [NAN],
        },
    ),
    Entry(metrics.glue, {"task": "rte"}, {"task": ["other", None, 3]}),
    Entry(
        metrics.by_group,
        {"metric": metrics.classification(2), "groups": "aab"},
        {"metric": NO_METRIC, "groups": [[], None, *NO_UNIT[1:]], "labels": [[1], 3, "abc", [[1], ["a"], [2]]]},
    ),
    Entry(
        metrics.bootstrap,
        {"metric": metrics.classification(2), "n": 3},
        {"metric": NO_METRIC, "n": NO_DRAWS, "unit": NO_UNIT[1:], "seed": NO_SEED},
    ),
    Entry(
        lambda **given: metrics.bootstrap(metrics.classification(2), n=3, **given)(CLASSIFIED),
        {},
        {"unit": ["ab", [1] * 4]},
        name="bootstrap(unit)",
    ),
    Entry(
        metrics.compare,
        {"metric": metrics.classification(2), "first": CLASSIFIED, "second": CLASSIFIED, "n": 3},
        {
            "metric": NO_METRIC,
            "second": [None, evaluation(IDS[:2], TRUE[:2]), evaluation(IDS, 1 - TRUE)],
            "n": NO_DRAWS,
            "unit": NO_UNIT,
            "seed": NO_SEED,
        },
    ),
    Entry(
        lambda *, metric: metrics.by_dataset(metric),
        {"metric": metrics.build(metrics.classification(2), num_samples=3)},
        {"metric": [*NO_METRIC, metrics.classification(2)]},
        name="by_dataset",
    ),
    Entry(
        metrics.with_labels_from,
        {"metric": metrics.classification(2), "column": "answers"},
        {"metric": NO_METRIC},
    ),
    Entry(
        metrics.Metric,
        {"statistics": dict, "score": dict, "higher_is_better": {"error": False}},
        {
            "higher_is_better": [{"error": "yes"}, {"error": 1}, {"loss": False}],
            "num_samples": [0, -1, 2.5, "3", True],
        },
    ),
    Entry(
        lambda metric, num_samples=None: metrics.build(metric, num_samples=num_samples),
        {"metric": metrics.classification(2)},
        {"metric": NO_METRIC, "num_samples": [0, -1, 2.5, "3"]},
        name="build",
    ),
    Entry(
        metrics.best_model_kwargs,
        {"key": "perplexity"},
        {"key": ["other", "entropy"], "metric": NO_METRIC[1:]},
    ),
    *(
        Entry(function, {"tokenizer": LETTERS}, {"tokenizer": NO_TOKENIZER, **options})
        for function, options in (
            (metrics.text_match, {}),
            (metrics.translation, {"tokenize": ["typo", None, 3, ["13a"]]}),
            (metrics.summarization, {}),
            (metrics.transcription, {}),
        )
    ),
    Entry(
        metrics.decode,
        {"ids": TEXT, "tokenizer": LETTERS},
        {"ids": [[[1]], TEXT[0], TEXT * 1.0, None], "tokenizer": NO_TOKENIZER},
    ),
    Entry(
        metrics.tuned_thresholds,
        {"probabilities": CHANCES, "labels": np.ones((3, 2))},
        {
            "probabilities": [CHANCES * NAN, CHANCES * 4, CHANCES[:, :1], [[0.1], [0.1, 0.2]], "text"],
            "labels": [np.ones(3), np.full((3, 2), 2), "text"],
        },
    ),
    Entry(
        metrics.from_sklearn,
        {"function": max, "kind": "ids", "greater_is_better": True},
        {
            "function": [lambda x, y: 1.0, None, 3, torchmetrics.MeanAbsoluteError],
            "kind": ["other", None],
            "greater_is_better": NO_DIRECTION,
        },
    ),
    Entry(
        metrics.from_evaluate,
        {
            "module": SimpleNamespace(features={}, add_batch=print, compute=print),
            "kind": "ids",
            "higher_is_better": {"a": True},
        },
        {
            "module": ["nowhere.py", 3, None, SimpleNamespace(compute=print)],
            "kind": ["other", None],
            "higher_is_better": [{"a": direction} for direction in NO_DIRECTION],
        },
    ),
    Entry(
        metrics.from_torchmetrics,
        {"module": torchmetrics.MeanAbsoluteError(), "kind": "scores"},
        {
            "module": [3, None, torchmetrics.MeanAbsoluteError, torchmetrics.MetricCollection([])],
            "kind": ["other", None],
            "greater_is_better": NO_DIRECTION,
        },
    ),
    Entry(
        metrics.to_evaluate,
        {"metric": metrics.classification(2), "kind": "ids"},
        {"metric": NO_METRIC, "kind": ["other", None]},
    ),
    Entry(
        testing.metric_rules,
        {"predictions": np.arange(4), "labels": np.arange(4)},
        {"predictions": [3, "text", np.arange(3)], "labels": [3, None]},
    ),
    Entry(
        plots.reliability_diagram,
        {"columns": BINS},
        {
            "columns": [
                {name: np.ones((1, 0)) for name in BINS},
                None,
                "text",
                {},
                {"x": 1},
                BINS | {"bin_correct": 1},
                BINS | {"bin_correct": "text"},
            ]
        },
    ),
    Entry(
        plots.group_bars,
        {"scores": {"accuracy/de": 0.5}, "key": "accuracy"},
        {"scores": [{}, {"accuracy/de": "text"}], "key": ["other"]},
    ),
]

ENTRIES = [*LOSSES, *TERMS, *WEIGHTS, *COLLATORS, *REDUCERS, *BUILDERS]
# Nothing to choose but tensors, or another library's object; their tensors are those of a loss.
WITHOUT_OPTIONS = {
    *(
        "cross_entropy",
        "z_loss",
        "dft",
        "entropy_bonus",
        "unlikelihood",
        "teacher_divergence",
        "gaussian_nll",
        "poisson_nll",
    ),
    *("mse", "mae", "log_cosh", "forward_kl", "reverse_kl", "total_variation", "coral_levels", "corn_levels"),
    *("batch_hard", "semi_hard", "regression", "watch"),
}
BAD = [(entry, name, value) for entry in ENTRIES for name, values in entry.bad.items() for value in values]


def described(value: Any) -> str:
    return f"{tuple(value.shape)}{value.dtype}" if isinstance(value, (torch.Tensor, np.ndarray)) else repr(value)[:40]


def assert_refused(call: Callable[[], Any]) -> None:
    """In words of ours: an error that comes out of another library, or out of Python, doesn't say what to do."""
    with pytest.raises(PROMISED) as caught:
        call()
    assert len(str(caught.value)) > 10, "an error says what was wrong"
    if "meta tensor" not in str(caught.value):  # of a tensor without values torch says all there is to say
        origin = caught.traceback[-1]
        assert origin.frame.f_globals["__name__"].partition(".")[0] in ("lossfns", "reducers", "metrics"), origin
        assert str(origin.statement).strip().startswith("raise "), origin


def raising(error: BaseException) -> Callable[[], Any]:
    def call():
        raise error

    return call


@pytest.mark.parametrize(
    "error", [IndexError("list index out of range"), KeyError("labels"), AttributeError("no shape")]
)
def test_an_error_that_nobody_thought_of_is_no_refusal(error):
    with pytest.raises(type(error)):
        assert_refused(raising(error))


@pytest.mark.parametrize("call", [lambda: 1.0, raising(ValueError())])
def test_neither_is_a_number_or_an_error_without_words(call):
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        assert_refused(call)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.title)
def test_the_call_works(entry):
    """Without it every value would be refused."""
    entry()


@pytest.mark.parametrize(("entry", "name", "value"), BAD, ids=[f"{e.title}-{n}-{described(v)}" for e, n, v in BAD])
def test_bad_values_are_refused(entry, name, value):
    assert_refused(lambda: entry(**{name: value}))


WORDLESS = {"an index": lambda: [][operator.index(2.5)], "a conversion": lambda: np.asarray("text", np.float64)}


@pytest.mark.parametrize("call", WORDLESS.values(), ids=WORDLESS)
def test_an_error_of_python_or_numpy_is_not_in_our_words(call):
    with pytest.raises(AssertionError):
        assert_refused(call)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.title)
def test_misspelt_options_are_refused(entry):
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        entry(lable_smoothing=0.1)


COMMON = {
    "no evaluation": lambda given: None,
    "no predictions": lambda given: evaluation(None, given.label_ids),
    "no labels": lambda given: evaluation(given.predictions, None),
    "lists": lambda given: evaluation([1, 2], given.label_ids),
    "texts": lambda given: evaluation("abc", given.label_ids),
    "a number": lambda given: evaluation(np.array(1), given.label_ids),
    "too many rows": lambda given: evaluation(given.predictions, np.concatenate([given.label_ids] * 2)),
    "unequal batches": lambda given: evaluation([given.predictions], [given.label_ids] * 2),
    "no batch": lambda given: evaluation([], []),
}


@pytest.mark.parametrize(("metric", "what"), list(itertools.product(EVALUATIONS, COMMON)))
def test_what_is_no_evaluation(metric, what):
    score, predictions, labels, *_ = EVALUATIONS[metric]
    assert_refused(lambda: score(COMMON[what](evaluation(predictions, labels))))


@pytest.mark.parametrize("metric", EVALUATIONS)
def test_bad_evaluations_are_refused_and_forgotten(metric):
    score, predictions, labels, bad_predictions, bad_labels = EVALUATIONS[metric]
    before = score(evaluation(predictions, labels))
    for bad in bad_predictions:
        assert_refused(lambda bad=bad: score(evaluation(bad, labels)))
    for bad in bad_labels:
        assert_refused(lambda bad=bad: score(evaluation(predictions, bad)))
    np.testing.assert_equal(score(evaluation(predictions, labels)), before)


def spoilt(predictions: Any, place: str, values: list[float]) -> Any:
    """A copy whose first numbers in one place are others."""
    copied = mapped(np.copy, predictions)
    found = dict(leaves(copied))[place].reshape(-1)
    found[: len(values)] = values[: len(found)]
    return copied


FLOATS = [
    (metric, place)
    for metric, (_, predictions, *_) in EVALUATIONS.items()
    for place, leaf in leaves(predictions)
    if leaf.dtype.kind == "f"
]


@pytest.mark.parametrize("values", [[INF], [-INF], [NAN], [INF, -INF], [INF, NAN]], ids=str)
@pytest.mark.parametrize(("metric", "place"), FLOATS)
def test_what_is_not_finite_is_refused_or_scored_without_a_warning(metric, place, values):
    score, predictions, labels, *_ = EVALUATIONS[metric]
    good, bad = evaluation(predictions, labels), evaluation(spoilt(predictions, place, values), labels)
    groups = [place % 2 for place in range(len(labels))]
    calls = [
        lambda: score(bad),
        lambda: score(evaluation([bad.predictions] * 2, [labels] * 2)),
        lambda: metrics.by_group(score, groups)(bad),
        lambda: metrics.bootstrap(score, n=5)(bad),
        lambda: metrics.compare(score, bad, good, n=5),
    ]
    for call in calls:
        with warnings.catch_warnings(), contextlib.suppress(*PROMISED):
            warnings.simplefilter("error")
            call()


@pytest.mark.parametrize("package", [lossfns, reducers, metrics, collators], ids=lambda package: package.__name__)
def test_every_function_is_here(package):
    functions = {name for name in package.__all__ if inspect.isfunction(getattr(package, name))}
    here = {entry.title for entry in ENTRIES} | {*EVALUATIONS} | WITHOUT_OPTIONS
    assert functions - here == set()
