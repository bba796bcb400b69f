"""`python -m lossfns.testing MODEL DATASET`: what `check_trainer` finds for a model and a file of rows, untrained.

MODEL is a folder or a name for `from_pretrained`, of a causal language model or a text classifier. DATASET is a file,
.txt (a row a line), .jsonl, .csv or .parquet, or a folder of `Dataset.save_to_disk`, with a column "text", and "label"
for a classifier. The exit status is 1 if there is a problem.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import transformers

from ..classification import classification_loss
from ..collators.labels import mask_first_label
from ..language import causal_lm_loss
from .trainer import check_trainer

READERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
ROWS = 64


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the Trainer that the README shows and check it."""
    parser = argparse.ArgumentParser("python -m lossfns.testing", description=__doc__.partition(":")[2])
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("dataset", metavar="DATASET", type=Path)
    given = parser.parse_args(arguments)
    rows = _read(given.dataset, _rows)
    config = _read(given.model, transformers.AutoConfig.from_pretrained)
    name = (config.architectures or ["a model of no stated class"])[0]
    auto: Any
    if name.endswith("ForSequenceClassification"):
        auto, column = transformers.AutoModelForSequenceClassification, "label"
    elif name.endswith(("ForCausalLM", "LMHeadModel")):
        auto, column = transformers.AutoModelForCausalLM, "text"
    else:
        sys.exit(f"{name} is neither a causal language model nor a text classifier: call check_trainer(trainer)")
    if not {"text", column} <= {*rows.column_names}:
        sys.exit(f"the rows need {', '.join(sorted({'text', column}))}; they have {', '.join(rows.column_names)}")
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = _read(given.model, transformers.AutoTokenizer.from_pretrained)
        model = _read(given.model, auto.from_pretrained)
        trainer = _trainer(model, tokenizer, rows, scratch, classes=column == "label")
        return int(bool(check_trainer(trainer).problems))


def _read(given: Any, read: Callable[[Any], Any]) -> Any:
    """What was read, or an end with one line that says why not."""
    try:
        return read(given)
    except Exception as error:  # whatever it is, no traceback helps who has named a wrong file
        sys.exit(f"{given}: {next(iter(str(error).splitlines()), type(error).__name__)}")


def _rows(path: Path) -> Any:
    import datasets  # type: ignore[import-untyped]

    if path.is_dir():
        rows = datasets.load_from_disk(str(path))
    elif not path.exists():
        raise FileNotFoundError("there is no such file")
    elif path.suffix in READERS:
        rows = datasets.load_dataset(READERS[path.suffix], data_files=str(path), split="train")
    else:
        raise ValueError(f"neither a folder nor one of {', '.join(READERS)}")
    return rows.select(range(min(ROWS, len(rows))))


def _trainer(model: Any, tokenizer: Any, rows: Any, scratch: str, *, classes: bool) -> transformers.Trainer:
    import metrics
    import reducers

    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if getattr(model.config, "pad_token_id", None) is None:  # a classifier of several rows reads its last token by it
        model.config.pad_token_id = tokenizer.pad_token_id
    reducer: Any = reducers.argmax if classes else partial(reducers.sample_sums, shift=1)
    rows = rows.map(lambda row: tokenizer(row["text"], truncation=True, max_length=256), remove_columns=["text"])
    collator: Any = transformers.DataCollatorWithPadding(tokenizer)
    if not classes:
        collator = mask_first_label(transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False))
    return transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(output_dir=scratch, report_to="none", use_cpu=True),
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=collator,
        compute_loss_func=classification_loss if classes else causal_lm_loss,
        preprocess_logits_for_metrics=reducer,
        compute_metrics=metrics.classification(model.config.num_labels) if classes else metrics.language_modeling(),
    )


if __name__ == "__main__":
    sys.exit(main())
