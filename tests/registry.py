"""Everything that this project exports, once: how it is called, and which rules it need not keep, with the reason.

A new function joins by one line here; a test fails until it does. All options of a line are those of the rules, so the
line of a function is also the shortest way to check it by hand.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from sklearn.metrics import f1_score
from torchmetrics.classification import MulticlassAccuracy

import lossfns
import metrics
import reducers
from lossfns.testing.tasks import Task
from tests.kit import tasks
from tests.metrics.test_question_answering import EXAMPLES, FEATURES, spans_of
from tests.metrics.test_text import TOKENIZER


@dataclass(frozen=True)
class Entry:
    """One way to call something exported."""

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


# --- losses ----------------------------------------------------------------------------------------------------------

CLASSES = {"task": "classification"}
LABELS = {"task": "multi_label"}
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

DIVERGENCES = [lossfns.forward_kl, lossfns.reverse_kl, lossfns.jensen_shannon, lossfns.total_variation]
OBJECTIVES = [lossfns.dpo, lossfns.ipo, lossfns.simpo, lossfns.orpo, lossfns.cpo]
BOTH = lossfns.weighted_sum((0.5, lossfns.cross_entropy), (0.5, lossfns.teacher_divergence))
info_nce = partial(lossfns.info_nce_loss, select=tasks.QUERIES_AND_KEYS)


def weighted(weights):
    return partial(lossfns.classification_loss, class_weights=weights)


def softened(outputs, labels, num_items_in_batch=None):
    """`classification_loss` of distributions: for each sample, the Trainer counts all classes."""
    known = labels != -100
    soft = torch.nn.functional.one_hot(labels.clamp(min=0), 7).double() * 0.9 + 0.1 / 7
    count = None if num_items_in_batch is None else torch.as_tensor(num_items_in_batch).sum() * 7
    return lossfns.classification_loss(outputs, soft.masked_fill(~known[:, None], -100), count)


LOSSES = [
    Entry("causal_lm_loss", lossfns.causal_lm_loss, {"task": "causal_lm"}),
    Entry(
        "causal_lm_loss", partial(lossfns.causal_lm_loss, overwrite_logits=True), {"task": "causal_lm"}, "overwriting"
    ),
    Entry("causal_lm_loss", partial(lossfns.causal_lm_loss, normalize="sequences"), SEQUENCES, "by sequences"),
    Entry("masked_lm_loss", lossfns.masked_lm_loss, {"task": "masked_lm"}),
    Entry("seq2seq_lm_loss", lossfns.seq2seq_lm_loss, {"task": "seq2seq_lm"}),
    Entry("token_classification_loss", lossfns.token_classification_loss, {"task": "token_classification"}),
    Entry("classification_loss", lossfns.classification_loss, CLASSES),
    Entry("classification_loss", weighted(WEIGHTS), CLASSES | {"reweight": weighted}, "weighted"),
    Entry("classification_loss", partial(lossfns.classification_loss, label_smoothing=0.1), CLASSES, "smoothed"),
    Entry("classification_loss", partial(weighted(WEIGHTS), normalize="weights"), CLASSES, "by weights"),
    Entry("classification_loss", partial(lossfns.classification_loss, logit_adjustment=WEIGHTS), CLASSES, "adjusted"),
    Entry("classification_loss", partial(lossfns.classification_loss, margins=WEIGHTS), CLASSES, "with margins"),
    Entry("classification_loss", softened, CLASSES, "soft"),
    Entry("multi_label_loss", lossfns.multi_label_loss, LABELS),
    Entry("multi_label_loss", partial(lossfns.multi_label_loss, pos_weight=WEIGHTS), LABELS, "weighted"),
    Entry("multi_label_loss", partial(lossfns.multi_label_loss, label_smoothing=0.1), LABELS, "smoothed"),
    Entry("multi_label_loss", partial(lossfns.multi_label_loss, term=lossfns.focal), LABELS, "focal"),
    Entry("ordinal_loss", lossfns.ordinal_loss, CLASSES),
    Entry("ordinal_loss", partial(lossfns.ordinal_loss, levels=lossfns.corn_levels), CLASSES, "of CORN"),
    Entry("regression_loss", lossfns.regression_loss, {"task": "regression"}),
    Entry("regression_loss", lossfns.regression_loss, {"task": tasks.TARGETS}, "of several targets"),
    Entry(
        "regression_loss",
        partial(lossfns.regression_loss, term=lossfns.gaussian_nll),
        {"task": tasks.VARIANCES},
        "with variances",
    ),
    Entry("segmentation_loss", lossfns.segmentation_loss, IMAGES),
    Entry("segmentation_loss", partial(lossfns.segmentation_loss, dice=0.5), IMAGES, "with dice"),
    Entry(
        "segmentation_loss",
        partial(lossfns.segmentation_loss, dice=0.5),
        {"task": tasks.COARSE_IMAGES},
        "of coarse logits",
    ),
    Entry("question_answering_loss", lossfns.question_answering_loss, {"task": tasks.SPANS}),
    Entry("ctc_loss", lossfns.ctc_loss, {"task": tasks.FRAMES}),
    Entry("ctc_loss", lossfns.ctc_loss, {"task": tasks.FRAMES, "extras": tasks.FRAME_COUNTS}, "of counted frames"),
    Entry("clip_loss", lossfns.clip_loss, {"task": tasks.SIMILARITIES}),
    Entry("info_nce_loss", info_nce, VIEWS),
    Entry("info_nce_loss", partial(info_nce, symmetric=True), VIEWS, "both ways"),
    Entry("triplet_loss", lossfns.triplet_loss, {"task": tasks.EMBEDDINGS}),
    Entry(
        "triplet_loss",
        partial(lossfns.triplet_loss, mining=lossfns.semi_hard),
        {"task": tasks.EMBEDDINGS},
        "of semi-hard triplets",
    ),
    Entry(
        "multi_token_loss",
        partial(lossfns.multi_token_loss, heads=("logits", "further"), weights=(1.0, 0.3)),
        {"task": tasks.TWO_HEADS},
    ),
    Entry("with_aux_loss", lossfns.with_aux_loss(lossfns.causal_lm_loss, "aux_loss", 0.1), {"task": tasks.ROUTED}),
    *(
        Entry("distillation_loss", partial(lossfns.distillation_loss, divergence=by), TAUGHT, f"by {by.__name__}")
        for by in DIVERGENCES
    ),
    Entry("distillation_loss", partial(lossfns.distillation_loss, temperature=2.0), TAUGHT_IDS, "from the best ids"),
    Entry("distillation_loss", partial(lossfns.distillation_loss, term=BOTH), TAUGHT, "and cross-entropy"),
    Entry(
        "distillation_loss",
        partial(lossfns.distillation_loss, teacher=tasks.Teacher(), temperature=2.0),
        TAUGHT_HERE,
        "from a model",
    ),
    *(
        Entry("preference_loss", partial(lossfns.preference_loss, objective=by), COMPLETIONS, f"by {by.__name__}")
        for by in OBJECTIVES
    ),
    Entry("reward_loss", lossfns.reward_loss, {"task": tasks.REWARDS}),
    Entry(
        "add_losses",
        lossfns.add_losses(
            {"a": (0.7, lossfns.causal_lm_loss), "b": (0.3, partial(lossfns.causal_lm_loss, term=lossfns.focal))}
        ),
        {"task": "causal_lm"},
    ),
    Entry(
        "add_losses",
        lossfns.add_losses(
            {
                "hard": (0.7, lossfns.classification_loss),
                "soft": (0.3, partial(lossfns.classification_loss, label_smoothing=0.1)),
            }
        ),
        CLASSES,
        "of two losses",
    ),
    Entry(
        "watch",
        lossfns.watch(lossfns.causal_lm_loss, lossfns.TrainingMetrics(), token_accuracy="correct"),
        {"task": "causal_lm"},
    ),
]

# --- terms -----------------------------------------------------------------------------------------------------------


def near_one(labels: torch.Tensor) -> torch.Tensor:
    """Values between 0.5 and 1.5 that depend on the label."""
    return 1.0 + 0.5 * torch.sin(labels.double())


EXTRAS = {
    "token_weights": near_one,
    "negative": lambda labels: labels % 2,
    "old_log_prob": lambda labels: -near_one(labels),
    "advantages": near_one,
}


def extras(*names: str) -> dict[str, Any]:
    return {"extras": {name: EXTRAS[name] for name in names}}


TERMS = [
    Entry("cross_entropy", lossfns.cross_entropy),
    Entry("smoothed_cross_entropy", lossfns.smoothed_cross_entropy),
    Entry("focal", lossfns.focal),
    Entry("focal", partial(lossfns.focal, gamma=0.5), {}, "below 1"),
    Entry("poly1", lossfns.poly1),
    Entry("z_loss", lossfns.z_loss),
    Entry("dft", lossfns.dft),
    Entry("eaft", lossfns.eaft),
    Entry("entropy_bonus", lossfns.entropy_bonus),
    Entry("unlikelihood", lossfns.unlikelihood, extras("negative")),
    Entry("policy_gradient", lossfns.policy_gradient, extras("old_log_prob", "advantages")),
    Entry("class_weighted", lossfns.class_weighted(lossfns.focal, WEIGHTS)),
    Entry("token_weighted", lossfns.token_weighted(lossfns.cross_entropy), extras("token_weights")),
    Entry("weighted_sum", lossfns.weighted_sum((1.0, lossfns.focal), (1e-4, lossfns.z_loss))),
]
OUTCOME_TERMS = [Entry("asymmetric", lossfns.asymmetric)]  # for multi_label_loss
REAL_TERMS = [  # for regression_loss
    Entry("mse", lossfns.mse),
    Entry("mae", lossfns.mae),
    Entry("huber", lossfns.huber),
    Entry("log_cosh", lossfns.log_cosh),
    Entry("quantile", partial(lossfns.quantile, q=0.9)),
    Entry("poisson_nll", lossfns.poisson_nll),
    Entry("gaussian_nll", lossfns.gaussian_nll),
]

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
    """Chosen rows, then rejected ones; the last pair lacks the chosen completion."""
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


CAUSAL = {"task": "causal_lm"}
ANSWERS = Task("answers", one_label_each, range, sequence=True, shift=1)
REDUCERS = [
    Entry("argmax", partial(reducers.argmax, shift=1), CAUSAL),
    Entry("argmax", partial(reducers.argmax, shift=0), {"task": "token_classification"}, "of tokens"),
    Entry("argmax", reducers.argmax, CLASSES, "of samples"),
    Entry("top_k", partial(reducers.top_k, k=3, shift=1), CAUSAL),
    Entry("token_log_probs", partial(reducers.token_log_probs, shift=1), CAUSAL),
    Entry("sample_sums", partial(reducers.sample_sums, shift=1, top_k=(2, 5), entropy=True), CAUSAL),
    Entry("sample_sums", reducers.sample_sums, CLASSES, "of samples"),
    Entry("probabilities", reducers.probabilities, CLASSES),
    Entry("probabilities", partial(reducers.probabilities, multi_label=True), {"task": "multi_label"}, "side by side"),
    Entry("ordinal_ids", reducers.ordinal_ids, CLASSES),
    Entry("label_rank", partial(reducers.label_rank, shift=1), CAUSAL),
    Entry("calibration_bins", partial(reducers.calibration_bins, shift=1), CAUSAL),
    Entry("confusion_counts", partial(reducers.confusion_counts, shift=0), {"task": "token_classification"}),
    Entry("confusion_counts", reducers.confusion_counts, CLASSES, "of samples"),
    Entry(
        "combine",
        reducers.combine(ids=partial(reducers.argmax, shift=1), sums=partial(reducers.sample_sums, shift=1)),
        CAUSAL,
    ),
    Entry("answer_logits", partial(reducers.answer_logits, token_ids=[6, 0, 3], shift=1), {"task": ANSWERS}),
    Entry("text_lengths", partial(reducers.text_lengths, lengths={"bytes": torch.arange(20)}, shift=1), CAUSAL),
    Entry("segmentation_counts", reducers.segmentation_counts, {"task": images}),
    Entry("ctc_greedy", reducers.ctc_greedy, {"task": frames, "lengths": {9}}),
    Entry("preference_rewards", partial(reducers.preference_rewards, shift=1), {"task": pairs, "lengths": {6}}),
    Entry("reward_scores", reducers.reward_scores, {"task": scored_pairs}),
    Entry("pair_margins", reducers.pair_margins, {"task": scored_pairs}),
    Entry(
        "pair_margins",
        partial(reducers.pair_margins, rewards=partial(reducers.preference_rewards, shift=1)),
        {"task": pairs, "lengths": {6}},
        "of completions",
    ),
    Entry("spans", partial(reducers.spans, top_n=4, max_length=3), {"task": starts_and_ends, "lengths": {7}}),
    Entry(
        "embeddings",
        partial(reducers.embeddings, select=lambda found: {"first": found[0], "second": found[1]}),
        {"task": two_vectors},
    ),
    Entry("generated_ids", reducers.generated_ids, {"task": generated_ids, "lengths": {5}}),
]

# --- metrics ---------------------------------------------------------------------------------------------------------

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
IDS = {
    "predictions": np.array([[0, 1, 2, -100], [2, 2, 1, -100], [1, 0, 2, 0]]).repeat(2, 0),
    "labels": np.array([[0, 2, 2, -100], [2, 1, -100, -100], [-100, 0, 2, 1]]).repeat(2, 0),
}
SIDE_BY_SIDE = {
    "predictions": {"probabilities": np.array([[0.9, 0.2, 0.7], [0.1, 0.6, 0.3], [0.4, 0.8, 0.6], [0.7, 0.1, 0.9]])},
    "labels": np.array([[1, 0, 1], [0, 1, 1], [1, 1, 0], [1, 0, 1]]),
}
REALS = {"predictions": np.array([[0.5], [1.5], [2.0], [4.0]]), "labels": np.array([0.0, 2.0, 2.5, 3.0])}

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


def on_ids(name, metric, predictions=FIVE_IDS, labels=FIVE_LABELS, note=""):
    """A metric over eight samples, of ids 0 to 4 unless it says otherwise."""
    options = {"predictions": predictions, "labels": labels}
    return Entry(name, metrics.build(metric, num_samples=len(labels)), options, note)


METRICS = [
    Entry("language_modeling", metrics.language_modeling(), SUMS),
    Entry("build", metrics.build(metrics.language_modeling(), num_samples=4), SUMS),
    Entry("classification", metrics.build(metrics.classification(3), num_samples=6), IDS),
    Entry("multi_label", metrics.build(metrics.multi_label(3), num_samples=4), SIDE_BY_SIDE),
    Entry("regression", metrics.build(metrics.regression(), num_samples=4), REALS),
    Entry("bootstrap", metrics.bootstrap(metrics.classification(3), n=20), IDS),
    Entry("by_group", metrics.by_group(metrics.classification(3), [*"abaabb"]), IDS),
    Entry("by_dataset", metrics.by_dataset(metrics.build(metrics.classification(3), num_samples=6)), IDS),
    on_ids("entity_f1", metrics.entity_f1(TAGS, scheme="IOB2")),
    on_ids("entity_f1", metrics.entity_f1(TAGS, scheme="IOB2", lenient=True), note="lenient"),
    on_ids("label_ranking", metrics.label_ranking(), {"ranks": np.where(FIVE_LABELS < 0, -100, FIVE_IDS)}),
    on_ids("calibration", metrics.calibration(), BINS),
    on_ids("segmentation", metrics.segmentation(5), {"ids": FIVE_IDS}),
    on_ids("retrieval", metrics.retrieval(), {"scores": RANDOM.random(FIVE_IDS.shape)}),
    on_ids("paired_retrieval", metrics.paired_retrieval(), VECTORS),
    on_ids("text_match", metrics.text_match(TOKENIZER), {"generated": FIVE_IDS}),
    on_ids("translation", metrics.translation(TOKENIZER), {"generated": FIVE_IDS}),
    on_ids("summarization", metrics.summarization(TOKENIZER), {"generated": FIVE_IDS}),
    on_ids("transcription", metrics.transcription(TOKENIZER), {"generated": FIVE_IDS}),
    on_ids("transcription", metrics.transcription(TOKENIZER), note="teacher-forced"),
    on_ids("glue", metrics.glue("sst2"), FIVE_IDS[:, 0] % 2, FIVE_IDS[::-1, 0] % 2),
    on_ids("from_sklearn", metrics.from_sklearn(MACRO_F1, kind="ids", greater_is_better=True)),
    on_ids("from_evaluate", metrics.from_evaluate(MODULE, kind="ids", higher_is_better=UPWARDS)),
    on_ids("from_torchmetrics", metrics.from_torchmetrics(MulticlassAccuracy(5), kind="ids")),
    on_ids("preferences", metrics.preferences(), {**REWARDS, "pairs": np.array([1.0, 0, 1, 1, 1, 1, 0, 1])}),
    Entry("extractive_qa", metrics.extractive_qa(EXAMPLES, PLACED), ANSWERED),
]

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

# Exported, and no loss, term, reducer or metric over logits and labels: tested where the reason says.
NOT_CALLED_BY_THE_TRAINER = {
    "Combined": "the type that weighted_sum, token_weighted and class_weighted return",
    "token_statistics": "the kernel itself",
    "head_token_statistics": "the kernel itself",
    "hidden_states": "a source of losses and reducers, needs a model",
    "class_counts": "prepares an option",
    "balanced_class_weights": "prepares an option",
    "balanced_pos_weight": "prepares an option",
    "effective_number_weights": "prepares an option",
    "ldam_margins": "prepares an option",
    "coral_levels": "levels of ordinal_loss",
    "corn_levels": "levels of ordinal_loss",
    "batch_hard": "mining of triplet_loss",
    "semi_hard": "mining of triplet_loss",
    "forward_kl": "a divergence of distillation_loss",
    "reverse_kl": "a divergence of distillation_loss",
    "jensen_shannon": "a divergence of distillation_loss",
    "total_variation": "a divergence of distillation_loss",
    "teacher_divergence": "a term of distillation_loss",
    "bradley_terry": "an objective over pairs",
    "cpo": "an objective over pairs",
    "dpo": "an objective over pairs",
    "ipo": "an objective over pairs",
    "kto": "an objective over pairs",
    "orpo": "an objective over pairs",
    "simpo": "an objective over pairs",
    "sequence_log_probs": "sums of the kernel, by row",
    "precompute_reference_log_probs": "prepares a dataset",
    "Metric": "the type of all metrics",
    "best_model_kwargs": "looks a direction up",
    "tuned_thresholds": "prepares an option",
    "compare": "takes two evaluations",
    "with_labels_from": "takes labels out of the predictions of another metric",
    "decode": "makes texts of ids",
    "to_evaluate": "makes a module of evaluate",
    "TrainingMetrics": "sums of what was trained on",
    "token_bytes": "prepares an option",
}
