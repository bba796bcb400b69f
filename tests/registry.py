"""Everything that the packages export, once: where docs/ shows it, how it is called, and what it must refuse.

A new function joins with one `Export` here; `tests/test_registry.py` fails until it does. From its entry follow the
checks of `lossfns.testing` and its siblings for every way to call it, and the bad inputs of `tests/robustness`: those
of `tests/bad_values.py`, by the names of the arguments, and those of the entry. An exception to a rule has its reason
in `EXCEPTIONS`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torchmetrics
from sklearn.metrics import f1_score
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

import lossfns
import metrics
import reducers
from lossfns import collators
from lossfns.testing.tasks import Task
from metrics import plots
from metrics.testing import metric_rules
from tests.bad_values import INF, NAN, NOT_TENSORS, UNITS, bad_ids, bad_predictions, refused
from tests.kit import tasks
from tests.metrics.test_question_answering import EXAMPLES, FEATURES, spans_of
from tests.metrics.test_text import TOKENIZER


@dataclass(frozen=True)
class Entry:
    """One way to call something exported, and the options of the rules that it is checked with."""

    name: str
    function: Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def label(self) -> str:
        return f"{self.name} {self.note}".strip()

    @property
    def skip(self) -> dict[str, str]:
        return {
            rule: reasons[self.label]
            for _, (rules, reasons) in EXCEPTIONS.items()
            if self.label in reasons
            for rule in rules
        }


@dataclass(frozen=True)
class Way:
    """A call of an exported function for the rules: with options bound to it, or by another function."""

    options: Mapping[str, Any]
    note: str
    function: Callable[..., Any] | None
    bound: Mapping[str, Any]


def way(options: Any = None, note: str = "", function: Callable[..., Any] | None = None, **bound: Any) -> Way:
    return Way(options or {}, note, function, bound)


@dataclass(frozen=True)
class Evaluation:
    """A metric, an evaluation that it scores, and further values that it must refuse as predictions and labels."""

    metric: Callable[..., Any]
    predictions: Any
    labels: Any
    bad_predictions: list[Any] = field(default_factory=list)
    bad_labels: list[Any] = field(default_factory=list)

    @property
    def all_bad_predictions(self) -> list[Any]:
        return [*bad_predictions(self.predictions), *self.bad_predictions]


@dataclass(frozen=True)
class Export:
    """An exported function, the page of docs/ that shows it, and what its tests need."""

    function: Any
    ways: tuple[Way, ...]
    page: str
    works: Mapping[str, Any] | None  # the keyword arguments of a call that works, None where no input can be bad
    evaluation: Evaluation | None
    why: str  # why the rules for losses, terms, reducers and metrics do not apply
    accepts: tuple[str, ...]  # arguments that may be what their name would rule out
    called: Callable[[Any], Any] | None  # what is done with the result, where the error comes no sooner
    name: str
    bad: Mapping[str, list[Any]]  # further bad values per argument, beyond those that its name implies

    @property
    def entries(self) -> list[Entry]:
        def called_by(way: Way) -> Callable[..., Any]:
            return way.function or (partial(self.function, **way.bound) if way.bound else self.function)

        return [Entry(self.name, called_by(way), way.options, way.note) for way in self.ways]

    @property
    def all_bad(self) -> dict[str, list[Any]]:
        implied = {k: v for k, v in refused(self.function, self.works or {}).items() if k not in self.accepts}
        return {name: [*implied.get(name, ()), *self.bad.get(name, ())] for name in {**implied, **self.bad}}

    def __call__(self, **changed: Any) -> Any:
        result = self.function(**{**(self.works or {}), **changed})
        return self.called(result) if self.called else result


def export(
    function: Any,
    /,
    *ways: Way,
    page: str = "",
    works: Mapping[str, Any] | None = None,
    evaluation: Evaluation | None = None,
    why: str = "",
    accepts: tuple[str, ...] = (),
    called: Callable[[Any], Any] | None = None,
    name: str = "",
    **bad: list[Any],
) -> Export:
    name = name or function.__name__
    return Export(function, ways, page, works, evaluation, why, accepts, called, name, bad)


def on_page(page: str, *exports: Export) -> list[Export]:
    """Return the exports, of which those that name no page are on `page`."""
    return [replace(export, page=export.page or page) for export in exports]


def entries(exports: list[Export]) -> list[Entry]:
    return [entry for export in exports for entry in export.entries]


# --- inputs ----------------------------------------------------------------------------------------------------------

LOGITS = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([[0, 1, 2], [3, -100, 4]])
ROWS, IDS = LOGITS[0], torch.tensor([0, -100, 4])
REALS = LOGITS[..., 0]
PAIRED = torch.stack([LABELS[:1], LABELS[1:]], -1)
IMAGE, PIXELS = torch.randn(1, 3, 2, 2), torch.zeros(1, 4, 4, dtype=torch.int64)
LOG_PROBS = torch.tensor([-0.5, -1.0])
TOKENS = {"outputs": LOGITS, "labels": LABELS}
SAMPLES = {"outputs": ROWS, "labels": IDS}
SOFT = torch.full((3, 5), 0.2)

# --- losses ----------------------------------------------------------------------------------------------------------

CAUSAL = {"task": "causal_lm"}
CLASSES = {"task": "classification"}
MULTI_LABEL = {"task": "multi_label"}
WEIGHTS = torch.linspace(0.5, 2.0, 7)
SEQUENCES = {
    "task": "causal_lm",
    "extras": {"sequence_ids": torch.zeros_like},  # what count_sequences adds: each row is one
    "count": lambda labels: int((labels[:, 1:] != -100).any(1).sum()),
}
IMAGES = {"task": tasks.IMAGES}
VIEWS = {"task": tasks.VIEWS}
COMPLETIONS = {"task": tasks.COMPLETIONS, "extras": tasks.REFERENCE}
TAUGHT = {"task": "causal_lm", "extras": tasks.TEACHER_LOGITS}
TAUGHT_IDS = {"task": "causal_lm", "extras": tasks.TEACHER_IDS}
TAUGHT_HERE = {"task": "causal_lm", "extras": tasks.TEACHER_INPUTS}
EMBEDDED = {"task": tasks.EMBEDDINGS}

BY_DIVERGENCE = [lossfns.forward_kl, lossfns.reverse_kl, lossfns.jensen_shannon, lossfns.total_variation]
BY_OBJECTIVE = [lossfns.dpo, lossfns.ipo, lossfns.simpo, lossfns.orpo, lossfns.cpo]
BOTH = lossfns.weighted_sum((0.5, lossfns.cross_entropy), (0.5, lossfns.teacher_divergence))
info_nce = partial(lossfns.info_nce_loss, select=tasks.QUERIES_AND_KEYS)
smoothed = partial(lossfns.classification_loss, label_smoothing=0.1)


def weighted(weights):
    return partial(lossfns.classification_loss, class_weights=weights)


def softened(outputs, labels, num_items_in_batch=None):
    """Compute `classification_loss` of distributions. The Trainer counts all classes of each sample."""
    known = labels != -100
    soft = torch.nn.functional.one_hot(labels.clamp(min=0), 7).double() * 0.9 + 0.1 / 7
    count = None if num_items_in_batch is None else torch.as_tensor(num_items_in_batch).sum() * 7
    return lossfns.classification_loss(outputs, soft.masked_fill(~known[:, None], -100), count)


class Causal(nn.Module):
    """A minimal language model."""

    def forward(self, input_ids, logits_to_keep=0):
        return torch.zeros(*input_ids.shape, 5)

    def get_decoder(self):
        return nn.Identity()

    def get_output_embeddings(self):
        return nn.Identity()


def taught(**columns: Any) -> dict[str, Any]:
    return {"labels": LABELS, **columns}


SOFT_LABELS = [SOFT * 2, SOFT * NAN, SOFT - 0.1, SOFT[..., :4]]
BEST_IDS = {"teacher_ids": LABELS[..., None] * 0, "teacher_log_probs": LOGITS[..., :1]}
FRAMES_OF = {"labels": torch.tensor([[1], [2]]), "input_lengths": torch.tensor([3, 3])}
NOT_LOSSES = {"loss": ["text", None]}
BAD_OBJECTIVES = ["text", None, lambda chosen: chosen.mean()]

LOSS_EXPORTS = on_page(
    "losses",
    export(
        lossfns.causal_lm_loss,
        way(CAUSAL),
        way(CAUSAL, "overwriting", overwrite_logits=True),
        way(SEQUENCES, "by sequences", normalize="sequences"),
        works=TOKENS,
    ),
    export(lossfns.masked_lm_loss, way({"task": "masked_lm"}), works=TOKENS),
    export(lossfns.seq2seq_lm_loss, way({"task": "seq2seq_lm"}), works=TOKENS),
    export(
        lossfns.token_classification_loss,
        way({"task": "token_classification"}),
        works=TOKENS,
        labels=[torch.full((2, 3, 5), 0.4)],
    ),
    export(
        lossfns.classification_loss,
        way(CLASSES),
        way(CLASSES | {"reweight": weighted}, "weighted", function=weighted(WEIGHTS)),
        way(CLASSES, "smoothed", function=smoothed),
        way(CLASSES, "by weights", function=partial(weighted(WEIGHTS), normalize="weights")),
        way(CLASSES, "adjusted", logit_adjustment=WEIGHTS),
        way(CLASSES, "with margins", margins=WEIGHTS),
        way(CLASSES, "soft", function=softened),
        works=SAMPLES,
        labels=SOFT_LABELS,
    ),
    export(
        lossfns.multi_label_loss,
        way(MULTI_LABEL),
        way(MULTI_LABEL, "weighted", pos_weight=WEIGHTS),
        way(MULTI_LABEL, "smoothed", label_smoothing=0.1),
        way(MULTI_LABEL, "focal", term=lossfns.focal),
        works={"outputs": ROWS, "labels": torch.ones(3, 5)},
        outputs=[ROWS[:, :4]],
        labels=[*NOT_TENSORS, None, torch.ones(3, 4), torch.full((3, 5), 2), torch.full((3, 5), NAN)],
        term=[lossfns.z_loss],
    ),
    export(
        lossfns.ordinal_loss,
        way(CLASSES),
        way(CLASSES, "of CORN", levels=lossfns.corn_levels),
        works=SAMPLES,
        labels=[IDS + 2],
        levels=["text", None, lambda labels, thresholds: torch.zeros(1), lambda labels, thresholds: labels],
        term=[lossfns.z_loss],
    ),
    export(
        lossfns.regression_loss,
        way({"task": "regression"}),
        way({"task": tasks.TARGETS}, "of several targets"),
        way({"task": tasks.VARIANCES}, "with variances", term=lossfns.gaussian_nll),
        works={"outputs": REALS, "labels": REALS},
        outputs=[REALS[:, 0]],
        labels=[*NOT_TENSORS, None, REALS * NAN, REALS * INF, REALS[:1], REALS.T, REALS + 1j, REALS[0, 0]],
        term=[lossfns.cross_entropy, lossfns.gaussian_nll, lambda prediction: prediction.mean()],
    ),
    export(
        partial(lossfns.regression_loss, term=lossfns.gaussian_nll),
        works={"outputs": REALS[:, :2], "labels": REALS[:, 0]},
        name="regression_loss(term=gaussian_nll)",
        outputs=[REALS, REALS[:, :1]],
        labels=[REALS, torch.tensor(1.0)],
    ),
    export(
        lossfns.question_answering_loss,
        way({"task": tasks.SPANS}),
        works={
            "outputs": {"start_logits": ROWS, "end_logits": ROWS},
            "labels": torch.tensor([[0, 1], [-100, 4], [2, 2]]),
        },
        outputs=[
            *(*NOT_TENSORS, None, ROWS, (ROWS,), (torch.tensor(1.0), ROWS, ROWS)),
            *({"start_logits": ROWS} | ends for ends in ({}, {"end_logits": None}, {"end_logits": ROWS[:2]})),
        ],
        labels=[IDS],
    ),
    export(
        lossfns.ctc_loss,
        way({"task": tasks.FRAMES}),
        way({"task": tasks.FRAMES, "extras": tasks.FRAME_COUNTS}, "of counted frames"),
        works={"outputs": LOGITS, "labels": FRAMES_OF | {"labels": torch.tensor([[1], [-100]])}},
        labels=[
            *(*NOT_TENSORS, None, torch.tensor([[1.0], [2.0]]), torch.tensor([1, 2])),
            *map(torch.tensor, ([[5], [1]], [[0], [1]], [[1, 1, 1], [2, 2, 2]])),
            *(FRAMES_OF | {"input_lengths": x} for x in ([3, 3], torch.tensor([4, 3]), torch.tensor([3]))),
            {"labels": torch.tensor([[1], [2]]), "lengths": torch.tensor([3, 3])},
        ],
        blank=[1, 0.5],
    ),
    export(
        lossfns.segmentation_loss,
        way(IMAGES),
        way(IMAGES, "with dice", dice=0.5),
        way({"task": tasks.COARSE_IMAGES}, "of coarse logits", dice=0.5),
        works={"outputs": IMAGE, "labels": PIXELS},
        accepts=("outputs", "labels"),
        outputs=[*NOT_TENSORS, None, PIXELS, ROWS, IMAGE[0], torch.randn(1, 3, 8, 8), IMAGE[..., :0]],
        labels=[*NOT_TENSORS, None, PIXELS + 3, PIXELS.float(), PIXELS[0], PIXELS.bool()],
    ),
    export(
        lossfns.clip_loss,
        way({"task": tasks.SIMILARITIES}),
        works={"outputs": {"logits_per_text": torch.eye(3)}, "labels": torch.arange(3)},
        accepts=("labels", "num_items_in_batch"),
        outputs=[
            *(*NOT_TENSORS, None, {}),
            *({"logits_per_text": x} for x in (ROWS, LABELS, LOGITS, torch.tensor(1.0))),
        ],
        labels=[*NOT_TENSORS, {}, torch.zeros(3), torch.arange(2), torch.zeros(3, 3, dtype=torch.int64)],
        num_items_in_batch=["3", [3], 1j],
    ),
    export(
        lossfns.info_nce_loss,
        way(VIEWS, function=info_nce),
        way(VIEWS, "both ways", function=partial(info_nce, symmetric=True)),
        works={"outputs": None, "labels": None, "select": lambda outputs: (ROWS, ROWS)},
        accepts=("num_items_in_batch",),
        select=[lambda outputs: ROWS, lambda outputs: (ROWS, ROWS[:2]), lambda outputs: (1, 2)],
        labels=[*NOT_TENSORS, {}, torch.zeros(3), torch.arange(2)],
    ),
    export(
        lossfns.triplet_loss,
        way(EMBEDDED),
        way(EMBEDDED, "of semi-hard triplets", mining=lossfns.semi_hard),
        works={"outputs": ROWS, "labels": torch.tensor([0, 0, 1])},
        accepts=("labels",),
        outputs=[LOGITS],
        labels=[*NOT_TENSORS, None, torch.zeros(3), torch.arange(2), torch.tensor(1)],
        mining=["text", None, lambda *_: torch.tensor(1.0), lambda distances, *_: distances],
    ),
    export(
        lossfns.multi_token_loss,
        way({"task": tasks.TWO_HEADS}, heads=("logits", "further"), weights=(1.0, 0.3)),
        works={"outputs": {"logits": LOGITS}, "labels": LABELS, "heads": ("logits",), "weights": (1.0,)},
        outputs=[*NOT_TENSORS, None, LOGITS, {}, {"logits": LABELS}],
        heads=["logits", (), ("other",), ("logits", "logits")],
        weights=[(), (1.0, 2.0), 1.0],
    ),
    export(
        lossfns.with_aux_loss,
        way({"task": tasks.ROUTED}, function=lossfns.with_aux_loss(lossfns.causal_lm_loss, "aux_loss", 0.1)),
        works={"loss": lossfns.causal_lm_loss, "field": "aux", "weight": 0.1},
        accepts=("shift",),
        called=lambda loss: loss({"logits": LOGITS, "aux": torch.tensor(1.0)}, LABELS),
        shift=[-1, 1.0, "1", True],
        field=["other", None],
        **NOT_LOSSES,
    ),
    export(
        lossfns.distillation_loss,
        *(way(TAUGHT, f"by {f.__name__}", divergence=f) for f in BY_DIVERGENCE),
        way(TAUGHT_IDS, "from the best ids", temperature=2.0),
        way(TAUGHT, "and cross-entropy", term=BOTH),
        way(TAUGHT_HERE, "from a model", teacher=tasks.Teacher(), temperature=2.0),
        page="distillation",
        works={"outputs": LOGITS, "labels": taught(teacher_logits=LOGITS)},
        labels=[
            *(*bad_ids(LABELS), LABELS),
            *(taught(teacher_logits=x) for x in ([1.0], LABELS, ROWS, LOGITS[:1], LOGITS[:, :1])),
            taught(teacher_ids=[1], teacher_log_probs=[1.0]),
            taught(teacher_ids=LABELS[..., None].abs() % 5),
            taught(teacher_ids=LABELS[..., None] * 0 + 9, teacher_log_probs=LOGITS[..., :1]),
            taught(**BEST_IDS, teacher_logits=LOGITS),
        ],
        divergence=["text", None, lambda p, q: p.sum(), lambda p, q: p, lambda p, q: 0.0],
    ),
    export(
        lossfns.preference_loss,
        *(way(COMPLETIONS, f"by {f.__name__}", objective=f) for f in BY_OBJECTIVE),
        page="preference",
        works={"outputs": LOGITS, "labels": PAIRED, "objective": lossfns.simpo},
        labels=[LABELS[:1], PAIRED[:, :, :1], IDS],
        num_items_in_batch=[3],
        objective=[*BAD_OBJECTIVES, lossfns.dpo, lambda chosen, unknown: chosen],
    ),
    export(
        lossfns.reward_loss,
        way({"task": tasks.REWARDS}),
        page="preference",
        works={"outputs": ROWS[:2, :1], "labels": torch.tensor([0])},
        accepts=("labels",),
        outputs=[ROWS, ROWS[:1, :1]],
        labels=[*NOT_TENSORS, None, torch.tensor([[0]]), torch.tensor(0), torch.tensor([0, 0])],
        objective=BAD_OBJECTIVES,
    ),
    export(
        lossfns.add_losses,
        way(
            CAUSAL,
            function=lossfns.add_losses(
                {"a": (0.7, lossfns.causal_lm_loss), "b": (0.3, partial(lossfns.causal_lm_loss, term=lossfns.focal))}
            ),
        ),
        way(
            CLASSES,
            "of two losses",
            function=lossfns.add_losses({"hard": (0.7, lossfns.classification_loss), "soft": (0.3, smoothed)}),
        ),
        works={"parts": {"ce": (1.0, lossfns.causal_lm_loss)}},
        parts=[{}, [], None, 3, *({"ce": x} for x in (1.0, (lossfns.focal, 1.0), ("1", lossfns.causal_lm_loss)))],
    ),
    export(
        lossfns.watch,
        way(
            CAUSAL, function=lossfns.watch(lossfns.causal_lm_loss, lossfns.TrainingMetrics(), token_accuracy="correct")
        ),
        page="training",
    ),
)

# --- terms -----------------------------------------------------------------------------------------------------------


def near_one(labels: torch.Tensor) -> torch.Tensor:
    """Return values between 0.5 and 1.5 that depend on the label."""
    return 1.0 + 0.5 * torch.sin(labels.double())


EXTRAS = {
    "token_weights": near_one,
    "negative": lambda labels: labels % 2,
    "old_log_prob": lambda labels: -near_one(labels),
    "advantages": near_one,
}


def extras(*names: str) -> dict[str, Any]:
    return {"extras": {name: EXTRAS[name] for name in names}}


LOG_PROB = {"log_prob": LOG_PROBS}
ERROR = {"prediction": LOG_PROBS, "target": LOG_PROBS}
ONCE = (way(),)
TERM_EXPORTS = on_page(
    "terms",
    export(lossfns.cross_entropy, *ONCE),
    export(
        lossfns.smoothed_cross_entropy,
        *ONCE,
        works={"log_prob": LOG_PROBS, "log_normalizer": LOG_PROBS, "mean_logit": LOG_PROBS},
    ),
    export(lossfns.focal, *ONCE, way(note="below 1", gamma=0.5), works=LOG_PROB),
    export(lossfns.poly1, *ONCE, works=LOG_PROB, epsilon=[-1.1, NAN]),
    export(lossfns.z_loss, *ONCE),
    export(lossfns.dft, *ONCE),
    export(lossfns.eaft, *ONCE, works=LOG_PROB | {"entropy": -LOG_PROBS}),
    export(lossfns.entropy_bonus, *ONCE),
    export(lossfns.unlikelihood, way(extras("negative"))),
    export(
        lossfns.policy_gradient,
        way(extras("old_log_prob", "advantages")),
        works={"log_prob": LOG_PROBS, "old_log_prob": LOG_PROBS, "advantages": LOG_PROBS},
    ),
    export(
        partial(lossfns.class_weighted, lossfns.cross_entropy),
        way(function=lossfns.class_weighted(lossfns.focal, WEIGHTS)),
        works={"weights": [1.0]},
        name="class_weighted",
        weights=["abc", 1.0, [-1.0], [NAN]],
    ),
    export(
        lossfns.token_weighted,
        way(extras("token_weights"), function=lossfns.token_weighted(lossfns.cross_entropy)),
        works={"term": lossfns.focal},
        accepts=("term",),
        term=["text", None, 3],
    ),
    export(
        lambda *, part: lossfns.weighted_sum(part),
        way(function=lossfns.weighted_sum((1.0, lossfns.focal), (1e-4, lossfns.z_loss))),
        works={"part": (1.0, lossfns.focal)},
        name="weighted_sum",
        part=[1.0, (lossfns.focal, 1.0), *((weight, lossfns.focal) for weight in ("1", NAN, INF)), (1.0, "focal")],
    ),
)
OUTCOME_EXPORTS = on_page(
    "terms",  # for multi_label_loss
    export(lossfns.asymmetric, *ONCE, works=LOG_PROB | {"outcome": LOG_PROBS > -0.7}, clip=[-0.1, 1.0, NAN]),
)
REAL_EXPORTS = on_page(
    "terms",  # for regression_loss
    export(lossfns.mse, *ONCE),
    export(lossfns.mae, *ONCE),
    export(lossfns.huber, *ONCE, works=ERROR),
    export(lossfns.log_cosh, *ONCE),
    export(lossfns.quantile, way(q=0.9), works=ERROR),
    export(lossfns.poisson_nll, *ONCE),
    export(lossfns.gaussian_nll, *ONCE),
)

# --- what losses take and data needs ---------------------------------------------------------------------------------

PAIR = {"chosen": LOG_PROBS, "rejected": LOG_PROBS}
REFERENCE = {"reference_chosen": LOG_PROBS, "reference_rejected": LOG_PROBS}
LENGTHS = {"chosen_tokens": -LOG_PROBS, "rejected_tokens": -LOG_PROBS}
DIVERGED = {"log_p": ROWS.log_softmax(-1), "log_q": ROWS.log_softmax(-1)}
OBJECTIVE, DIVERGENCE = "an objective over pairs", "a divergence of distillation_loss"
OPTION, LEVELS, MINING = "prepares an option", "levels of ordinal_loss", "mining of triplet_loss"
BAD_COUNTS = ["abc", None, 3, [0.5], [True], ["a"], [2], [-1]]
COUNTED = {"labels": [0, 1], "num_classes": 2}
PAIR_OF_ROWS = {"chosen": [1, 2], "rejected": [1, 3]}
OF_LABELS = {"logits": LOGITS, "labels": LABELS}

OPTION_EXPORTS = on_page(
    "losses",
    export(lossfns.dpo, page="preference", works=PAIR | REFERENCE, why=OBJECTIVE),
    export(lossfns.ipo, page="preference", works=PAIR | REFERENCE | LENGTHS, why=OBJECTIVE),
    export(lossfns.simpo, page="preference", works=PAIR | LENGTHS, accepts=("gamma",), why=OBJECTIVE),
    export(lossfns.orpo, page="preference", works=PAIR | LENGTHS, why=OBJECTIVE),
    export(lossfns.cpo, page="preference", works=PAIR | {"chosen_tokens": -LOG_PROBS}, why=OBJECTIVE),
    export(
        lossfns.kto,
        page="preference",
        works={"log_ratio": LOG_PROBS, "desirable": LOG_PROBS > -0.7, "reference_point": 0.0},
        why=OBJECTIVE,
    ),
    export(lossfns.bradley_terry, page="preference", works=PAIR, accepts=("margin",), why=OBJECTIVE),
    export(lossfns.forward_kl, page="distillation", why=DIVERGENCE),
    export(lossfns.reverse_kl, page="distillation", why=DIVERGENCE),
    export(lossfns.jensen_shannon, page="distillation", works=DIVERGED, why=DIVERGENCE, beta=[1.0]),
    export(lossfns.total_variation, page="distillation", why=DIVERGENCE),
    export(lossfns.teacher_divergence, page="distillation", why="a term of distillation_loss"),
    export(lossfns.coral_levels, why=LEVELS),
    export(lossfns.corn_levels, why=LEVELS),
    export(lossfns.batch_hard, why=MINING),
    export(lossfns.semi_hard, why=MINING),
    export(lossfns.class_counts, works=COUNTED, why=OPTION, labels=BAD_COUNTS, num_classes=[1]),
    export(
        lossfns.balanced_class_weights, works=COUNTED, why=OPTION, labels=[[0], [], *BAD_COUNTS], num_classes=[1, 3]
    ),
    export(
        lossfns.effective_number_weights,
        works=COUNTED,
        accepts=("beta",),
        why=OPTION,
        labels=[[0], [], *BAD_COUNTS],
        beta=[-0.1, 1.0, NAN],
    ),
    export(
        lossfns.balanced_pos_weight,
        works={"labels": [[1, 0], [0, 1]], "num_classes": 2},
        why=OPTION,
        labels=[[[1, 0, 1], [0, 1, 0], [1, 1, 1], [0, 0, 0]], [[1], [0, 1]], [1, 0], [[2, 0]], [[NAN, 0.0]], []],
        num_classes=[1, 3],
    ),
    export(lossfns.ldam_margins, works={"counts": [1, 2]}, why=OPTION, counts=[[0, 1], [-1, 1], [NAN], 3]),
    export(lossfns.Combined, page="terms", why="the type that weighted_sum, token_weighted and class_weighted return"),
    export(lossfns.TrainingMetrics, page="training", why="sums of what was trained on"),
    export(
        lossfns.token_statistics,
        page="terms",
        works=OF_LABELS,
        why="the kernel itself",
        fields=["log_prob", ("other",), ("rank", "rank"), None, 3],
        ignore_index=[None, "text", 1.5, [1]],
    ),
    export(
        lossfns.head_token_statistics,
        page="hidden_states",
        works={"hidden": LOGITS, "head": nn.Linear(5, 5), "labels": LABELS},
        accepts=("scale",),
        why="the kernel itself",
        hidden=[LABELS, LOGITS[:1], LOGITS[..., :3]],
        head=[nn.Linear(3, 5)],
        fields=["log_prob", ("other",), ("rank", "rank")],
        softcap=[0.0, -1.0, NAN],
    ),
    export(
        lossfns.hidden_states,
        page="hidden_states",
        works={"model": Causal()},
        why="a source of losses and reducers, needs a model",
        model=[None, "text", nn.Linear(2, 2)],
    ),
    export(lossfns.sequence_log_probs, page="preference", works=TOKENS, why="sums of the kernel, by row"),
    export(
        lossfns.precompute_reference_log_probs,
        page="preference",
        works={
            "model": Causal(),
            "dataset": [PAIR_OF_ROWS],
            "collator": collators.stack_pairs(
                lambda rows: {"input_ids": torch.tensor(rows), "labels": torch.tensor(rows)}, shift=1
            ),
        },
        accepts=("batch_size",),
        why="prepares a dataset",
        dataset=[[{"chosen": [1, 2]}], [[1, 2]]],
        batch_size=[0, -1],
    ),
)


# --- collators --------------------------------------------------------------------------------------------------------


def returning(**batch: Any) -> Callable[[Any], dict[str, Any]]:
    return lambda rows: dict(batch)


NOT_LABELS = [returning(labels=labels) for labels in (None, [1], LABELS.float(), LABELS[0], LABELS.bool())]
ENDS = {"start_positions": IDS[:2], "end_positions": IDS[:2]}
STARTS = {"decoder_start_token_id": 0, "pad_token_id": 1}


def model_of(**config: int) -> SimpleNamespace:
    return SimpleNamespace(config=SimpleNamespace(**config))


def collator(function: Callable[..., Any], bad: list[Any], rows: Any = (), works: Any = None, **others: Any) -> Export:
    """Return the entry of a wrapper of collators, which `bad` ones must not be given."""
    return export(
        function,
        works={"collator": returning(labels=LABELS)} | (works or {}),
        called=lambda collate: collate(rows),
        why="prepares batches",
        collator=[*bad, None, "text"],
        **others,
    )


SHIFTED = {"shift": 1}
COLLATOR_EXPORTS = on_page(
    "collators",
    collator(collators.mask_first_label, NOT_LABELS),
    collator(collators.keep_supervised_logits, NOT_LABELS),
    collator(
        collators.mask_sequence_starts,
        [*NOT_LABELS, returning(labels=LABELS), returning(labels=LABELS, position_ids=LABELS[0])],
        works={"collator": returning(labels=LABELS, position_ids=LABELS)},
    ),
    collator(
        collators.mask_missing, [*NOT_LABELS[:2], returning(labels=LABELS)], works={"collator": returning(labels=REALS)}
    ),
    collator(
        collators.replace_labels,
        NOT_LABELS[:3],
        works={"replacements": {3: 4}},
        replacements=[3, [3, 4], {3: 4.0}, {"3": 4}],
    ),
    collator(collators.count_sequences, NOT_LABELS, works=SHIFTED),
    collator(collators.count_pairs, [*NOT_LABELS, returning(labels=LABELS[:1])], works=SHIFTED),
    collator(collators.stack_pairs, NOT_LABELS[1:], [{"chosen": [1], "rejected": [2]}], SHIFTED),
    collator(
        collators.pack_spans,
        [returning(), returning(start_positions=1, end_positions=2)],
        works={"collator": returning(input_ids=LABELS, **ENDS)},
    ),
    collator(
        collators.with_extras,
        [returning(), returning(labels=None)],
        [{"weights": 1.0}, {"weights": 2.0}],
        SHIFTED | {"names": ["weights"]},
        names=["weights", ["other"], [3], None],
    ),
    collator(
        collators.with_decoder_inputs,
        NOT_LABELS,
        works={"model": model_of(**STARTS)},
        model=[None, nn.Linear(2, 2), model_of(pad_token_id=1)],
    ),
    collator(
        collators.teacher_inputs,
        [returning(labels=LABELS)],
        [{}, {}],
        SHIFTED | {"collator": returning(labels=LABELS, input_ids=LABELS, attention_mask=LABELS)},
    ),
)

# --- reducers --------------------------------------------------------------------------------------------------------


def one_label_each(generator, classes):
    labels = torch.full((4, 8), -100)
    labels[[0, 1, 2], [4, 7, 1]] = torch.randint(classes, (3,), generator=generator)
    return torch.randn(4, 8, classes, generator=generator, dtype=torch.float64), labels


def images(generator, classes):
    labels = torch.randint(classes, (4, 6, 10), generator=generator)
    labels[0, :2] = labels[2] = -100
    return torch.randn(4, classes, 3, 5, generator=generator), labels


def frames(generator, classes):
    labels = torch.randint(1, classes, (4, 3), generator=generator)
    logits = torch.randn(4, 9, classes, generator=generator)
    return logits, {"labels": labels, "input_lengths": torch.tensor([9, 4, 7, 2])}


def pairs(generator, classes):
    """Return chosen rows, then rejected ones; the last pair lacks the chosen completion."""
    labels = torch.randint(classes, (4, 6, 2), generator=generator)
    labels[:, :2] = labels[1, 4:, 0] = labels[3, :, 0] = -100
    references = torch.randn(2, 4, generator=generator, dtype=torch.float64)
    named = zip(("reference_chosen", "reference_rejected"), references, strict=True)
    return torch.randn(8, 6, classes, generator=generator), {"labels": labels, **dict(named)}


def scored_pairs(generator, classes):
    return torch.randn(8, 1, generator=generator), torch.tensor([0, 0, -100, 0])


def starts_and_ends(generator, places):
    return tuple(torch.randn(2, 4, places, generator=generator)), torch.tensor([[1, 2], [0, 0], [3, 5], [6, 6]])


def two_vectors(generator, size):
    return tuple(torch.randn(2, 4, size, generator=generator)), None


def generated_ids(generator, classes):
    ids = torch.randint(classes, (4, 5), generator=generator)
    return (ids.masked_fill(torch.arange(5) > torch.tensor([[4], [2], [3], [0]]), -100),), ids[:, :3]


ANSWERS = Task("answers", one_label_each, range, sequence=True, shift=1)
SHIFT_1 = OF_LABELS | SHIFTED
OF_ROWS = {"logits": ROWS, "labels": IDS}
OF_TOKENS = {"task": "token_classification"}
SCORES = {"logits": ROWS[:2, :1], "labels": torch.tensor([0])}
BAD_SCORES = {"labels": [*NOT_TENSORS, None, torch.tensor([0, 0]), torch.tensor([[0]]), {}]}
REFERENCES = {"reference_chosen": torch.zeros(1), "reference_rejected": torch.zeros(1)}
OTHER_SHAPES = [*NOT_TENSORS, LABELS[:1], LABELS[..., None], LABELS[0, 0], LABELS.repeat(1, 2), {}, {"labels": None}]


def token_reducer(name: str, *, shift: int = 1, **options: Any) -> Callable[..., Any]:
    return partial(getattr(reducers, name), shift=shift, **options)


REDUCER_EXPORTS = on_page(
    "reducers",
    export(
        reducers.argmax,
        way(CAUSAL, function=token_reducer("argmax")),
        way(OF_TOKENS, "of tokens", function=token_reducer("argmax", shift=0)),
        way(CLASSES, "of samples"),
        works=SHIFT_1,
        accepts=("labels",),
        labels=OTHER_SHAPES,
    ),
    export(
        reducers.top_k,
        way(CAUSAL, function=token_reducer("top_k", k=3)),
        works=SHIFT_1 | {"k": 2},
        accepts=("labels",),
        labels=OTHER_SHAPES,
        k=[6],
    ),
    export(reducers.token_log_probs, way(CAUSAL, function=token_reducer("token_log_probs")), works=SHIFT_1),
    export(
        reducers.sample_sums,
        way(CAUSAL, function=token_reducer("sample_sums", top_k=(2, 5), entropy=True)),
        way(CLASSES, "of samples"),
        works=SHIFT_1,
        top_k=[0, -1, 1.5, "2", None, [1, 0], [1.5], True],
    ),
    export(
        reducers.probabilities,
        way(CLASSES),
        way(MULTI_LABEL, "side by side", multi_label=True),
        works=OF_ROWS,
        accepts=("logits", "labels"),
        logits=[*NOT_TENSORS, None, (), IDS, LOGITS, ROWS[:, :1]],
        labels=[*NOT_TENSORS, {}],
    ),
    export(
        reducers.ordinal_ids,
        way(CLASSES),
        works=OF_ROWS,
        accepts=("logits", "labels"),
        logits=[*NOT_TENSORS, None, (), LABELS, LOGITS],
        labels=[*NOT_TENSORS, {}],
    ),
    export(reducers.label_rank, way(CAUSAL, function=token_reducer("label_rank")), works=SHIFT_1),
    export(reducers.calibration_bins, way(CAUSAL, function=token_reducer("calibration_bins")), works=SHIFT_1),
    export(
        reducers.confusion_counts,
        way(OF_TOKENS, function=token_reducer("confusion_counts", shift=0)),
        way(CLASSES, "of samples"),
        works=SHIFT_1,
    ),
    export(
        lambda *, reducer: reducers.combine(ids=reducer)(ROWS, IDS),
        way(CAUSAL, function=reducers.combine(ids=token_reducer("argmax"), sums=token_reducer("sample_sums"))),
        works={"reducer": reducers.argmax},
        name="combine",
        reducer=[
            *("text", None, lambda x, y: x.mean(), lambda x, y: x > 0),
            *(lambda x, y: None, lambda x, y: x[:2], lambda x, y: x.half()),
        ],
    ),
    export(
        reducers.answer_logits,
        way({"task": ANSWERS}, function=token_reducer("answer_logits", token_ids=[6, 0, 3])),
        works=SHIFT_1 | {"token_ids": [0, 1]},
        token_ids=[[], [5], [-1], [0.5], ["a"], [0, 0], None, 3, "ab"],
    ),
    export(
        reducers.text_lengths,
        way(CAUSAL, function=token_reducer("text_lengths", lengths={"bytes": torch.arange(20)})),
        works={"logits": (), "labels": LABELS, "lengths": {"bytes": torch.arange(5)}, "shift": 1},
        accepts=("labels",),
        labels=[*NOT_TENSORS, None, IDS, LABELS.float(), LABELS + 1, LABELS - 1, {}],
        lengths=[{}, *({"bytes": x} for x in ([1, 2], torch.ones(5, 2), torch.arange(2)))],
    ),
    export(
        reducers.segmentation_counts,
        way({"task": images}),
        works={"logits": IMAGE, "labels": PIXELS},
        accepts=("logits", "labels"),
        logits=[*NOT_TENSORS, None, PIXELS, ROWS, IMAGE[0], IMAGE[:0]],
        labels=[*NOT_TENSORS, None, PIXELS + 3, PIXELS - 1, PIXELS.float(), PIXELS.bool(), PIXELS[0], {}],
    ),
    export(
        reducers.ctc_greedy,
        way({"task": frames, "lengths": {9}}),
        works={"logits": LOGITS, "labels": {"labels": LABELS, "input_lengths": torch.tensor([3, 2])}},
        accepts=("logits",),
        logits=[*NOT_TENSORS, None, LABELS, ROWS, IMAGE],
        labels=[{"input_lengths": torch.tensor([3])}, {"input_lengths": "text"}],
    ),
    export(
        reducers.preference_rewards,
        way({"task": pairs, "lengths": {6}}, function=token_reducer("preference_rewards")),
        works={"logits": LOGITS, "labels": {"labels": PAIRED, **REFERENCES}, "shift": 1},
        labels=[
            *(*NOT_TENSORS, None, LABELS, PAIRED + 1, PAIRED.float()),
            {"labels": PAIRED, "reference_chosen": torch.zeros(1)},
            *({"labels": PAIRED, **dict.fromkeys(REFERENCES, x)} for x in (torch.zeros(1, 1), torch.zeros(2), [0.0])),
        ],
    ),
    export(
        reducers.reward_scores,
        way({"task": scored_pairs}),
        works=SCORES,
        accepts=("labels",),
        logits=[ROWS],
        **BAD_SCORES,
    ),
    export(
        reducers.pair_margins,
        way({"task": scored_pairs}),
        way({"task": pairs, "lengths": {6}}, "of completions", rewards=token_reducer("preference_rewards")),
        works=SCORES,
        accepts=("labels",),
        logits=[ROWS],
        rewards=["text", None, lambda x, y: x, lambda x, y: {"pairs": y}],
        **BAD_SCORES,
    ),
    export(
        reducers.spans,
        way({"task": starts_and_ends, "lengths": {7}}, top_n=4, max_length=3),
        works={"logits": (ROWS, ROWS), "labels": None},
        logits=[
            *("text", 3, None, ROWS, (ROWS,), (ROWS, ROWS[:2])),
            *((LABELS, LABELS), (ROWS[:0],) * 2, (ROWS[:, :0],) * 2),
        ],
    ),
    export(
        reducers.embeddings,
        way({"task": two_vectors}, select=lambda found: {"first": found[0], "second": found[1]}),
        accepts=("logits",),  # `select` decides
        works={"logits": ROWS, "labels": None, "select": lambda outputs: outputs},
        select=[*(lambda outputs: (ROWS,), lambda outputs: LABELS, lambda outputs: LOGITS, lambda outputs: {"a": 1})],
    ),
    export(
        reducers.generated_ids,
        way({"task": generated_ids, "lengths": {5}}),
        works={"logits": LABELS, "labels": None},
        logits=[*NOT_TENSORS, None, (), {}, LOGITS, IDS, LABELS > 0],
    ),
    export(
        reducers.token_bytes,
        works={"tokenizer": SimpleNamespace(get_vocab=lambda: {"\u0120a": 0}, all_special_ids=[])},
        accepts=("tokenizer",),
        why=OPTION,
        tokenizer=[SimpleNamespace(get_vocab=lambda: {"##a": 0}, all_special_ids=[])],
    ),
)

# --- metrics ---------------------------------------------------------------------------------------------------------


def evaluated(predictions: Any, labels: Any) -> SimpleNamespace:
    return SimpleNamespace(predictions=predictions, label_ids=labels)


SUMS = {
    "predictions": {
        "nll": np.array([3.0, 1.0, 4.0, 2.5]),
        "tokens": np.array([5.0, 3.0, 4.0, 0.0]),
        "correct": np.array([2.0, 2.0, 4.0, 0.0]),
        "all_correct": np.array([0.0, 0.0, 1.0, 0.0]),
        "correct_top_5": np.array([3.0, 2.0, 4.0, 0.0]),
        "entropy": np.array([1.0, 2.0, 3.0, 0.0]),
    },
    "labels": np.array([[1, 2, 3, 1, 2], [-100, 1, 1, 1, -100], [1, 1, 2, 2, -100], [-100] * 5]),
}
TOKEN_IDS = {
    "predictions": np.array([[0, 1, 2, -100], [2, 2, 1, -100], [1, 0, 2, 0]]).repeat(2, 0),
    "labels": np.array([[0, 2, 2, -100], [2, 1, -100, -100], [-100, 0, 2, 1]]).repeat(2, 0),
}
SIDE_BY_SIDE = {
    "predictions": {"probabilities": np.array([[0.9, 0.2, 0.7], [0.1, 0.6, 0.3], [0.4, 0.8, 0.6], [0.7, 0.1, 0.9]])},
    "labels": np.array([[1, 0, 1], [0, 1, 1], [1, 1, 0], [1, 0, 1]]),
}
TARGETS = {"predictions": np.array([[0.5], [1.5], [2.0], [4.0]]), "labels": np.array([0.0, 2.0, 2.5, 3.0])}

RANDOM = np.random.default_rng(0)
FIVE_LABELS = RANDOM.integers(0, 5, (8, 7))
FIVE_IDS = np.where(RANDOM.random((8, 7)) < 0.6, FIVE_LABELS, RANDOM.integers(0, 5, (8, 7)))
FIVE_LABELS[RANDOM.random((8, 7)) < 0.2] = -100
TAGS = dict(enumerate(["O", "B-X", "I-X", "B-Y", "I-Y"]))
MACRO_F1 = partial(f1_score, average="macro")
BINS = {name: RANDOM.integers(0, 5, (8, 4)) / 1 for name in ("bin_labels", "bin_confidence", "bin_correct")}
VECTORS = {name: RANDOM.normal(size=(8, 3)) for name in ("queries", "documents")}
REWARDS = {name: RANDOM.normal(size=8).round() for name in ("reward_chosen", "reward_rejected")}
PLACED = [window | {"start_positions": place, "end_positions": place + 1} for place, window in enumerate(FEATURES)]
ANSWERED = {"predictions": spans_of(), "labels": np.array([[0, 1], [1, 2], [2, 3], [3, 4]])}
MODULE = metrics.to_evaluate(metrics.classification(5), kind="ids")
UPWARDS = {key: True for key, better in metrics.classification(5).higher_is_better.items() if better}  # those of ids

TWO = metrics.classification(2)
BUILT = metrics.build(TWO, num_samples=3)
TRUE, GUESSED = np.array([0, 1, -100]), np.array([0, 1, 1])
CLASSIFIED = evaluated(GUESSED, TRUE)
LETTERS = SimpleNamespace(batch_decode=lambda rows, **_: [bytes(row).decode() for row in rows])
TEXT = np.array([[*b"a text of five words"]])
HALVES = np.full((3, 2), 0.5)
UNIT_VECTORS = {"queries": np.eye(3), "documents": np.eye(3)}
ONES = {name: np.ones(3) for name in ("nll", "tokens", "correct", "all_correct")}
EXAMPLE = {"id": 7, "context": "It rains.", "answers": {"text": ["rains"]}}
FEATURE = {"example_id": 7, "offset_mapping": [None, (0, 2), (3, 8), (8, 9)]}
SPAN = {"starts": np.array([[2]]), "ends": np.array([[2]]), "scores": np.array([[1.0]]), "null_scores": np.zeros(1)}
PERSON = {0: "O", 1: "B-PER", 2: "I-PER"}
OF_CLASSES = {"num_classes": 2}
NAMES = {"id2label": [["a", "b"], {0: "a", 1: "b"}, 3]}
ID2LABEL = [{}, {1: "a"}, {0: "a", 1: "a"}, {0: "a", "0": "b"}, {0.5: "a"}, {"x": "a"}, ["a"], 3, None]


def on_ids(metric, predictions=FIVE_IDS, labels=FIVE_LABELS, note=""):
    """Return a way to call a metric over eight samples, of ids 0 to 4 by default."""
    options = {"predictions": predictions, "labels": labels}
    return way(options, note, metrics.build(metric, num_samples=len(labels)))


def on_two_classes(metric: Callable[..., Any]) -> Evaluation:
    return Evaluation(metric, GUESSED, TRUE, [GUESSED + 1, GUESSED[:, None]], [TRUE + 1])


def of_texts(function: Callable[..., Any], *ways: Way, **bad: list[Any]) -> Export:
    return export(
        function,
        *ways or (on_ids(function(TOKENIZER), {"generated": FIVE_IDS}),),
        works={"tokenizer": LETTERS},
        evaluation=Evaluation(
            function(LETTERS),
            {"generated": TEXT},
            TEXT,
            [TEXT * 1.0, TEXT[:, :3], {"generated": TEXT[0]}],
            [TEXT * 1.0, TEXT[0], (TEXT, TEXT)],
        ),
        **bad,
    )


def without(row: Mapping[str, Any]) -> list[Any]:
    return [[{key: row[key] for key in row if key != left_out}] for left_out in row]


METRIC_EXPORTS = on_page(
    "metrics",
    export(
        metrics.language_modeling,
        way(SUMS, function=metrics.language_modeling()),
        evaluation=Evaluation(
            metrics.language_modeling(),
            ONES,
            np.zeros(3),
            [GUESSED, ONES | {"nll": np.ones((3, 2))}, {"nll": np.ones(3)}, {"a": ONES, "b": ONES}],
        ),
    ),
    export(
        lambda metric, num_samples=None: metrics.build(metric, num_samples=num_samples),
        way(SUMS, function=metrics.build(metrics.language_modeling(), num_samples=4)),
        works={"metric": TWO},
        evaluation=on_two_classes(BUILT),
        name="build",
    ),
    export(
        metrics.classification,
        way(TOKEN_IDS, function=metrics.build(metrics.classification(3), num_samples=6)),
        works=OF_CLASSES,
        evaluation=Evaluation(
            TWO,
            GUESSED,
            TRUE,
            [
                *(GUESSED + 1, GUESSED[:, None], {"confusion": -np.ones((3, 4))}),
                *({"probabilities": x} for x in (HALVES * NAN, HALVES * 2)),
            ],
            [TRUE + 1, TRUE.astype(float), TRUE > 0, TRUE[:, None]],
        ),
        **NAMES,
        average=["other", None, 3, ["macro", 3]],
        pos_label=[2, "other", None],
    ),
    export(
        metrics.classification,
        works={"id2label": {0: "a"}},
        accepts=("num_classes",),
        name="classification(id2label)",
        id2label=ID2LABEL,
    ),
    export(
        metrics.multi_label,
        way(SIDE_BY_SIDE, function=metrics.build(metrics.multi_label(3), num_samples=4)),
        works=OF_CLASSES,
        evaluation=Evaluation(
            metrics.multi_label(2),
            {"probabilities": HALVES},
            np.ones((3, 2), np.int64),
            [HALVES, *({"probabilities": x} for x in (HALVES * NAN, HALVES * 4, HALVES[:, :1], np.ones((3, 2), int)))],
            [np.full((3, 2), 2), np.full((3, 2), 0.5), np.full((3, 2), NAN), np.ones((3, 3)), np.ones(3)],
        ),
        **NAMES,
        average=["weighted", None],
        threshold=[[0.5] * 3, [[0.5], []]],
    ),
    export(
        metrics.regression,
        way(TARGETS, function=metrics.build(metrics.regression(), num_samples=4)),
        evaluation=Evaluation(
            metrics.regression(rank_correlation=True),
            np.arange(3.0),
            np.arange(3.0),
            [np.arange(3), np.zeros((3, 3)), np.array(["a"] * 3)],
            [np.full(3, NAN), np.zeros((3, 2)), np.array(["a"] * 3)],
        ),
    ),
    export(
        metrics.bootstrap,
        way(TOKEN_IDS, function=metrics.bootstrap(metrics.classification(3), n=20)),
        works={"metric": TWO, "n": 3},
        evaluation=on_two_classes(metrics.bootstrap(TWO, n=5)),
    ),
    export(
        lambda **given: metrics.bootstrap(TWO, n=3, **given)(CLASSIFIED),
        works={},
        name="bootstrap(unit)",
        unit=["ab", [1] * 4],
    ),
    export(
        metrics.by_group,
        way(TOKEN_IDS, function=metrics.by_group(metrics.classification(3), [*"abaabb"])),
        works={"metric": TWO, "groups": "aab"},
        evaluation=on_two_classes(metrics.by_group(TWO, "aab")),
        groups=[[], None, *UNITS],
        labels=[[1], 3, "abc", [[1], ["a"], [2]]],
    ),
    export(
        lambda *, metric: metrics.by_dataset(metric),
        way(TOKEN_IDS, function=metrics.by_dataset(metrics.build(metrics.classification(3), num_samples=6))),
        works={"metric": BUILT},
        evaluation=on_two_classes(metrics.by_dataset(BUILT)),
        name="by_dataset",
        metric=[TWO],
    ),
    export(
        metrics.entity_f1,
        on_ids(metrics.entity_f1(TAGS, scheme="IOB2")),
        on_ids(metrics.entity_f1(TAGS, scheme="IOB2", lenient=True), note="lenient"),
        works={"id2label": PERSON, "scheme": "IOB2"},
        evaluation=Evaluation(
            metrics.entity_f1(PERSON, scheme="IOB2"),
            np.array([[1, 2]]),
            np.array([[1, -100]]),
            [np.array([[3, 0]])],
            [np.array([1]), np.array([[3, 0]])],
        ),
        id2label=[{}, {0: "O"}, {0: "O", 1: "X-A"}, {0: "", 1: "O"}, ["O"], None],
        scheme=["other", None, 3],
    ),
    export(
        metrics.label_ranking,
        on_ids(metrics.label_ranking(), {"ranks": np.where(FIVE_LABELS < 0, -100, FIVE_IDS)}),
        works={},
        evaluation=Evaluation(
            metrics.label_ranking(), {"ranks": GUESSED}, np.zeros(3), [GUESSED, {"ranks": GUESSED * 1.0}]
        ),
    ),
    export(
        metrics.calibration,
        on_ids(metrics.calibration(), BINS),
        evaluation=Evaluation(
            metrics.calibration(),
            {name: np.ones((3, 2)) for name in BINS},
            np.zeros(3),
            [GUESSED, {"bin_labels": np.ones((3, 2))}],
        ),
    ),
    export(
        metrics.segmentation,
        on_ids(metrics.segmentation(5), {"ids": FIVE_IDS}),
        works=OF_CLASSES,
        evaluation=Evaluation(
            metrics.segmentation(2),
            np.zeros((1, 2, 2), int),
            np.zeros((1, 2, 2), int),
            [np.full((1, 2, 2), 2), np.zeros((1, 2, 3), int)],
            [np.full((1, 2, 2), 2)],
        ),
        **NAMES,
    ),
    export(
        metrics.retrieval,
        on_ids(metrics.retrieval(), {"scores": RANDOM.random(FIVE_IDS.shape)}),
        works={},
        evaluation=Evaluation(
            metrics.retrieval(),
            HALVES,
            np.ones((3, 2)),
            [HALVES > 0, HALVES[:, :1], HALVES * NAN, HALVES[:, 0]],
            [np.full((3, 2), -1), np.full((3, 2), NAN), np.full((3, 2), INF), np.ones(3)],
        ),
    ),
    export(
        metrics.paired_retrieval,
        on_ids(metrics.paired_retrieval(), VECTORS),
        works={},
        evaluation=Evaluation(
            metrics.paired_retrieval(), UNIT_VECTORS, np.zeros(3), [UNIT_VECTORS | {"queries": np.eye(3)[:, :2]}]
        ),
    ),
    of_texts(metrics.text_match),
    of_texts(metrics.translation, tokenize=["typo", None, 3, ["13a"]]),
    of_texts(metrics.summarization),
    of_texts(
        metrics.transcription,
        on_ids(metrics.transcription(TOKENIZER), {"generated": FIVE_IDS}),
        on_ids(metrics.transcription(TOKENIZER), note="teacher-forced"),
    ),
    export(
        metrics.glue,
        on_ids(metrics.glue("sst2"), FIVE_IDS[:, 0] % 2, FIVE_IDS[::-1, 0] % 2),
        works={"task": "rte"},
        evaluation=Evaluation(metrics.glue("rte"), GUESSED, TRUE, [GUESSED + 1], [TRUE + 1]),
        task=["other", None, 3],
    ),
    export(
        metrics.from_sklearn,
        on_ids(metrics.from_sklearn(MACRO_F1, kind="ids", greater_is_better=True)),
        works={"function": max, "kind": "ids", "greater_is_better": True},
        evaluation=Evaluation(
            metrics.from_sklearn(np.dot, kind="ids", greater_is_better=None),
            GUESSED,
            TRUE,
            [GUESSED[:, None]],
            [(TRUE, TRUE)],
        ),
        function=[lambda x, y: 1.0, None, 3, torchmetrics.MeanAbsoluteError],
    ),
    export(
        metrics.from_evaluate,
        on_ids(metrics.from_evaluate(MODULE, kind="ids", higher_is_better=UPWARDS)),
        works={
            "module": SimpleNamespace(features={}, add_batch=print, compute=print),
            "kind": "ids",
            "higher_is_better": {"a": True},
        },
        module=["nowhere.py", 3, None, SimpleNamespace(compute=print)],
        higher_is_better=[{"a": direction} for direction in ("yes", 1, NAN)],
    ),
    export(
        metrics.from_torchmetrics,
        on_ids(metrics.from_torchmetrics(MulticlassAccuracy(5), kind="ids")),
        works={"module": torchmetrics.MeanAbsoluteError(), "kind": "scores"},
        module=[3, None, torchmetrics.MeanAbsoluteError, torchmetrics.MetricCollection([])],
    ),
    export(
        metrics.preferences,
        on_ids(metrics.preferences(), {**REWARDS, "pairs": np.array([1.0, 0, 1, 1, 1, 1, 0, 1])}),
        evaluation=Evaluation(
            metrics.preferences(),
            {name: np.ones(3) for name in (*REWARDS, "pairs")},
            np.zeros(3),
            [GUESSED, {name: np.ones((3, 1)) for name in (*REWARDS, "pairs")}],
        ),
    ),
    export(
        metrics.extractive_qa,
        way(ANSWERED, function=metrics.extractive_qa(EXAMPLES, PLACED)),
        works={"examples": [EXAMPLE], "features": [FEATURE]},
        evaluation=Evaluation(
            metrics.extractive_qa([EXAMPLE], [FEATURE]),
            SPAN,
            np.zeros((1, 2)),
            [
                SPAN | changed
                for changed in (
                    {"starts": np.array([2])},
                    {"scores": np.ones((1, 2))},
                    {"null_scores": np.zeros((1, 1))},
                )
            ],
        ),
        examples=[
            *([], [3], "text"),
            *([{**EXAMPLE, "answers": answers}] for answers in (["a"], None, {"texts": ["a"]})),
            *([{**EXAMPLE, "answers": {"text": answers}}] for answers in ("rains", None, 3, [3])),
            *([{**EXAMPLE, "context": None}], *without(EXAMPLE)),
        ],
        features=[
            *([], [3], "text"),
            *([{**FEATURE, "offset_mapping": offsets}] for offsets in ([3], [(1, 2, 3)], ["ab"])),
            *without(FEATURE),
            *([{**FEATURE, "start_positions": end, "end_positions": end}] for end in ("a", None, [1, 2])),
            [{**FEATURE, "start_positions": 1, "end_positions": [1, 2]}],
        ],
        null_threshold=[NAN],
    ),
    export(
        metrics.Metric,
        works={"statistics": dict, "score": dict, "higher_is_better": {"error": False}},
        why="the type of all metrics",
        higher_is_better=[{"error": "yes"}, {"error": 1}, {"loss": False}],
    ),
    export(
        metrics.best_model_kwargs,
        works={"key": "perplexity"},
        accepts=("metric",),
        why="looks a direction up",
        key=["other", "entropy"],
        metric=["text", 3],
    ),
    export(
        metrics.tuned_thresholds,
        works={"probabilities": HALVES, "labels": np.ones((3, 2))},
        why=OPTION,
        probabilities=[HALVES * NAN, HALVES * 4, HALVES[:, :1], [[0.1], [0.1, 0.2]], "text"],
        labels=[np.ones(3), np.full((3, 2), 2), "text"],
    ),
    export(
        metrics.compare,
        works={"metric": TWO, "first": CLASSIFIED, "second": CLASSIFIED, "n": 3},
        why="takes two evaluations",
        second=[None, evaluated(GUESSED[:2], TRUE[:2]), evaluated(GUESSED, 1 - TRUE)],
        unit=["ab"],
    ),
    export(
        metrics.with_labels_from,
        works={"metric": TWO, "column": "answers"},
        evaluation=Evaluation(
            metrics.with_labels_from(TWO, "answers"),
            {"ids": GUESSED, "answers": TRUE},
            TRUE,
            [{"ids": GUESSED}, GUESSED],
        ),
        why="takes labels out of the predictions of another metric",
    ),
    export(
        metrics.decode,
        works={"ids": TEXT, "tokenizer": LETTERS},
        why="makes texts of ids",
        ids=[[[1]], TEXT[0], TEXT * 1.0, None],
    ),
    export(metrics.to_evaluate, works={"metric": TWO, "kind": "ids"}, why="makes a module of evaluate"),
)

# Not exported by the packages' indexes, with inputs that can be wrong all the same.
FURTHER = [
    export(
        metric_rules,
        works={"predictions": np.arange(4), "labels": np.arange(4)},
        predictions=[3, "text", np.arange(3)],
        labels=[3, None],
    ),
    export(
        plots.reliability_diagram,
        works={"columns": {name: [[1, 3]] for name in BINS}},
        columns=[
            *({name: np.ones((1, 0)) for name in BINS}, None, "text", {}, {"x": 1}),
            *({name: [[1, 3]] for name in BINS} | {"bin_correct": x} for x in (1, "text")),
        ],
    ),
    export(
        plots.group_bars,
        works={"scores": {"accuracy/de": 0.5}, "key": "accuracy"},
        scores=[{}, {"accuracy/de": "text"}],
        key=["other"],
    ),
]

EXPORTS = [
    *(*LOSS_EXPORTS, *TERM_EXPORTS, *OUTCOME_EXPORTS, *REAL_EXPORTS, *OPTION_EXPORTS),
    *(*COLLATOR_EXPORTS, *REDUCER_EXPORTS, *METRIC_EXPORTS),
]
LOSSES = entries(LOSS_EXPORTS)
TERMS, OUTCOME_TERMS, REAL_TERMS = map(entries, (TERM_EXPORTS, OUTCOME_EXPORTS, REAL_EXPORTS))
REDUCERS = entries(REDUCER_EXPORTS)
METRICS = entries(METRIC_EXPORTS)

# --- exceptions ------------------------------------------------------------------------------------------------------

CONTRASTS = [
    "clip_loss",
    "info_nce_loss",
    "info_nce_loss both ways",
    "triplet_loss",
    "triplet_loss of semi-hard triplets",
]

# property: (the rules that it excuses from, {label of an entry: reason})
EXCEPTIONS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "NOT_ADDITIVE": (
        ("additive", "accumulation"),
        {
            "classification_loss by weights": "a weighted mean of the call: torch's, exact in one micro-batch only",
            **dict.fromkeys(CONTRASTS, "the other samples of a call are what each is told from"),
        },
    ),
    "NEEDS_OTHERS": (
        ("every_label",),
        dict.fromkeys(CONTRASTS, "a sample alone has nothing to be told from: it costs nothing, whatever its label"),
    ),
    "COUNTS_OTHER_UNITS": (
        ("additive",),
        {
            "causal_lm_loss by sequences": "a label costs the less, the more its sequence has: sequences add up",
            "segmentation_loss with dice": "an overlap is a ratio of sums over the pixels of an image: images add up",
        },
    ),
    "OVERWRITES": (("inputs",), {"causal_lm_loss overwriting": "the logits hold the gradient afterwards: asked for"}),
    "STOPS_GRADIENT": (
        ("gradient",),
        {
            "dft": "the probability that weighs is a constant of the step",
            "eaft": "the entropy that weighs is a constant of the step",
        },
    ),
    "UNBOUNDED": (
        ("extremes",),
        {
            "poisson_nll": "the rate is the exponential of the prediction",
            "regression_loss with variances": "the variance is the exponential of a prediction",
        },
    ),
    "SMALL_VOCABULARY": (
        ("small",),
        dict.fromkeys(("confusion_counts", "segmentation_counts"), "one number for each pair of classes: asked for"),
    ),
    "KEEPS_VECTORS": (("small",), {"embeddings": "the vectors themselves are asked for: they are searched later"}),
    "READS_NO_LOGITS": (("alignment",), {"text_lengths": "how long a label is as text does not depend on the model"}),
    "BELONGS_TO_ITS_ROWS": (
        ("permutation",),
        {
            "by_group": "the groups are those of the rows of the dataset, one after the other",
            "extractive_qa": "the windows are those of the dataset, one after the other, and another order is an error",
        },
    ),
    "COLUMNS_ARE_CLASSES": (("padding",), {"multi_label": "the second dimension is the classes, never padded"}),
}

# The host waits for the device once a call, to read the labels; of these entries so often, for a reason.
WAITS_MORE_OFTEN = {
    "add_losses": (2, "each part reads its labels itself"),
    "add_losses of two losses": (2, "each part reads its labels itself"),
    "distillation_loss from the best ids": (2, "the teacher's ids and log-probabilities are checked beside the labels"),
}
