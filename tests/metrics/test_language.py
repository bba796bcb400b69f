import math
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metrics import language, language_modeling
from metrics._core.keys import find
from metrics.calibration import BINS
from metrics.ranking import COLUMNS as RANKS
from reducers import argmax, calibration_bins, combine, label_rank, sample_sums, text_lengths

from .evaluations import assert_every_mode, assert_modes_agree, columns, evaluation, samples, sized, truth

ROWS = samples(40)
COLUMNS = columns(ROWS)
LABELS = np.full((40, 9), -100)
BASIC = {name: COLUMNS[name] for name in language.NEEDED}


def score(predictions, labels=LABELS):
    return language_modeling()(evaluation(predictions, labels))


def test_scores_equal_a_loop_over_the_tokens():
    assert score(COLUMNS) == pytest.approx(truth(ROWS), rel=1e-14, abs=0)


class MeanOfBatchMeans:
    """What `exp(eval_loss)` does: the mean over batches of the means over tokens."""

    def __init__(self):
        self.results = []

    def __call__(self, eval_pred, compute_result=True):
        lists = isinstance(eval_pred.label_ids, list)
        for part in eval_pred.predictions if lists else [eval_pred.predictions]:
            self.results.append(float(part["nll"].sum() / part["tokens"].sum()))
        return {"nll_loss": float(np.mean(self.results))} if compute_result else {}


def test_a_mean_of_batch_means_is_caught():
    expected = {"nll_loss": truth(ROWS)["nll_loss"]}
    assert_modes_agree(MeanOfBatchMeans, COLUMNS, LABELS, [0, 40], expected)
    with pytest.raises(AssertionError):
        assert_modes_agree(MeanOfBatchMeans, COLUMNS, LABELS, [0, 8, 40], expected)


@settings(max_examples=60)
@given(count=st.integers(2, 30), seed=st.integers(0, 2**32 - 1), data=st.data())
def test_no_split_order_or_padding_changes_a_score(count, seed, data):
    rows = samples(count, seed)
    rows[0] = [(0.5, True, True, 0.25)]  # at least one token
    order = data.draw(st.permutations(range(count)))
    bounds = [0, *sorted(data.draw(st.sets(st.integers(1, count - 1)))), count]
    labels = np.zeros((count, data.draw(st.integers(1, 20))), dtype=np.int64)
    shuffled = columns([rows[index] for index in order])
    assert_modes_agree(sized(language_modeling(), count), shuffled, labels, bounds, truth(rows))


@pytest.mark.parametrize("predictions", [{"sums": BASIC, "ids": LABELS}, {**BASIC, "ids": LABELS}])
def test_columns_are_found_at_the_top_and_one_level_down(predictions):
    assert score(predictions) == score(BASIC)


def test_columns_further_down_are_not_looked_for():
    with pytest.raises(ValueError, match=r"nll, tokens, .* are missing.*got predictions a\.b\.nll"):
        score({"a": {"b": BASIC}})


def test_keys_follow_the_columns():
    basic = {"nll_loss", "perplexity", "token_accuracy", "sequence_accuracy", "tokens", "samples"}
    assert set(score(BASIC)) == basic
    several = {**BASIC, "correct_top_3": COLUMNS["correct"], "correct_top_10": COLUMNS["correct_top_5"]}
    scores = score(several)
    assert set(scores) == basic | {"top_3_accuracy", "top_10_accuracy"}
    assert scores["top_3_accuracy"] == scores["token_accuracy"]
    assert set(score({**BASIC, "entropy": COLUMNS["entropy"]})) == basic | {"entropy"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_tensors_of_any_dtype_are_summed_in_float64(dtype):
    whole = {name: torch.from_numpy(column).round().to(dtype) for name, column in BASIC.items()}
    scores = score(whole, torch.from_numpy(LABELS))
    exact = {name: sum(Fraction(value) for value in column.tolist()) for name, column in whole.items()}
    assert scores["nll_loss"] == pytest.approx(float(exact["nll"] / exact["tokens"]), rel=1e-15, abs=0)
    assert scores["tokens"] == float(exact["tokens"])


def test_counts_are_exact_where_float32_stops_counting():
    counts = np.full(5, 2.0**23, dtype=np.float32)
    counts[1::2] = 1.0
    scores = score(dict.fromkeys(language.NEEDED, counts), np.zeros(5))
    assert scores["tokens"] == 3 * 2**23 + 2
    assert np.float32(2**24) + np.float32(1) == 2**24  # what a float32 counter would do


def test_perplexity_that_overflows_is_infinite():
    scores = score({**BASIC, "nll": np.full(40, 1e9)})
    assert scores["perplexity"] == math.inf
    assert math.isfinite(scores["nll_loss"])
    with pytest.raises(OverflowError):
        math.exp(scores["nll_loss"])


def test_an_infinite_token_is_an_infinite_perplexity_and_a_nan_stays_one():
    nll = BASIC["nll"].copy()
    nll[3] = math.inf
    assert score({**BASIC, "nll": nll})["perplexity"] == math.inf
    nll[3] = math.nan
    assert math.isnan(score({**BASIC, "nll": nll})["perplexity"])


@pytest.mark.parametrize("count", [0, 4])
def test_without_tokens_ratios_are_nan_and_counts_zero(count):
    empty = columns([[]] * count)
    assert empty["all_correct"].tolist() == [1.0] * count  # all() of nothing
    scores = score(empty, np.full((count, 3), -100))
    assert scores.pop("tokens") == 0.0
    assert scores.pop("samples") == count
    assert all(math.isnan(value) for value in scores.values())


@pytest.mark.parametrize("said", [0.0, 1.0])
def test_samples_without_tokens_do_not_count_as_sequences(said):
    rows = [[(1.0, True, True, 0.0)], [], [(1.0, False, True, 0.0)]]
    predictions = columns(rows) | {"all_correct": np.array([1.0, said, 0.0])}
    assert score(predictions, np.zeros((3, 2)))["sequence_accuracy"] == 0.5


def test_error_for_missing_columns_names_them_and_their_reducers():
    predictions = {"ids": np.zeros((40, 9), np.int32), "sums": {"nll": COLUMNS["nll"], "entropy": COLUMNS["entropy"]}}
    with pytest.raises(ValueError, match="of which tokens, correct, all_correct are missing") as error:
        score(predictions)
    message = str(error.value)
    assert "ids (40, 9) int32, sums.nll (40,) float64" in message
    assert "needs the columns nll, tokens, correct, all_correct" in message
    assert "partial(sample_sums, shift=1)" in message
    assert "correct_top_{k}: sample_sums with top_k=k" in message


@pytest.mark.parametrize(
    ("predictions", "named"),
    [
        (np.zeros((40, 9, 7), np.float32), r"one array \(40, 9, 7\) float32"),
        ((), "nothing"),
        ((LABELS, LABELS), r"1 \(40"),
    ],
)
def test_predictions_without_names_are_described(predictions, named):
    with pytest.raises(ValueError, match=f"got predictions .*{named}"):
        score(predictions)


def test_a_column_twice_is_ambiguous():
    with pytest.raises(ValueError, match="two columns are called 'nll'"):
        score({"all": BASIC, "answer": BASIC})


def test_columns_must_have_one_number_per_sample():
    with pytest.raises(ValueError, match=r"'correct_top_5' must be one sum per sample, .* got shape \(40, 2\)"):
        score({**BASIC, "correct_top_5": np.zeros((40, 2))})


def test_scores_of_a_stack_of_sums_are_the_scores_of_each():
    metric = language_modeling()
    weights = np.random.default_rng(1).integers(0, 3, (2, 7, 40))
    rows = metric.columns(evaluation(COLUMNS, LABELS))
    stack = metric.scores({name: weights @ column for name, column in rows.items()})
    for place in np.ndindex(2, 7):
        repeated = [row for row, times in zip(ROWS, weights[place], strict=True) for _ in range(times)]
        here = {key: values[place] for key, values in stack.items()}
        assert here == pytest.approx(truth(repeated), rel=1e-12, abs=0)


def test_bits_of_a_byte_and_a_character():
    rows = samples(8)
    predictions = columns(rows) | {"bytes": np.arange(8), "characters": np.arange(8) // 2}
    bits = math.fsum(token[0] for row in rows for token in row) / math.log(2)
    expected = {"bits_per_byte": bits / 28, "bits_per_character": bits / 12}
    assert_every_mode(language_modeling(), predictions, np.zeros(8), expected)
    assert "bits_per_byte" not in language_modeling()(evaluation(columns(rows), np.zeros(8)))


TOKEN_LOGITS = torch.randn(3, 6, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
TOKEN_LABELS = torch.tensor([[1, 2, 3, 4, 5, 6], [-100, 2, 9, 4, -100, -100], [-100] * 6])


def test_reducers_of_language_return_what_the_metrics_read_and_nothing_else():
    given = TOKEN_LOGITS, TOKEN_LABELS
    emitted = sample_sums(*given, shift=1, top_k=(2, 5), entropy=True) | label_rank(*given, shift=1)
    lengths = {"bytes": torch.arange(11), "characters": torch.arange(11)}
    emitted |= text_lengths(*given, lengths=lengths, shift=1) | calibration_bins(*given, shift=1)
    known = {*language.COLUMNS, *RANKS, *BINS}
    assert {find(name, known) for name in emitted} == known
    assert set(sample_sums(*given, shift=1)) == set(language.NEEDED)


@pytest.mark.parametrize("nested", [False, True])
def test_the_options_named_in_the_message_bring_the_scores(nested):
    reducer = partial(sample_sums, shift=1, top_k=5, entropy=True)
    reducer = combine(ids=partial(argmax, shift=1), sums=reducer) if nested else reducer
    scores = language_modeling()(evaluation(reducer(TOKEN_LOGITS, TOKEN_LABELS), TOKEN_LABELS))
    predicted = [TOKEN_LOGITS[0, place].log_softmax(0) for place in range(5)] + [
        TOKEN_LOGITS[1, place].log_softmax(0) for place in range(3)
    ]
    targets = [2, 3, 4, 5, 6, 2, 9, 4]
    pairs = list(zip(predicted, targets, strict=True))
    expected = {
        "nll_loss": -sum(float(p[y]) for p, y in pairs) / 8,
        "token_accuracy": sum(int(p.argmax()) == y for p, y in pairs) / 8,
        "top_5_accuracy": sum(y in p.topk(5).indices.tolist() for p, y in pairs) / 8,
        "entropy": sum(float(-(p.exp() * p).sum()) for p, _ in pairs) / 8,
        "sequence_accuracy": 0.0,
        "tokens": 8.0,
        "samples": 3.0,
    }
    assert {key: scores[key] for key in expected} == pytest.approx(expected, rel=1e-12)
