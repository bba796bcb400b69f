"""Train extractive question answering on windows of long contexts, and score exact match and F1.

Loss: `question_answering_loss`. Reducer: `spans`. Metric: `extractive_qa`, built from the examples and from their
windows in the order of evaluation. Collator: `pack_spans` around `DataCollatorWithPadding`; the Trainer needs
`label_names=["labels"]` to evaluate.

Needs: an encoder. Options: --data, a JSON-lines file with the columns of SQuAD; --model; --samples; all
TrainingArguments. The defaults are sentences of Python's manual, in which one piece of quoted code is replaced by
"what" and is to be found in the section, and a small random BERT.
"""

import json
import re
from dataclasses import make_dataclass
from pydoc_data.topics import topics

import transformers
from tokenizers import ByteLevelBPETokenizer

from lossfns import collators, question_answering_loss
from metrics import extractive_qa
from reducers import spans

Options = make_dataclass("Options", [("data", str, ""), ("model", str, ""), ("samples", int, 2_000)])


def load_examples(path):
    if path:
        with open(path, encoding="utf-8") as file:
            yield from map(json.loads, file)
    for name, text in () if path else topics.items():
        for code in re.finditer(r'"([\w.]{4,})"', context := text[:2_000]):
            question = context[max(0, code.start() - 60) : code.end() + 40].replace(code[0], "what")
            answers = {"text": [code[1]], "answer_start": [code.start(1)]}
            yield {"id": (name, code.start()), "question": question, "context": context, "answers": answers}


def windows(tokenizer, example):
    sizes = {"truncation": "only_second", "max_length": 192, "stride": 64, "return_offsets_mapping": True}
    found = tokenizer(example["question"], example["context"], return_overflowing_tokens=True, **sizes)
    first, text = (*example["answers"]["answer_start"], -1)[0], (*example["answers"]["text"], "")[0]
    for index, pairs in enumerate(found["offset_mapping"]):
        offsets = [pair if part == 1 else None for pair, part in zip(pairs, found.sequence_ids(index), strict=True)]
        ends = [found.char_to_token(index, char, 1) if text else None for char in (first, first + len(text) - 1)]
        start, end = (0, 0) if None in ends else ends
        answer = {"start_positions": start, "end_positions": end, "example_id": example["id"]}
        yield {name: values[index] for name, values in found.items()} | answer | {"offset_mapping": offsets}


def make_trainer(options, args):
    examples = list(load_examples(options.data))[: options.samples]
    if options.model:
        model = transformers.AutoModelForQuestionAnswering.from_pretrained(options.model)
        tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    else:
        bpe = ByteLevelBPETokenizer()
        bpe.train_from_iterator(topics.values(), vocab_size=4_000, special_tokens=["<pad>"], show_progress=False)
        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = transformers.BertForQuestionAnswering(transformers.BertConfig(vocab_size=4_000, **sizes))
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, pad_token="<pad>")
    features = [row for example in examples[::8] for row in windows(tokenizer, example)]
    return transformers.Trainer(
        model=model,
        args=args,
        train_dataset=[row for index, one in enumerate(examples) if index % 8 for row in windows(tokenizer, one)],
        eval_dataset=features,
        data_collator=collators.pack_spans(transformers.DataCollatorWithPadding(tokenizer)),
        compute_loss_func=question_answering_loss,
        preprocess_logits_for_metrics=spans,
        compute_metrics=extractive_qa(examples[::8], features),
    )


def main(argv=None):
    parser = transformers.HfArgumentParser([Options, transformers.TrainingArguments])
    parser.set_defaults(max_steps=200, learning_rate=1e-3, logging_steps=10, report_to="none", label_names=["labels"])
    trainer = make_trainer(*parser.parse_args_into_dataclasses(argv))
    trainer.train()
    scores = trainer.evaluate()
    print(f"exact match {scores['eval_exact_match']:.3f}, F1 {scores['eval_token_f1']:.3f}")
    return scores


if __name__ == "__main__":
    main()
