"""Train on preference pairs with DPO, with the reference model's log-probabilities computed before training.

The reference is the model before training. It is scored once, so that no second model is in memory during training.

Loss: `preference_loss` with `objective=partial(dpo, beta=0.1)`. Reducer: `preference_rewards` with `shift=1` and the
same `beta`. Metric: `preferences`. Collator: `stack_pairs` around `DataCollatorForSeq2Seq`; the Trainer needs
`remove_unused_columns=False` for the pairs.

Needs: a causal language model. Options: --data, a JSON-lines file with `prompt`, `chosen` and `rejected`; --model;
--samples; all TrainingArguments. The defaults are sections of Python's manual, where the true continuation is chosen
and that of another section is rejected, and a small random Llama.
"""

import json
from dataclasses import make_dataclass
from functools import partial
from pydoc_data.topics import topics

import transformers
from tokenizers import ByteLevelBPETokenizer

from lossfns import dpo, precompute_reference_log_probs, preference_loss
from lossfns.collators import stack_pairs
from metrics import preferences
from reducers import preference_rewards

Options = make_dataclass("Options", [("data", str, ""), ("model", str, ""), ("samples", int, 2_000)])


def load_pairs(path):
    if path:
        with open(path, encoding="utf-8") as file:
            return [json.loads(line) for line in file]
    texts = [text for topic in topics.values() for text in topic.split("\n\n") if len(text) > 200]
    pairs = zip(texts, texts[100:], strict=False)
    return [{"prompt": text[:80], "chosen": text[80:], "rejected": other[80:]} for text, other in pairs]


def load_model(path):
    if path:
        return transformers.AutoModelForCausalLM.from_pretrained(path), transformers.AutoTokenizer.from_pretrained(path)
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(topics.values(), vocab_size=4_000, special_tokens=["<pad>"], show_progress=False)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=4_000, **sizes))
    return model, transformers.PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, pad_token="<pad>")


def encode(tokenizer, prompt, completion):
    context, answer = (tokenizer(text, truncation=True, max_length=64).input_ids for text in (prompt, completion))
    return {"input_ids": context + answer, "labels": [-100] * len(context) + answer}


def make_trainer(options, args):
    pairs, (model, tokenizer) = load_pairs(options.data)[: options.samples], load_model(options.model)
    sides = ("chosen", "rejected")
    rows = [{side: encode(tokenizer, pair["prompt"], pair[side]) for side in sides} for pair in pairs]
    collator = stack_pairs(transformers.DataCollatorForSeq2Seq(tokenizer), shift=1)
    rows = precompute_reference_log_probs(model.to(args.device), rows, collator)
    return transformers.Trainer(
        model=model,
        args=args,
        train_dataset=[rows[index] for index in range(len(rows)) if index % 8],
        eval_dataset=[rows[index] for index in range(0, len(rows), 8)],
        data_collator=collator,
        compute_loss_func=partial(preference_loss, objective=partial(dpo, beta=0.1)),
        preprocess_logits_for_metrics=partial(preference_rewards, shift=1, beta=0.1),
        compute_metrics=preferences(),
    )


def main(argv=None):
    parser = transformers.HfArgumentParser([Options, transformers.TrainingArguments])
    parser.set_defaults(max_steps=100, learning_rate=1e-4, report_to="none", remove_unused_columns=False)
    trainer = make_trainer(*parser.parse_args_into_dataclasses(argv))
    trainer.train()
    scores = trainer.evaluate()
    print(f"reward accuracy {scores['eval_reward_accuracy']:.3f}, reward margin {scores['eval_reward_margin']:.3f}")
    return scores


if __name__ == "__main__":
    main()
