"""Fine-tune BLOOM with LoRA, and measure the memory of its evaluation with and without a reducer.

With `compute_metrics` alone the Trainer keeps 250,880 logits per token of the evaluation set. With the reducer
`sample_sums` it keeps a few numbers per sample, and `language_modeling` computes the scores from them.

Loss: `causal_lm_loss`. Reducer: `sample_sums` with `shift=1`. Metric: `language_modeling`.
Collator: `DataCollatorForSeq2Seq`; the labels of the prompt are -100.

Needs: peft. Options: --data, a JSON-lines file with `prompt` and `completion`; --model, a BLOOM checkpoint; --samples;
all TrainingArguments. The defaults are paragraphs of Python's manual, each cut in two, and a small random BLOOM.
"""

import json
from dataclasses import make_dataclass
from functools import partial
from pydoc_data.topics import topics

import peft
import transformers
from tokenizers import ByteLevelBPETokenizer

from lossfns import causal_lm_loss
from metrics import language_modeling
from reducers import sample_sums

Options = make_dataclass("Options", [("data", str, ""), ("model", str, ""), ("samples", int, 320)])


def load_pairs(path):
    if path:
        with open(path, encoding="utf-8") as file:
            return [(row["prompt"], row["completion"]) for row in map(json.loads, file)]
    texts = (text for name in sorted(topics) for text in topics[name].split("\n\n"))
    return [(text[:80], text[80:]) for text in texts if len(text) > 160]


def load_model(path):
    if path:
        return transformers.AutoModelForCausalLM.from_pretrained(path), transformers.AutoTokenizer.from_pretrained(path)
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(topics.values(), vocab_size=4_000, special_tokens=["<pad>"], show_progress=False)
    model = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=250_880, hidden_size=64, n_head=4))
    return model, transformers.PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, pad_token="<pad>")


def make_trainer(options, args):
    pairs, (model, tokenizer) = load_pairs(options.data), load_model(options.model)
    rows = []
    for text, completion in pairs[: options.samples]:
        prompt, answer = (tokenizer(part, truncation=True, max_length=24).input_ids for part in (text, completion))
        rows.append({"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer})
    return transformers.Trainer(
        model=peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["query_key_value"])),
        args=args,
        train_dataset=rows[len(rows) // 8 :],
        eval_dataset=rows[: len(rows) // 8],
        data_collator=transformers.DataCollatorForSeq2Seq(tokenizer),
        compute_loss_func=causal_lm_loss,
        preprocess_logits_for_metrics=partial(sample_sums, shift=1),
        compute_metrics=language_modeling(),
    )


def accuracy_of_logits(eval_pred):
    logits, labels = eval_pred
    return {"token_accuracy": float((logits.argmax(-1)[:, :-1] == labels[:, 1:])[labels[:, 1:] != -100].mean())}


def main(argv=None):
    parser = transformers.HfArgumentParser([Options, transformers.TrainingArguments])
    parser.set_defaults(max_steps=100, learning_rate=1e-2, report_to="none", skip_memory_metrics=False)
    trainer = make_trainer(*parser.parse_args_into_dataclasses(argv))
    trainer.train()
    found = {"with_reducer": trainer.evaluate()}
    trainer.preprocess_logits_for_metrics, trainer.compute_metrics = None, accuracy_of_logits
    found["with_logits"] = trainer.evaluate()
    for name, scores in found.items():
        scores["peak_mib"] = (scores["eval_mem_cpu_alloc_delta"] + scores["eval_mem_cpu_peaked_delta"]) / 2**20
        print(f"{name}: peak {scores['peak_mib']:.0f} MiB, token accuracy {scores['eval_token_accuracy']:.3f}")
    return found


if __name__ == "__main__":
    main()
