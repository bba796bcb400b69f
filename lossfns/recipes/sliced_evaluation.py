"""Score a language model on each group of the evaluation set, with confidence intervals, in one pass.

`by_group` scores each group, and `bootstrap` adds 95 % intervals by resampling texts, which show whether groups differ
by more than chance.

Loss: `causal_lm_loss`. Reducer: `sample_sums` with `shift=1`. Metric: `build`, which joins the scores of all texts, of
each group, and their intervals. Collator: `mask_first_label` around `DataCollatorForSeq2Seq`.

Needs: a causal language model. Options: --data, a JSON-lines file with `text` and `group`; --model; --samples; all
TrainingArguments. The defaults are paragraphs of Python's manual, grouped by chapter, and a small random Llama.
"""

import json
from dataclasses import make_dataclass
from functools import partial
from pydoc_data.topics import topics

import transformers
from tokenizers import ByteLevelBPETokenizer

from lossfns import causal_lm_loss
from lossfns.collators import mask_first_label
from metrics import bootstrap, build, by_group, language_modeling
from reducers import sample_sums

Options = make_dataclass("Options", [("data", str, ""), ("model", str, ""), ("samples", int, 2_000)])


def load_texts(path):
    if path:
        with open(path, encoding="utf-8") as file:
            return [(row["text"], row["group"]) for row in map(json.loads, file)]
    chapters = ("compound", "formatstrings", "specialnames", "string-methods")
    return [(text, name) for name in chapters for text in topics[name].split("\n\n") if len(text) > 100]


def load_model(path):
    if path:
        return transformers.AutoModelForCausalLM.from_pretrained(path), transformers.AutoTokenizer.from_pretrained(path)
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(topics.values(), vocab_size=4_000, special_tokens=["<pad>"], show_progress=False)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=4_000, **sizes))
    return model, transformers.PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, pad_token="<pad>")


def make_trainer(options, args):
    texts, (model, tokenizer) = load_texts(options.data), load_model(options.model)
    texts = texts[:: max(1, len(texts) // options.samples)]
    ids = [tokenizer(text, truncation=True, max_length=64).input_ids for text, _ in texts]
    rows = [{"input_ids": tokens, "labels": tokens} for tokens in ids]
    held_out = [group for _, group in texts[::2]]
    score = language_modeling()
    return transformers.Trainer(
        model=model,
        args=args,
        train_dataset=rows[1::2],
        eval_dataset=rows[::2],
        # The first label is never predicted, but the Trainer counts it for some models, GPT-2 among them.
        data_collator=mask_first_label(transformers.DataCollatorForSeq2Seq(tokenizer)),
        compute_loss_func=causal_lm_loss,
        preprocess_logits_for_metrics=partial(sample_sums, shift=1),
        compute_metrics=build(score, by_group(score, held_out), by_group(bootstrap(score), held_out)),
    )


def main(argv=None):
    parser = transformers.HfArgumentParser([Options, transformers.TrainingArguments])
    parser.set_defaults(max_steps=100, learning_rate=1e-3, logging_steps=10, report_to="none")
    trainer = make_trainer(*parser.parse_args_into_dataclasses(argv))
    trainer.train()
    scores = trainer.evaluate()
    print(f"{'all texts':20} {scores['eval_perplexity']:8.1f} perplexity")
    for group in sorted({name.partition("/")[2] for name in scores if "/" in name}):
        low, value, high = (scores[f"eval_perplexity{end}/{group}"] for end in ("_low", "", "_high"))
        print(f"{group:20} {value:8.1f} (95 % interval {low:.1f} to {high:.1f})")
    return scores


if __name__ == "__main__":
    main()
