"""Classify texts with a causal language model of a large vocabulary (Qwen2.5), which answers with one token per class.

With `compute_metrics` alone the Trainer keeps 151,936 logits per token of the evaluation set. With the reducer
`answer_logits` it keeps one probability per class and text.

Loss: `causal_lm_loss` with cross-entropy and z-loss as its term. Reducer: `answer_logits` with the ids of the answer
tokens and `shift=1`. Metric: `classification` on the answers that the reducer returns. Collator:
`DataCollatorForSeq2Seq`; all labels but the answer are -100.

Needs: a causal language model. Options: --data, a CSV file with the columns `text` and `label`; --model; --samples; all
TrainingArguments. The defaults are paragraphs of Python's manual, whose chapter is the class, and a small random Qwen2.
"""

import csv
from dataclasses import make_dataclass
from functools import partial
from pydoc_data.topics import topics

import transformers
from tokenizers import ByteLevelBPETokenizer

from lossfns import causal_lm_loss, cross_entropy, weighted_sum, z_loss
from metrics import classification, with_labels_from
from reducers import answer_logits

Options = make_dataclass("Options", [("data", str, ""), ("model", str, ""), ("samples", int, 2_000)])


def load_texts(path):
    if path:
        with open(path, encoding="utf-8", newline="") as file:
            return [(row["text"], row["label"]) for row in csv.DictReader(file)]
    chapters = ("compound", "formatstrings", "specialnames", "string-methods")
    return [(text, name) for name in chapters for text in topics[name].split("\n\n") if len(text) > 100]


def load_model(path):
    if path:
        return transformers.AutoModelForCausalLM.from_pretrained(path), transformers.AutoTokenizer.from_pretrained(path)
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(topics.values(), vocab_size=4_000, special_tokens=["<pad>"], show_progress=False)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.Qwen2Config(vocab_size=151_936, num_key_value_heads=4, tie_word_embeddings=True, **sizes)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, pad_token="<pad>")
    return transformers.Qwen2ForCausalLM(config), tokenizer


def make_trainer(options, args):
    texts, (model, tokenizer) = load_texts(options.data), load_model(options.model)
    texts = texts[:: max(1, len(texts) // options.samples)]
    names = sorted({label for _, label in texts})
    # One token per class, the shortest first: A, B, ..., z, then tokens of two letters.
    words = sorted((len(word), word) for word in tokenizer.get_vocab() if word.isascii() and word.isalpha())
    answers = tokenizer.convert_tokens_to_ids([word for _, word in words[: len(names)]])
    rows = []
    for text, label in texts:
        ids = tokenizer(text, truncation=True, max_length=96).input_ids
        answer = answers[names.index(label)]
        rows.append({"input_ids": [*ids, answer], "labels": [-100] * len(ids) + [answer]})
    return transformers.Trainer(
        model=model,
        args=args,
        train_dataset=[row for index, row in enumerate(rows) if index % 5],
        eval_dataset=rows[::5],
        data_collator=transformers.DataCollatorForSeq2Seq(tokenizer),
        compute_loss_func=partial(causal_lm_loss, term=weighted_sum((1.0, cross_entropy), (1e-4, z_loss))),
        preprocess_logits_for_metrics=partial(answer_logits, token_ids=answers, shift=1),
        compute_metrics=with_labels_from(classification(id2label=dict(enumerate(names))), "answers"),
    )


def main(argv=None):
    parser = transformers.HfArgumentParser([Options, transformers.TrainingArguments])
    parser.set_defaults(max_steps=200, learning_rate=1e-3, logging_steps=10, report_to="none")
    trainer = make_trainer(*parser.parse_args_into_dataclasses(argv))
    trainer.train()
    scores = trainer.evaluate()
    print(f"accuracy {scores['eval_accuracy']:.3f}, macro F1 {scores['eval_f1_macro']:.3f}")
    return scores


if __name__ == "__main__":
    main()
