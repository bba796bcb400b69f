"""Distil a language model into a smaller one from its best tokens, which are stored once: no second model in training.

Needs: --data, a text file; --teacher and --model, causal language models with one tokenizer. Without them: Python's
manual, a small Llama as the teacher, trained first, and a smaller one. TrainingArguments are options too.
Of each position k ids and log-probabilities are kept, and all other tokens count as one more.
"""

from dataclasses import make_dataclass
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import torch
import transformers
from tokenizers import ByteLevelBPETokenizer
from tqdm.auto import tqdm

from lossfns import causal_lm_loss, cross_entropy, distillation_loss, teacher_divergence, weighted_sum
from lossfns.collators import with_extras
from metrics import language_modeling
from reducers import sample_sums

Options = make_dataclass(
    "Options", [("data", str, ""), ("model", str, ""), ("teacher", str, ""), ("samples", int, 400)]
)


def load_model(path, layers):
    if path:
        return transformers.AutoModelForCausalLM.from_pretrained(path), transformers.AutoTokenizer.from_pretrained(path)
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(topics.values(), vocab_size=4_000, special_tokens=["<pad>"], show_progress=False)
    config = transformers.LlamaConfig(
        vocab_size=4_000, hidden_size=128, num_hidden_layers=layers, num_attention_heads=4
    )
    return transformers.LlamaForCausalLM(config), transformers.PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer)


@torch.no_grad()
def with_best_tokens(rows, teacher, k):
    for row in tqdm(rows, desc="teacher", unit="block"):
        logits = teacher(input_ids=torch.tensor([row["input_ids"]], device=teacher.device)).logits[0].float()
        log_probs, ids = logits.log_softmax(-1).topk(k)
        yield {**row, "teacher_ids": ids.cpu(), "teacher_log_probs": log_probs.cpu()}


def make_trainer(options, args):
    (model, tokenizer), (teacher, _) = load_model(options.model, layers=1), load_model(options.teacher, layers=2)
    ids = tokenizer(Path(options.data).read_text("utf-8") if options.data else "\n\n".join(topics.values())).input_ids
    blocks = [ids[at : at + 64] for at in range(0, len(ids) - 63, 64)][: options.samples]
    rows = [{"input_ids": block, "labels": block} for block in blocks]
    cut = len(rows) * 4 // 5
    if not options.teacher:
        transformers.Trainer(teacher, args, train_dataset=rows[:cut], compute_loss_func=causal_lm_loss).train()
    rows = list(with_best_tokens(rows, teacher.eval().to(args.device), k=16))
    return transformers.Trainer(
        model=model,
        args=args,
        train_dataset=rows[:cut],
        eval_dataset=rows[cut:],
        data_collator=with_extras(transformers.default_data_collator, ["teacher_ids", "teacher_log_probs"], shift=1),
        compute_loss_func=partial(
            distillation_loss, term=weighted_sum((0.5, cross_entropy), (0.5, teacher_divergence))
        ),
        preprocess_logits_for_metrics=partial(sample_sums, shift=1),
        compute_metrics=language_modeling(),
    )


def main(argv=None):
    parser = transformers.HfArgumentParser([Options, transformers.TrainingArguments])
    parser.set_defaults(max_steps=200, learning_rate=1e-3, report_to="none", remove_unused_columns=False)
    trainer = make_trainer(*parser.parse_args_into_dataclasses(argv))
    trainer.train()
    scores = trainer.evaluate()
    print(f"perplexity of the student {scores['eval_perplexity']:.1f}")
    return scores


if __name__ == "__main__":
    main()
