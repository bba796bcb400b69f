"""Act two: an encoder that classifies and rates film reviews, beside the stock loss under gradient accumulation.

MiniLM learns from sentences that raters scored from -4 to 4. As three classes they are unbalanced, which the stock loss
ignores; and stock gradients of this model are as many times too large as steps are accumulated.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from sklearn.metrics import confusion_matrix
from tqdm import tqdm
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, logging, set_seed

from benchmarks import assets
from benchmarks.demo_language import arguments, progress
from lossfns import balanced_class_weights, classification_loss, focal, regression_loss
from metrics import classification, regression
from reducers import argmax

NAMES = {0: "negative", 1: "mixed", 2: "positive"}
STEPS, ACCUMULATION, BATCH = 20, 4, 8
EVAL_ROWS, EVAL_BATCH, LONGEST = 320, 32, 40
TRAINED_LAYERS = 2

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Run:
    """One training, its scores on held-out sentences, and the norm of its first gradient."""

    name: str
    scores: dict[str, float]
    first_gradient: float
    confusion: Any = None


def run() -> tuple[list[Run], list[Run]]:
    """Classification and regression, each with the stock loss and with the project's."""
    print("\nLoading MiniLM and rated film reviews ...")
    logging.set_verbosity_error()  # the head is new in each run, on purpose
    rated = _rated_rows()
    classes: Rows = [row | {"labels": _class_of(row["labels"])} for row in rated]
    weights = balanced_class_weights([row["labels"] for row in classes[EVAL_ROWS:]], num_classes=len(NAMES))
    losses: dict[str, Callable[..., torch.Tensor] | None] = {
        "stock cross-entropy": None,
        "balanced class weights": partial(classification_loss, class_weights=weights),
        "focal, balanced": partial(classification_loss, term=focal, class_weights=weights),
    }
    classified = [
        _train(name, classes, loss, {"num_labels": len(NAMES)}, reducer=argmax, metric=classification(id2label=NAMES))
        for name, loss in losses.items()
    ]
    one_output = {"num_labels": 1, "problem_type": "regression"}
    rates: dict[str, Callable[..., torch.Tensor] | None] = {
        "stock squared error": None,
        "regression_loss": regression_loss,
    }
    rating = [_train(name, rated, loss, one_output, metric=regression()) for name, loss in rates.items()]
    return classified, rating


def table(classified: list[Run], rating: list[Run]) -> str:
    """What each loss reached, and how large its first gradient was."""
    head = f"\n{EVAL_ROWS} held-out sentences         macro F1   accuracy   first gradient"
    lines = [
        f"  {run.name:28}{run.scores['f1_macro']:10.3f} {run.scores['accuracy']:10.3f} {run.first_gradient:16.2f}"
        for run in classified
    ]
    lines += [f"\n{'':32}{'Pearson':>8} {'RMSE':>10}   first gradient"]
    lines += [
        f"  {run.name:28}{run.scores['pearson']:10.3f} {run.scores['rmse']:10.3f} {run.first_gradient:16.2f}"
        for run in rating
    ]
    ratio = rating[0].first_gradient / rating[1].first_gradient
    lines += [
        f"\nUnder {ACCUMULATION} accumulation steps the stock gradient is {ratio:.1f} times that of regression_loss."
    ]
    return "\n".join([head, *lines])


def _train(
    name: str,
    rows: Rows,
    loss: Callable[..., torch.Tensor] | None,
    config: dict[str, Any],
    *,
    metric: Callable[..., dict[str, float]],
    reducer: Callable[..., Any] | None = None,
) -> Run:
    set_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(assets.minilm_path(), **config)
    model.requires_grad_(False)
    model.classifier.requires_grad_(True)
    model.bert.encoder.layer[-TRAINED_LAYERS:].requires_grad_(True)
    model.bert.pooler.requires_grad_(True)
    trainer = Trainer(
        model=model,
        args=arguments(
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            per_device_eval_batch_size=EVAL_BATCH,
            gradient_accumulation_steps=ACCUMULATION,
            learning_rate=1e-3,
            warmup_steps=3,
            max_grad_norm=1.0,
            logging_steps=1,
        ),
        train_dataset=rows[EVAL_ROWS:],
        eval_dataset=rows[:EVAL_ROWS],
        processing_class=AutoTokenizer.from_pretrained(assets.minilm_path()),
        compute_loss_func=loss,
        preprocess_logits_for_metrics=reducer,
        compute_metrics=metric,
    )
    with progress(trainer, name, STEPS + EVAL_ROWS // EVAL_BATCH):
        trainer.train()
        predicted = trainer.predict(trainer.eval_dataset)
    counts = None if reducer is None else confusion_matrix(predicted.label_ids, predicted.predictions)
    scores = {key.removeprefix("test_"): value for key, value in predicted.metrics.items()}
    return Run(name, scores, next(log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log), counts)


def _rated_rows() -> Rows:
    """Tokenised film reviews with their mean rating, in one shuffled order."""
    tokenizer = AutoTokenizer.from_pretrained(assets.minilm_path())
    reviews = [rated for rated in assets.rated_texts() if rated.source == "movieReviewSnippets"]
    wanted = EVAL_ROWS + STEPS * ACCUMULATION * BATCH
    order = torch.randperm(len(reviews), generator=torch.Generator().manual_seed(0))[:wanted]
    chosen = [reviews[place] for place in order.tolist()]
    texts = tqdm([review.text for review in chosen], desc="  tokenising                  ", ncols=96, mininterval=0.5)
    encoded = [tokenizer(text, truncation=True, max_length=LONGEST) for text in texts]
    return [dict(row) | {"labels": review.mean} for row, review in zip(encoded, chosen, strict=True)]


def _class_of(rating: float) -> int:
    return 0 if rating < -1 else 2 if rating > 1 else 1
