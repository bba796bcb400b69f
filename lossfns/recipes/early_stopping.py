"""Stop training when the perplexity of held-out text no longer falls, and keep the best model.

By default the Trainer takes a metric for better when it is greater, unless its name ends in "loss", and so keeps the
checkpoint with the worst perplexity. `best_model_kwargs("perplexity")` sets `metric_for_best_model` and
`greater_is_better` correctly.

Loss: `causal_lm_loss`. Reducer: `sample_sums` with `shift=1`. Metric: `language_modeling`. Collator: `mask_first_label`
around `DataCollatorForSeq2Seq`. Callback: `EarlyStoppingCallback`.

Needs: a causal language model. Options: --data, a text file; --model; --samples; all TrainingArguments. The defaults
are Python's manual and a small random Llama.
"""

from dataclasses import make_dataclass
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import transformers
from tokenizers import ByteLevelBPETokenizer

from lossfns import causal_lm_loss
from lossfns.collators import mask_first_label
from metrics import best_model_kwargs, language_modeling
from reducers import sample_sums

Options = make_dataclass("Options", [("data", str, ""), ("model", str, ""), ("samples", int, 400)])


def load_model(path):
    if path:
        return transformers.AutoModelForCausalLM.from_pretrained(path), transformers.AutoTokenizer.from_pretrained(path)
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(topics.values(), vocab_size=4_000, special_tokens=["<pad>"], show_progress=False)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=4_000, **sizes))
    return model, transformers.PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, pad_token="<pad>")


def make_trainer(options, args):
    model, tokenizer = load_model(options.model)
    ids = tokenizer(Path(options.data).read_text("utf-8") if options.data else "\n\n".join(topics.values())).input_ids
    blocks = [ids[start : start + 64] for start in range(0, len(ids) - 63, 64)][: options.samples]
    rows = [{"input_ids": block, "labels": block} for block in blocks]
    return transformers.Trainer(
        model=model,
        args=args,
        train_dataset=[row for index, row in enumerate(rows) if index % 5],
        eval_dataset=rows[::5],
        # The first label is never predicted, but the Trainer counts it for some models, GPT-2 among them.
        data_collator=mask_first_label(transformers.DataCollatorForSeq2Seq(tokenizer)),
        compute_loss_func=causal_lm_loss,
        preprocess_logits_for_metrics=partial(sample_sums, shift=1),
        compute_metrics=language_modeling(),
        callbacks=[transformers.EarlyStoppingCallback(early_stopping_patience=2)],
    )


def main(argv=None):
    parser = transformers.HfArgumentParser([Options, transformers.TrainingArguments])
    parser.set_defaults(num_train_epochs=50, learning_rate=3e-3, report_to="none", save_total_limit=1)
    parser.set_defaults(eval_strategy="epoch", save_strategy="epoch", logging_strategy="epoch")
    parser.set_defaults(load_best_model_at_end=True, **best_model_kwargs("perplexity"))
    trainer = make_trainer(*parser.parse_args_into_dataclasses(argv))
    trainer.train()
    scores = trainer.evaluate()
    print(f"best perplexity {scores['eval_perplexity']:.2f}, of {trainer.state.best_model_checkpoint}")
    return scores


if __name__ == "__main__":
    main()
