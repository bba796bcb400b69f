"""Train token classification, and score entities: an entity is correct if its words and its type are.

Loss: `token_classification_loss`. Reducer: `argmax` with `shift=0`. Metric: `entity_f1` with the model's `id2label`.
Collator: `DataCollatorForTokenClassification`; the first piece of a word has its label, the others have -100.

Needs: an encoder. Options: --data, a CoNLL file (one word and its IOB2 tag per line, an empty line after each
sentence); --model; --samples; all TrainingArguments. The defaults are Python's manual, in which "quoted" code and
*starred* terms are the entities and lose their marks, and a small random BERT.
"""

import re
from dataclasses import make_dataclass
from functools import partial
from itertools import pairwise
from pydoc_data.topics import topics

import transformers
from tokenizers import ByteLevelBPETokenizer

from lossfns import token_classification_loss
from metrics import entity_f1
from reducers import argmax

Options = make_dataclass("Options", [("data", str, ""), ("model", str, ""), ("samples", int, 2_000)])


def load_sentences(path):
    if path:
        with open(path, encoding="utf-8") as file:
            blocks = [block.splitlines() for block in re.split(r"\n\s*\n", file.read().strip())]
        return [[(line.split()[0], line.split()[-1]) for line in block] for block in blocks]
    texts = [text for name in sorted(topics) for text in topics[name].split("\n\n") if '"' in text]
    found = (re.findall(r'"([\w.()]+)"|\*(\w+)\*|([\w.()]+|[^\w\s])', text) for text in texts)
    tags = ("B-CODE", "B-TERM", "O")
    return [[next(pair for pair in zip(groups, tags, strict=True) if pair[0]) for groups in words] for words in found]


def load_model(path, names):
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}}
    if path:
        model = transformers.AutoModelForTokenClassification.from_pretrained(path, **labels)
        return model, transformers.AutoTokenizer.from_pretrained(path)
    bpe = ByteLevelBPETokenizer(add_prefix_space=True)
    bpe.train_from_iterator(topics.values(), vocab_size=4_000, special_tokens=["<pad>"], show_progress=False)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.BertForTokenClassification(transformers.BertConfig(vocab_size=4_000, **sizes, **labels))
    return model, transformers.PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, pad_token="<pad>")


def make_trainer(options, args):
    sentences = load_sentences(options.data)[: options.samples]
    model, tokenizer = load_model(options.model, sorted({tag for sentence in sentences for _, tag in sentence}))
    rows = []
    for words, tags in (zip(*sentence, strict=True) for sentence in sentences):
        found = tokenizer(words, is_split_into_words=True, truncation=True, max_length=128)
        pairs = pairwise([None, *found.word_ids()])  # only the first piece of a word has a label
        labels = [-100 if word in (None, last) else model.config.label2id[tags[word]] for last, word in pairs]
        rows.append({"input_ids": found.input_ids, "labels": labels})
    return transformers.Trainer(
        model=model,
        args=args,
        train_dataset=[row for index, row in enumerate(rows) if index % 8],
        eval_dataset=rows[::8],
        data_collator=transformers.DataCollatorForTokenClassification(tokenizer),
        compute_loss_func=token_classification_loss,
        preprocess_logits_for_metrics=partial(argmax, shift=0),
        compute_metrics=entity_f1(model.config.id2label, scheme="IOB2"),
    )


def main(argv=None):
    parser = transformers.HfArgumentParser([Options, transformers.TrainingArguments])
    parser.set_defaults(max_steps=200, learning_rate=1e-3, logging_steps=10, report_to="none")
    trainer = make_trainer(*parser.parse_args_into_dataclasses(argv))
    trainer.train()
    scores = trainer.evaluate()
    print(f"entity F1 {scores['eval_entity_f1']:.3f} over {scores['eval_entities']:.0f} entities")
    return scores


if __name__ == "__main__":
    main()
