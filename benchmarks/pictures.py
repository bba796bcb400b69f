"""The pictures in the README, made by the README's own lines from film reviews, product reviews and editorials.

`python -m benchmarks.pictures` trains an encoder for a minute and writes them to `results/`.
"""

import re
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments, set_seed

from benchmarks import assets
from benchmarks.harness import REPOSITORY
from lossfns import balanced_class_weights, classification_loss

FOLDER = REPOSITORY / "benchmarks" / "results"
GROUPS = {"movieReviewSnippets": "films", "amazonReviewSnippets": "products", "nytEditorialSnippets": "editorials"}
TRAINED, SHOWN = 960, 600
BATCH, LONGEST, CLASSES = 32, 40, 3

Row = dict[str, Any]


def rows() -> tuple[list[Row], list[str]]:
    """Tokenised sentences of all sources in one shuffled order, with the class of their mean rating; their groups."""
    tokenizer = AutoTokenizer.from_pretrained(assets.minilm_path())
    texts = assets.rated_texts()
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))[: TRAINED + SHOWN]
    chosen = [texts[place] for place in order.tolist()]
    encoded = [tokenizer(rated.text, truncation=True, max_length=LONGEST) for rated in chosen]
    labels = [0 if rated.mean < -1 else 2 if rated.mean > 1 else 1 for rated in chosen]
    found = [dict(row) | {"labels": label} for row, label in zip(encoded, labels, strict=True)]
    return found, [GROUPS[rated.source] for rated in chosen]


def classifier(train: list[Row], folder: str) -> Trainer:
    """A Trainer that has gone over `train` once."""
    set_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(assets.minilm_path(), num_labels=CLASSES)
    weights = balanced_class_weights([row["labels"] for row in train], num_classes=CLASSES)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=folder,
            num_train_epochs=1,
            per_device_train_batch_size=BATCH,
            per_device_eval_batch_size=BATCH,
            learning_rate=2e-4,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
        ),
        train_dataset=train,
        processing_class=AutoTokenizer.from_pretrained(assets.minilm_path()),
        compute_loss_func=partial(classification_loss, class_weights=weights),
    )
    trainer.train()
    return trainer


def lines_of_the_readme() -> str:
    """The block of Python in the README that draws."""
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    (block,) = (
        body for body in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL) if "plots." in body
    )
    return block


def main() -> list[Path]:
    found, groups = rows()
    with tempfile.TemporaryDirectory() as folder:
        given = {
            "classifier": classifier(found[:TRAINED], folder),
            "reviews": found[TRAINED:],
            "groups": groups[TRAINED:],
        }
        exec(compile(lines_of_the_readme(), "README.md", "exec"), given)
    paths = []
    for name, figure in given["pictures"].items():
        paths.append(FOLDER / f"{name}.png")
        figure.savefig(paths[-1], dpi=80, metadata={"Software": None})  # the same bytes under any matplotlib's name
    return paths


if __name__ == "__main__":
    print(*main(), sep="\n")
