"""Fine-tune on completions only, without materializing the logits of the whole vocabulary.

`hidden_states(model)` lets the loss and the reducer read the last hidden states and apply the head themselves, to the
tokens with a label only. Pass the same source to both.

Loss: `causal_lm_loss` with `source=`. Reducer: `sample_sums` with `shift=1` and `source=`. Metric: `language_modeling`.
Collator: `DataCollatorForSeq2Seq`; the labels of the prompt are -100.

Needs: a causal language model whose forward takes `logits_to_keep`. Options: --data, a JSON-lines file with `prompt`
and `completion`; --model; --samples; all TrainingArguments. The defaults are sections of Python's manual, where the
title is the prompt, and a small random Llama.
"""

import json
from dataclasses import make_dataclass
from functools import partial
from pydoc_data.topics import topics

import transformers
from tokenizers import ByteLevelBPETokenizer

from lossfns import causal_lm_loss, hidden_states
from metrics import language_modeling
from reducers import sample_sums

Options = make_dataclass("Options", [("data", str, ""), ("model", str, ""), ("samples", int, 2_000)])


def load_pairs(path):
    if path:
        with open(path, encoding="utf-8") as file:
            return [(row["prompt"], row["completion"]) for row in map(json.loads, file)]
    sections = (topics[name].split("\n\n") for name in sorted(topics))
    return [(title, text) for title, *texts in sections for text in texts if len(text) > 100]


def load_model(path):
    if path:
        return transformers.AutoModelForCausalLM.from_pretrained(path), transformers.AutoTokenizer.from_pretrained(path)
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(topics.values(), vocab_size=4_000, special_tokens=["<pad>"], show_progress=False)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=4_000, **sizes))
    return model, transformers.PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, pad_token="<pad>")


def make_trainer(options, args):
    pairs, (model, tokenizer) = load_pairs(options.data), load_model(options.model)
    rows = []
    for text, completion in pairs[: options.samples]:
        prompt, answer = (tokenizer(part, truncation=True, max_length=64).input_ids for part in (text, completion))
        rows.append({"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer})
    source = hidden_states(model)  # source.remove() restores the model's full logits
    return transformers.Trainer(
        model=model,
        args=args,
        train_dataset=[row for index, row in enumerate(rows) if index % 8],
        eval_dataset=rows[::8],
        data_collator=transformers.DataCollatorForSeq2Seq(tokenizer),
        compute_loss_func=partial(causal_lm_loss, source=source),
        preprocess_logits_for_metrics=partial(sample_sums, shift=1, source=source),
        compute_metrics=language_modeling(),
    )


def main(argv=None):
    parser = transformers.HfArgumentParser([Options, transformers.TrainingArguments])
    parser.set_defaults(max_steps=200, learning_rate=1e-3, logging_steps=10, report_to="none")
    trainer = make_trainer(*parser.parse_args_into_dataclasses(argv))
    trainer.train()
    scores = trainer.evaluate()
    print(f"perplexity {scores['eval_perplexity']:.2f} over {scores['eval_tokens']:.0f} completion tokens")
    return scores


if __name__ == "__main__":
    main()
