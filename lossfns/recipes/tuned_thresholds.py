"""Train multi-label classification of rare labels with `pos_weight` and focal loss, and tune the thresholds.

The thresholds are tuned on one half of the held-out samples and scored on the other.

Loss: `multi_label_loss` with `term=partial(focal, gamma=...)` and `pos_weight=balanced_pos_weight(...)`. Reducer:
`probabilities` with `multi_label=True`. Metric: `multi_label`, then again with `threshold=tuned_thresholds(...)`.
Collator: the default one. A model whose forward has no `labels` argument needs `label_names=["labels"]`.

Needs: scikit-learn. Options: --data, a CSV file without a header, with numbers and a class id in the last column;
--samples; --gamma; all TrainingArguments. The default is 1,797 handwritten digits with ten yes-or-no labels each.
"""

from dataclasses import make_dataclass
from functools import partial

import numpy as np
import torch
import transformers
from sklearn.datasets import load_digits

from lossfns import balanced_pos_weight, focal, multi_label_loss
from metrics import multi_label, tuned_thresholds
from reducers import probabilities

Options = make_dataclass("Options", [("data", str, ""), ("samples", int, 2_000), ("gamma", float, 1.0)])


class Perceptron(torch.nn.Module):
    """A model of your own: its forward returns a dict with `logits`."""

    def __init__(self, features, classes):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.BatchNorm1d(features), torch.nn.Linear(features, 32), torch.nn.ReLU(), torch.nn.Linear(32, classes)
        )

    def forward(self, inputs):
        return {"logits": self.layers(inputs)}


def load(path):
    table = np.loadtxt(path, delimiter=",") if path else np.column_stack(load_digits(return_X_y=True))
    table = np.random.default_rng(0).permutation(table)
    classes = table[:, -1].astype(int)
    labels = np.eye(classes.max() + 1, dtype=np.float32)[classes]
    return [{"inputs": row[:-1].astype(np.float32), "labels": label} for row, label in zip(table, labels, strict=True)]


def make_trainer(options, args):
    rows = load(options.data)[: options.samples]
    train = rows[: len(rows) // 2]
    classes = len(rows[0]["labels"])
    weights = balanced_pos_weight(np.stack([row["labels"] for row in train]), num_classes=classes)
    return transformers.Trainer(
        model=Perceptron(len(rows[0]["inputs"]), classes),
        args=args,
        train_dataset=train,
        eval_dataset=rows[len(rows) // 2 :],
        compute_loss_func=partial(multi_label_loss, term=partial(focal, gamma=options.gamma), pos_weight=weights),
        preprocess_logits_for_metrics=partial(probabilities, multi_label=True),
        compute_metrics=multi_label(classes),
    )


def main(argv=None):
    parser = transformers.HfArgumentParser([Options, transformers.TrainingArguments])
    parser.set_defaults(max_steps=200, learning_rate=1e-2, logging_steps=10, report_to="none", label_names=["labels"])
    trainer = make_trainer(*parser.parse_args_into_dataclasses(argv))
    trainer.train()
    held_out = trainer.eval_dataset
    tuning, test = (trainer.predict(held_out[start::2]) for start in (0, 1))
    thresholds = tuned_thresholds(tuning.predictions["probabilities"], tuning.label_ids)
    before = multi_label(len(thresholds))(test)
    scores = multi_label(len(thresholds), threshold=thresholds)(test)
    print(f"macro F1 {before['f1_macro']:.3f} with thresholds of 0.5, {scores['f1_macro']:.3f} with tuned ones")
    return {**scores, "untuned_f1_macro": before["f1_macro"]}


if __name__ == "__main__":
    main()
