"""Distil a language model into a smaller one from stored top-k log-probabilities of the teacher.

The teacher runs once before training: for each position the ids and log-probabilities of its k most likely tokens are
stored, and the rest of its probability counts as one more token. Training needs no teacher in memory.

Loss: `distillation_loss` with a weighted sum of cross-entropy and divergence as its term. Reducer: `sample_sums` with
`shift=1`. Metric: `language_modeling`. Collator: `with_extras`, which adds the teacher's columns to the labels; the
Trainer needs `remove_unused_columns=False` for them.

Needs: a teacher and a student with one tokenizer. Options: --data, a text file; --teacher and --model, causal language
models; --samples; all TrainingArguments. The defaults are Python's manual, a small Llama as the teacher, which is
trained first, and a smaller one as the student.
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
def with_top_tokens(rows, teacher, k):
    for row in tqdm(rows, desc="teacher", unit="block"):
        logits = teacher(input_ids=torch.tensor([row["input_ids"]], device=teacher.device)).logits[0].float()
        log_probs, ids = logits.log_softmax(-1).topk(k)
        yield {**row, "teacher_ids": ids.cpu(), "teacher_log_probs": log_probs.cpu()}


def make_trainer(options, args):
    (model, tokenizer), (teacher, _) = load_model(options.model, layers=1), load_model(options.teacher, layers=2)
    ids = tokenizer(Path(options.data).read_text("utf-8") if options.data else "\n\n".join(topics.values())).input_ids
    blocks = [ids[start : start + 64] for start in range(0, len(ids) - 63, 64)][: options.samples]
    rows = [{"input_ids": block, "labels": block} for block in blocks]
    cut = len(rows) * 4 // 5
    if not options.teacher:
        transformers.Trainer(teacher, args, train_dataset=rows[:cut], compute_loss_func=causal_lm_loss).train()
    rows = list(with_top_tokens(rows, teacher.eval().to(args.device), k=16))
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
    print(f"student perplexity {scores['eval_perplexity']:.1f}")
    return scores


if __name__ == "__main__":
    main()
