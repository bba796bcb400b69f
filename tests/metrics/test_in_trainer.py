"""Every family of scores in the stock Trainer: each mode, batch size and number of processes against loops."""

import json
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from seqeval.metrics.sequence_labeling import precision_recall_fscore_support
from sklearn.metrics import accuracy_score, f1_score, jaccard_score, log_loss, mean_squared_error, ndcg_score, r2_score
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

from lossfns import question_answering_loss
from lossfns.collators.labels import pack_spans
from metrics import (
    best_model_kwargs,
    build,
    by_dataset,
    by_group,
    classification,
    entity_f1,
    extractive_qa,
    from_sklearn,
    label_ranking,
    language_modeling,
    multi_label,
    regression,
    retrieval,
    segmentation,
    text_match,
    transcription,
    with_labels_from,
)
from reducers import (
    answer_logits,
    argmax,
    combine,
    generated_ids,
    label_rank,
    probabilities,
    sample_sums,
    segmentation_counts,
    spans,
    text_lengths,
)
from tests import tiny

MODES = {
    "concatenated": {},
    "lists": {"eval_do_concat_batches": False},
    "accumulated": {"eval_accumulation_steps": 1},
    "accumulated lists": {"eval_accumulation_steps": 2, "eval_do_concat_batches": False},
    "streaming": {"batch_eval_metrics": True},
}
ROWS = 10
BATCHES = (1, 3, 8)
WHOLE = {name: options for name, options in MODES.items() if name != "streaming"}
GENERATOR = np.random.default_rng(0)
TABLE = torch.from_numpy(GENERATOR.integers(1, 5, tiny.VOCAB))


def alone(model, row, **inputs):
    with torch.no_grad():
        return model(input_ids=row["input_ids"][None], **inputs)


def zero(outputs, labels, num_items_in_batch=None):
    """A loss for models that have none."""
    return 0 * outputs["logits"].sum()


# --- the families: (Trainer's arguments) -> scores, and () -> what they must be ---------------------------------------

LANGUAGE = tiny.lm_rows(ROWS, seed=3)


def language(dtype=torch.float64, **options):
    reducer = combine(
        sums=partial(sample_sums, shift=1),
        ranks=partial(label_rank, shift=1),
        text=partial(text_lengths, shift=1, lengths={"bytes": TABLE}),
        answer=partial(answer_logits, shift=1, token_ids=range(32)),
    )
    answers = with_labels_from(classification(32), "answers")
    metric = build(language_modeling(), label_ranking((5,)), answer=answers, num_samples=ROWS)
    model = tiny.model("llama", dtype=dtype).eval()
    return tiny.trainer(model, eval_rows=LANGUAGE, **{"reducer": reducer, "metric": metric} | options)


def expected_language():
    model = tiny.model("llama").eval()
    nll, ranks, size, answers, sequences = [], [], 0, [], []
    for row in LANGUAGE:
        pairs = list(zip(alone(model, row).logits[0], row["labels"][1:].tolist(), strict=False))
        pairs = [(x, label) for x, label in pairs if label != tiny.IGNORED]
        nll += [float(x.logsumexp(0) - x[label]) for x, label in pairs]
        ranks += [int((x > x[label]).sum()) for x, label in pairs]
        sequences += [not any(ranks[-len(pairs) :])] if pairs else []
        size += sum(int(TABLE[label]) for _, label in pairs)
        answers += [(label, int(x[:32].argmax())) for x, label in pairs[:1] if label < 32]
    return {
        "nll_loss": math.fsum(nll) / len(nll),
        "perplexity": math.exp(math.fsum(nll) / len(nll)),
        "token_accuracy": ranks.count(0) / len(ranks),
        "sequence_accuracy": np.mean(sequences),
        "tokens": len(nll),
        "samples": ROWS,
        "bits_per_byte": math.fsum(nll) / math.log(2) / size,
        "mrr": math.fsum(1 / (1 + rank) for rank in ranks) / len(ranks),
        "hit_at_5": sum(rank < 5 for rank in ranks) / len(ranks),
        "answer_accuracy": accuracy_score(*zip(*answers, strict=True)),
    }


QUESTIONS = [
    row | {"start_positions": torch.tensor(2), "end_positions": torch.tensor(3)} for row in tiny.qa_rows(ROWS, seed=4)
]
TEXT = " ".join(f"w{place}" for place in range(40))
OFFSETS = [(TEXT.index(word), TEXT.index(word) + len(word)) for word in TEXT.split()]
EXAMPLES = [{"id": place, "context": TEXT, "answers": {"text": ["w1 w2", "w4"]}} for place in range(ROWS // 2)]


def questions(**options):
    features = [
        {
            "example_id": place // 2,
            "offset_mapping": [None, None, *OFFSETS[: len(row["input_ids"]) - 2]],
            "start_positions": int(row["start_positions"]),
            "end_positions": int(row["end_positions"]),
        }
        for place, row in enumerate(QUESTIONS)
    ]
    return tiny.trainer(
        tiny.model("bert_qa").eval(),
        eval_rows=QUESTIONS,
        reducer=partial(spans, max_length=4),
        metric=extractive_qa(EXAMPLES, features),
        **options,
    )


def expected_questions():
    model, hits = tiny.model("bert_qa").eval(), 0
    for place in range(ROWS // 2):
        candidates = []
        for row in QUESTIONS[2 * place : 2 * place + 2]:
            out = alone(model, row)
            start, end = out.start_logits[0], out.end_logits[0]
            candidates += [
                (float(start[a] + end[b]), TEXT[OFFSETS[a - 2][0] : OFFSETS[b - 2][1]])
                for a in range(2, len(start))
                for b in range(a, min(len(start), a + 4))
            ]
        hits += max(candidates)[1] in ("w1 w2", "w4")
    return {"exact_match": hits / (ROWS // 2)}


class Pixels(torch.nn.Module):
    """A model of pixels, 2 x 2 of them a logit."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layer = torch.nn.Conv2d(3, 4, 2, stride=2, dtype=torch.float64)

    def forward(self, pixel_values, labels=None):
        return {"logits": self.layer(pixel_values)}


def pictures():
    rows = tiny.image_rows(ROWS, seed=5)
    labels = GENERATOR_OF_PIXELS.integers(0, 4, (ROWS, 8, 8))
    labels[:, 0] = tiny.IGNORED
    return [row | {"labels": torch.from_numpy(target)} for row, target in zip(rows, labels, strict=True)]


GENERATOR_OF_PIXELS = np.random.default_rng(1)
PICTURES = pictures()


def pixels(**options):
    reducer, metric = segmentation_counts, build(segmentation(4), num_samples=ROWS)
    return tiny.trainer(
        Pixels(), eval_rows=PICTURES, reducer=reducer, metric=metric, loss=zero, collator=stack, **options
    )


def stack(rows):
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def expected_pixels():
    with torch.no_grad():
        logits = Pixels()(torch.stack([row["pixel_values"] for row in PICTURES]))["logits"]
    large = torch.nn.functional.interpolate(logits, size=(8, 8), mode="bilinear", align_corners=False)
    labels = torch.stack([row["labels"] for row in PICTURES])
    there = labels != tiny.IGNORED
    pair = labels[there].numpy(), large.argmax(1)[there].numpy()
    return {"mean_iou": jaccard_score(*pair, average="macro"), "pixel_accuracy": accuracy_score(*pair)}


RANKED = [
    {"features": torch.from_numpy(GENERATOR.random((6, 3))), "labels": torch.from_numpy(GENERATOR.integers(0, 3, 6))}
    for _ in range(ROWS)
]


class Ranker(torch.nn.Module):
    """Scores of six candidates."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))

    def forward(self, features, labels=None):
        return {"logits": features @ self.weight}


def rankings(**options):
    metric = build(retrieval((3,)), num_samples=ROWS)
    return tiny.trainer(Ranker(), eval_rows=RANKED, metric=metric, loss=zero, collator=stack, **options)


def expected_rankings():
    labels = torch.stack([row["labels"] for row in RANKED]).numpy()
    there = (labels > 0).any(1)
    return {"ndcg_at_3": ndcg_score(labels[there], scores_of_candidates()[there], k=3), "queries": there.sum()}


TOKENS = tiny.token_rows(ROWS, seed=6)


def functions(**options):
    metric = from_sklearn(partial(jaccard_score, average="macro"), kind="ids", greater_is_better=True)
    reducer = partial(argmax, shift=0)
    return tiny.trainer(tiny.model("bert_token").eval(), eval_rows=TOKENS, reducer=reducer, metric=metric, **options)


def expected_functions():
    model, pairs = tiny.model("bert_token").eval(), []
    for row in TOKENS:
        ids = alone(model, row).logits[0].argmax(-1).tolist()
        pairs += [(label, place) for label, place in zip(row["labels"].tolist(), ids, strict=True) if label >= 0]
    return {"jaccard_score": jaccard_score(*zip(*pairs, strict=True), average="macro")}


CLASSES = tiny.class_rows(ROWS, seed=8)


def classes(**options):
    metric = build(classification(3), num_samples=ROWS)
    return tiny.trainer(
        tiny.model("bert_cls").eval(), eval_rows=CLASSES, reducer=probabilities, metric=metric, **options
    )


def expected_classes():
    model = tiny.model("bert_cls").eval()
    chances = np.array([alone(model, row).logits[0].softmax(-1).numpy() for row in CLASSES])
    labels = [int(row["labels"]) for row in CLASSES]
    return {
        "accuracy": accuracy_score(labels, chances.argmax(-1)),
        "f1_macro": f1_score(labels, chances.argmax(-1), average="macro"),
        "log_loss": log_loss(labels, chances, labels=range(3)),
    }


GROUPS = [f"group {place % 3}" for place in range(ROWS)]


def groups(**options):
    labels = [int(row["labels"]) for row in CLASSES]
    metric = build(classification(3), by_group(classification(3), GROUPS, labels=labels))
    return tiny.trainer(tiny.model("bert_cls").eval(), eval_rows=CLASSES, reducer=argmax, metric=metric, **options)


def expected_groups():
    model = tiny.model("bert_cls").eval()
    right = np.array([int(alone(model, row).logits.argmax()) == int(row["labels"]) for row in CLASSES])
    return {f"accuracy/group {group}": right[group::3].mean() for group in range(3)}


SIDES = [row | {"labels": row["labels"].clamp(max=1)} for row in RANKED]


def sides(**options):
    metric = build(multi_label(6), num_samples=ROWS)
    reducer = partial(probabilities, multi_label=True)
    return tiny.trainer(Ranker(), eval_rows=SIDES, reducer=reducer, metric=metric, loss=zero, collator=stack, **options)


def expected_sides():
    labels = torch.stack([row["labels"] for row in SIDES]).numpy()
    return {
        f"f1_{average}": f1_score(labels, scores_of_candidates() >= 0, average=average, zero_division=0)
        for average in ("micro", "macro", "samples")
    }


def scores_of_candidates():
    with torch.no_grad():
        return Ranker()(torch.stack([row["features"] for row in RANKED]))["logits"].numpy()


def values(**options):
    metric = build(regression(), num_samples=ROWS)
    return tiny.trainer(Ranker(), eval_rows=RANKED, metric=metric, loss=zero, collator=stack, **options)


def expected_values():
    found, labels = scores_of_candidates(), torch.stack([row["labels"] for row in RANKED]).numpy()
    return {
        "mse": mean_squared_error(labels, found),
        "r2": r2_score(labels, found),
        "pearson": np.mean([stats.pearsonr(*pair).statistic for pair in zip(found.T, labels.T, strict=True)]),
    }


TAGS = {0: "O", 1: "B-X", 2: "I-X"}


def entities(**options):
    metric = build(entity_f1(TAGS, scheme="IOB2", lenient=True), num_samples=ROWS)
    reducer = partial(argmax, shift=0)
    return tiny.trainer(tiny.model("bert_token").eval(), eval_rows=TOKENS, reducer=reducer, metric=metric, **options)


def expected_entities():
    model, pairs = tiny.model("bert_token").eval(), []
    for row in TOKENS:
        ids, labels = alone(model, row).logits[0].argmax(-1).tolist(), row["labels"].tolist()
        pairs.append([(TAGS[label], TAGS[place]) for label, place in zip(labels, ids, strict=True) if label >= 0])
    true, found = ([[pair[side] for pair in row] for row in pairs] for side in (0, 1))
    *scores, count = precision_recall_fscore_support(true, found, average="micro")
    return dict(zip(("entity_precision", "entity_recall", "entity_f1", "entities"), (*scores, count), strict=True))


FAMILIES = {
    "classes": (classes, expected_classes, MODES),
    "sides": (sides, expected_sides, MODES),
    "values": (values, expected_values, MODES),
    "entities": (entities, expected_entities, MODES),
    "language": (language, expected_language, MODES),
    "questions": (questions, expected_questions, WHOLE),
    "pixels": (pixels, expected_pixels, MODES),
    "rankings": (rankings, expected_rankings, MODES),
    "functions": (functions, expected_functions, WHOLE),
    "groups": (groups, expected_groups, WHOLE),
}


@pytest.fixture(scope="module")
def expected():
    return {name: truth() for name, (_, truth, _) in FAMILIES.items()}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    ("family", "mode"), [(family, mode) for family, (*_, supported) in FAMILIES.items() for mode in supported]
)
def test_every_mode_and_batch_size_equals_the_loop(expected, family, mode, batch):
    make, _, _ = FAMILIES[family]
    result = make(per_device_eval_batch_size=batch, **MODES[mode]).evaluate()
    found = {key: result[f"eval_{key}"] for key in expected[family]}
    assert found == pytest.approx(expected[family], rel=1e-12)
    assert all(type(value) is float for value in found.values())


@pytest.mark.parametrize("family", ["questions", "functions"])
def test_metrics_of_all_rows_refuse_to_stream(family):
    with pytest.raises(ValueError, match="cannot be computed step by step"):
        FAMILIES[family][0](per_device_eval_batch_size=3, batch_eval_metrics=True).evaluate()


def test_packed_positions_are_the_same_labels(expected):
    packed = {"collator": pack_spans(tiny.pad), "label_names": ["labels"], "loss": question_answering_loss}
    trainer = questions(**packed, per_device_eval_batch_size=3)
    assert trainer.evaluate()["eval_exact_match"] == expected["questions"]["exact_match"]


def two_ranks():
    return {
        f"{name} {mode} {batch}": make(per_device_eval_batch_size=batch, **options).evaluate()
        for name, (make, _, supported) in FAMILIES.items()
        for mode, options in supported.items()
        for batch in BATCHES
    }


def test_two_processes_equal_the_loop(expected):
    for results in tiny.run_distributed(two_ranks):
        for name, result in results.items():
            truth = expected[name.split()[0]]
            assert {key: result[f"eval_{key}"] for key in truth} == pytest.approx(truth, rel=1e-12), name


# --- one evaluation after another -------------------------------------------------------------------------------------


def test_sampler_by_length_is_detected():
    with pytest.raises(ValueError, match="reorders"):
        groups(**tiny.GROUPED).evaluate()


def test_by_dataset_selects_the_metric_by_number_of_rows():
    metric = by_dataset(build(classification(3), num_samples=10), build(few=classification(3), num_samples=4))
    datasets = {"all": CLASSES, "part": CLASSES[:4]}
    model = tiny.model("bert_cls").eval()
    result = tiny.trainer(model, eval_rows=datasets, reducer=argmax, metric=metric).evaluate()
    assert {"eval_all_accuracy", "eval_part_few_accuracy"} <= result.keys()


@pytest.mark.parametrize("mode", MODES)
def test_float32_logits(expected, mode):
    trainer = language(torch.float32, per_device_eval_batch_size=3, **MODES[mode])
    for result in (trainer.evaluate(), trainer.evaluate()):
        assert result["eval_perplexity"] == pytest.approx(expected["language"]["perplexity"], rel=1e-6)
        assert result["eval_tokens"] == expected["language"]["tokens"]


def test_eval_loss_of_the_trainer_differs_from_the_mean_over_tokens(expected):
    losses = [language(per_device_eval_batch_size=batch).evaluate()["eval_loss"] for batch in (3, 8)]
    assert all(abs(loss - expected["language"]["nll_loss"]) > 1e-4 for loss in losses)


class InterruptionError(Exception):
    pass


def test_streaming_after_an_interrupted_evaluation(expected):
    trainer = language(per_device_eval_batch_size=3, batch_eval_metrics=True)
    reducer, calls = trainer.preprocess_logits_for_metrics, []

    def interrupting(logits, labels):
        calls.append(len(labels))
        if len(calls) == 3:
            raise InterruptionError
        return reducer(logits, labels)

    trainer.preprocess_logits_for_metrics = interrupting
    with pytest.raises(InterruptionError):
        trainer.evaluate()
    trainer.preprocess_logits_for_metrics = reducer
    with pytest.raises(ValueError, match="interrupted"):
        trainer.evaluate()
    assert trainer.evaluate()["eval_nll_loss"] == pytest.approx(expected["language"]["nll_loss"], rel=1e-12)


def test_streaming_without_num_samples_is_refused():
    with pytest.raises(ValueError, match="num_samples"):
        language(metric=language_modeling(), batch_eval_metrics=True, per_device_eval_batch_size=4).evaluate()


@pytest.mark.parametrize("mode", MODES)
def test_predict_returns_the_same_scores(expected, mode):
    result = language(per_device_eval_batch_size=3, **MODES[mode]).predict(LANGUAGE).metrics
    assert result["test_perplexity"] == pytest.approx(expected["language"]["perplexity"], rel=1e-12)


def test_error_without_a_reducer_names_it():
    with pytest.raises(ValueError, match=r"sample_sums.*got predictions one array \(10, \d+, 64\)"):
        language(reducer=None, metric=language_modeling()).evaluate()


@pytest.mark.parametrize(("arguments", "kept"), [(best_model_kwargs("perplexity"), min), ({}, max)])
def test_best_checkpoint_is_kept_and_its_state_written(arguments, kept):
    arguments = arguments or {"metric_for_best_model": "perplexity"}  # the Trainer's guess: greater is better
    trainer = tiny.trainer(
        tiny.model("llama", seed=1),
        tiny.lm_rows(8),
        reducer=partial(sample_sums, shift=1),
        metric=language_modeling(),
        eval_rows=LANGUAGE,
        learning_rate=0.1,
        num_train_epochs=3,
        save_strategy="epoch",
        eval_strategy="epoch",
        load_best_model_at_end=True,
        **arguments,
    )
    trainer.train()
    seen = tiny.logged(trainer, "eval_perplexity")
    assert len(set(seen)) == 3
    assert trainer.state.best_metric == kept(seen)
    checkpoint = max(Path(trainer.args.output_dir).glob("checkpoint-*"))
    written = json.loads((checkpoint / "trainer_state.json").read_text())
    assert [entry["eval_perplexity"] for entry in written["log_history"] if "eval_perplexity" in entry] == seen


# --- generation -------------------------------------------------------------------------------------------------------


class Letters:
    """A tokenizer: a word an id, special ids left out."""

    def batch_decode(self, rows, skip_special_tokens=False):
        return [" ".join(f"w{place}" for place in row if place > 2) for row in rows]


def generating(**options):
    return tiny.trainer(
        tiny.model("t5").eval(),
        eval_rows=tiny.lm_rows(6, seed=7, prompt=False),
        reducer=generated_ids,
        metric=build(text_match(Letters()), transcription(Letters()), num_samples=6),
        trainer_class=Seq2SeqTrainer,
        collator=tiny.pad_seq2seq,
        arguments_class=Seq2SeqTrainingArguments,
        predict_with_generate=True,
        generation_max_length=6,
        **options,
    )


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("mode", MODES)
def test_generated_texts_equal_the_loop(mode, batch):
    trainer = generating(per_device_eval_batch_size=batch, **MODES[mode])
    result = trainer.evaluate()
    model, edits, words = tiny.model("t5").eval(), 0, 0
    for row in tiny.lm_rows(6, seed=7, prompt=False):
        ids = model.generate(input_ids=row["input_ids"][None], max_length=6)[0].tolist()
        found, reference = [place for place in ids if place > 2], row["labels"].tolist()
        edits, words = edits + distance(found, reference), words + len(reference)
    assert result["eval_wer"] == pytest.approx(edits / words, rel=1e-12)


def distance(left, right):
    before = list(range(len(right) + 1))
    for at, one in enumerate(left, 1):
        row = [at]
        for place, other in enumerate(right, 1):
            row.append(min(before[place] + 1, row[-1] + 1, before[place - 1] + (one != other)))
        before = row
    return before[-1]
