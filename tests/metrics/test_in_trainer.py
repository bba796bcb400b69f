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
from torchmetrics.functional.text import word_error_rate
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

import metrics
import reducers
from lossfns import question_answering_loss
from lossfns.collators.labels import pack_spans
from tests import tiny

MODES = {
    "concatenated": {},
    "lists": {"eval_do_concat_batches": False},
    "accumulated": {"eval_accumulation_steps": 1},
    "accumulated lists": {"eval_accumulation_steps": 2, "eval_do_concat_batches": False},
    "streaming": {"batch_eval_metrics": True},
}
ROWS = 10
BATCHES = (1, 3)
WHOLE = {name: options for name, options in MODES.items() if name != "streaming"}
GENERATOR = np.random.default_rng(0)
TABLE = torch.from_numpy(GENERATOR.integers(1, 5, tiny.VOCAB))


def alone(model, row, **inputs):
    with torch.no_grad():
        return model(input_ids=row["input_ids"][None], **inputs)


def zero(outputs, labels, num_items_in_batch=None):
    """A loss for models that have none."""
    return 0 * outputs["logits"].sum()


def stack(rows):
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


LANGUAGE = tiny.lm_rows(ROWS, seed=3)


def language(dtype=torch.float64, **options):
    reducer = reducers.combine(
        sums=partial(reducers.sample_sums, shift=1, top_k=5, entropy=True),
        ranks=partial(reducers.label_rank, shift=1),
        text=partial(reducers.text_lengths, shift=1, lengths={"bytes": TABLE}),
        answer=partial(reducers.answer_logits, shift=1, token_ids=range(32)),
    )
    answers = metrics.with_labels_from(metrics.classification(32), "answers")
    metric = metrics.build(metrics.language_modeling(), metrics.label_ranking((5,)), answer=answers, num_samples=ROWS)
    model = tiny.model("llama", dtype=dtype).eval()
    return tiny.trainer(model, eval_rows=LANGUAGE, **{"reducer": reducer, "metric": metric} | options)


def expected_language():
    model = tiny.model("llama").eval()
    nll, ranks, size, answers, sequences, entropies = [], [], 0, [], [], []
    for row in LANGUAGE:
        pairs = list(zip(alone(model, row).logits[0], row["labels"][1:].tolist(), strict=False))
        pairs = [(x, label) for x, label in pairs if label != tiny.IGNORED]
        nll += [float(x.logsumexp(0) - x[label]) for x, label in pairs]
        entropies += [float(-(x.softmax(0) * x.log_softmax(0)).sum()) for x, _ in pairs]
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
        **dict.fromkeys(("hit_at_5", "top_5_accuracy"), sum(rank < 5 for rank in ranks) / len(ranks)),
        "entropy": math.fsum(entropies) / len(nll),
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
        reducer=partial(reducers.spans, max_length=4),
        metric=metrics.extractive_qa(EXAMPLES, features),
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


AREAS = torch.from_numpy(np.random.default_rng(1).integers(0, 4, (ROWS, 8, 8)))
AREAS[:, :, 0] = tiny.IGNORED
PICTURES = [row | {"labels": area} for row, area in zip(tiny.image_rows(ROWS, seed=5), AREAS, strict=True)]


stacked = partial(tiny.trainer, loss=zero, collator=stack)
areas = metrics.build(metrics.segmentation(4), num_samples=ROWS)
pixels = partial(stacked, Pixels(), eval_rows=PICTURES, reducer=reducers.segmentation_counts, metric=areas)


def expected_pixels():
    with torch.no_grad():
        logits = Pixels()(stack(PICTURES)["pixel_values"])["logits"]
    large = torch.nn.functional.interpolate(logits, size=(8, 8), mode="bilinear", align_corners=False)
    there = AREAS != tiny.IGNORED
    pair = AREAS[there].numpy(), large.argmax(1)[there].numpy()
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


ranker = partial(stacked, Ranker())
rankings = partial(ranker, eval_rows=RANKED, metric=metrics.build(metrics.retrieval((3,)), num_samples=ROWS))
values = partial(ranker, eval_rows=RANKED, metric=metrics.build(metrics.regression(), num_samples=ROWS))


def scored_candidates():
    """Scores and labels of the candidates."""
    rows = stack(RANKED)
    return Ranker()(rows["features"])["logits"].detach().numpy(), rows["labels"].numpy()


def expected_rankings():
    found, labels = scored_candidates()
    there = (labels > 0).any(1)
    return {"ndcg_at_3": ndcg_score(labels[there], found[there], k=3), "queries": there.sum()}


TOKENS = tiny.token_rows(ROWS, seed=6)


tagger = partial(
    tiny.trainer, tiny.model("bert_token").eval(), eval_rows=TOKENS, reducer=partial(reducers.argmax, shift=0)
)
macro = partial(jaccard_score, average="macro")
functions = partial(tagger, metric=metrics.from_sklearn(macro, kind="ids", greater_is_better=True))


def tagged():
    """The label and the prediction of each token, a list per sample."""
    model = tiny.model("bert_token").eval()
    for row in TOKENS:
        ids, labels = alone(model, row).logits[0].argmax(-1).tolist(), row["labels"].tolist()
        yield [(label, place) for label, place in zip(labels, ids, strict=True) if label >= 0]


def expected_functions():
    return {"jaccard_score": macro(*zip(*(pair for row in tagged() for pair in row), strict=True))}


CLASSES = tiny.class_rows(ROWS, seed=8)


classifier = partial(tiny.trainer, tiny.model("bert_cls").eval(), eval_rows=CLASSES)
classes = partial(
    classifier, reducer=reducers.probabilities, metric=metrics.build(metrics.classification(3), num_samples=ROWS)
)


def classified():
    """Labels, and the probabilities of each sample."""
    model = tiny.model("bert_cls").eval()
    chances = [alone(model, row).logits[0].softmax(-1).numpy() for row in CLASSES]
    return np.array([int(row["labels"]) for row in CLASSES]), np.array(chances)


def expected_classes():
    labels, chances = classified()
    return {
        "accuracy": accuracy_score(labels, chances.argmax(-1)),
        "f1_macro": f1_score(labels, chances.argmax(-1), average="macro"),
        "log_loss": log_loss(labels, chances, labels=range(3)),
    }


def groups(**options):
    names, labels = [f"group {place % 3}" for place in range(ROWS)], [int(row["labels"]) for row in CLASSES]
    metric = metrics.build(metrics.classification(3), metrics.by_group(metrics.classification(3), names, labels=labels))
    return classifier(reducer=reducers.argmax, metric=metric, **options)


def expected_groups():
    labels, chances = classified()
    right = labels == chances.argmax(-1)
    return {f"accuracy/group {group}": right[group::3].mean() for group in range(3)}


SIDES = [row | {"labels": row["labels"].clamp(max=1)} for row in RANKED]


sides = partial(
    ranker,
    eval_rows=SIDES,
    reducer=partial(reducers.probabilities, multi_label=True),
    metric=metrics.build(metrics.multi_label(6), num_samples=ROWS),
)


def expected_sides():
    found, labels = scored_candidates()
    score = partial(f1_score, labels.clip(max=1), found >= 0, zero_division=0)
    return {f"f1_{average}": score(average=average) for average in ("micro", "macro", "samples")}


def expected_values():
    found, labels = scored_candidates()
    return {
        "mse": mean_squared_error(labels, found),
        "r2": r2_score(labels, found),
        "pearson": np.mean([stats.pearsonr(*pair).statistic for pair in zip(found.T, labels.T, strict=True)]),
    }


TAGS = {0: "O", 1: "B-X", 2: "I-X"}


entities = partial(tagger, metric=metrics.build(metrics.entity_f1(TAGS, scheme="IOB2", lenient=True), num_samples=ROWS))


def expected_entities():
    true, found = ([[TAGS[pair[side]] for pair in row] for row in tagged()] for side in (0, 1))
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


def test_packed_positions_are_the_same_labels(expected):
    packed = {"collator": pack_spans(tiny.pad), "label_names": ["labels"], "loss": question_answering_loss}
    trainer = questions(**packed, per_device_eval_batch_size=3)
    assert trainer.evaluate()["eval_exact_match"] == expected["questions"]["exact_match"]


def two_ranks():
    return {
        f"{name} {mode}": make(per_device_eval_batch_size=3, **options).evaluate()
        for name, (make, _, supported) in FAMILIES.items()
        for mode, options in supported.items()
        if mode not in ("accumulated", "lists")  # "accumulated lists" is both
    }


def test_two_processes_equal_the_loop(expected):
    for results in tiny.run_distributed(two_ranks):
        for name, result in results.items():
            truth = expected[name.split()[0]]
            assert {key: result[f"eval_{key}"] for key in truth} == pytest.approx(truth, rel=1e-12), name


def test_sampler_by_length_is_detected():
    with pytest.raises(ValueError, match="reorders"):
        groups(**tiny.GROUPED).evaluate()


def test_by_dataset_selects_the_metric_by_number_of_rows():
    metric = metrics.by_dataset(
        metrics.build(metrics.classification(3), num_samples=10),
        metrics.build(few=metrics.classification(3), num_samples=4),
    )
    datasets = {"all": CLASSES, "part": CLASSES[:4]}
    result = classifier(eval_rows=datasets, reducer=reducers.argmax, metric=metric).evaluate()
    assert {"eval_all_accuracy", "eval_part_few_accuracy"} <= result.keys()


@pytest.mark.parametrize("mode", ["concatenated", "streaming"])
def test_float32_logits(expected, mode):
    trainer = language(torch.float32, per_device_eval_batch_size=3, **MODES[mode])
    for result in (trainer.evaluate(), trainer.evaluate()):
        assert result["eval_perplexity"] == pytest.approx(expected["language"]["perplexity"], rel=1e-6)
        assert result["eval_tokens"] == expected["language"]["tokens"]


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


@pytest.mark.parametrize("mode", ["lists", "streaming"])
def test_predict_returns_the_same_scores(expected, mode):
    result = language(per_device_eval_batch_size=3, **MODES[mode]).predict(LANGUAGE).metrics
    assert result["test_perplexity"] == pytest.approx(expected["language"]["perplexity"], rel=1e-12)


def test_error_without_a_reducer_names_it():
    with pytest.raises(ValueError, match=r"sample_sums.*one array \(10, \d+, 64\)"):
        language(reducer=None, metric=metrics.language_modeling()).evaluate()


@pytest.mark.parametrize(("arguments", "kept"), [(metrics.best_model_kwargs("perplexity"), min), ({}, max)])
def test_best_checkpoint_is_kept_and_its_state_written(arguments, kept):
    arguments = arguments or {"metric_for_best_model": "perplexity"}  # the Trainer's guess: greater is better
    trainer = tiny.trainer(
        tiny.model("llama", seed=1),
        tiny.lm_rows(8),
        reducer=partial(reducers.sample_sums, shift=1),
        metric=metrics.language_modeling(),
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


class Letters:
    """A tokenizer: a word an id, special ids left out."""

    def batch_decode(self, rows, skip_special_tokens=False):
        return [" ".join(f"w{place}" for place in row if place > 2) for row in rows]


def generating(**options):
    return tiny.trainer(
        tiny.model("t5").eval(),
        eval_rows=tiny.lm_rows(6, seed=7, prompt=False),
        reducer=reducers.generated_ids,
        metric=metrics.build(metrics.text_match(Letters()), metrics.transcription(Letters()), num_samples=6),
        trainer_class=Seq2SeqTrainer,
        collator=tiny.pad_seq2seq,
        arguments_class=Seq2SeqTrainingArguments,
        predict_with_generate=True,
        generation_max_length=6,
        **options,
    )


@pytest.mark.parametrize("mode", MODES)
def test_generated_texts_equal_the_loop(mode):
    result = generating(per_device_eval_batch_size=4, **MODES[mode]).evaluate()
    rows, model = tiny.lm_rows(6, seed=7, prompt=False), tiny.model("t5").eval()
    found = [model.generate(input_ids=row["input_ids"][None], max_length=6)[0].tolist() for row in rows]
    texts = (Letters().batch_decode(ids) for ids in (found, [row["labels"].tolist() for row in rows]))
    assert result["eval_wer"] == pytest.approx(float(word_error_rate(*texts)), rel=1e-6)
