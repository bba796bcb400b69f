import re

import pytest

from metrics import Metric, best_model, best_model_kwargs, build, language_modeling
from metrics._core import keys as _keys

OWN = Metric(
    statistics=dict, score=dict, higher_is_better={"gain": True, "regret": False, "size": None, "f1_{label}": True}
)


SMALLER = ["perplexity", "nll_loss", "eval_perplexity", "lm_perplexity", "eval_wiki_text_nll_loss"]
GREATER = ["token_accuracy", "top_5_accuracy", "top_10_accuracy", "sequence_accuracy", "eval_lm_top_5_accuracy"]


@pytest.mark.parametrize(("key", "greater"), [*((key, False) for key in SMALLER), *((key, True) for key in GREATER)])
def test_known_keys(key, greater):
    expected = {"metric_for_best_model": key, "greater_is_better": greater}
    assert best_model_kwargs(key) == expected
    assert best_model_kwargs(key, build(language_modeling(), lm=language_modeling())) == expected


def test_hundreds_of_names_need_no_regular_expression(monkeypatch):
    """Python keeps 512 compiled ones: beyond them each look at each name would compile its own."""
    names = [f"f1_{label}" for label in range(1000)]
    monkeypatch.setattr(_keys.re, "fullmatch", None)
    assert _keys.find("f1_999", names) == "f1_999"
    assert _keys.find("eval_f1_999", names, prefixed=True) == "f1_999"
    assert _keys.find("eval_f1_999", names) is None
    assert _keys.find("_f1_999", names, prefixed=True) is None
    assert _keys.collision(names, ["f1_1000"]) is None


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("perplexty", "perplexity"),
        ("myperplexity", "perplexity"),
        ("perplexity_", "perplexity"),
        ("top__accuracies", "top_{k}_accuracy"),
        ("eval_f1_marco", "f1_macro"),
        ("nl_loss", "nll_loss"),
    ],
)
def test_error_for_an_unknown_key_suggests_the_nearest(key, meant):
    with pytest.raises(ValueError, match=rf"is unknown; did you mean .*{re.escape(meant)}.*\?$"):
        best_model_kwargs(key)


@pytest.mark.parametrize("key", ["", "eval_", "val_ppl"])
def test_error_without_a_near_key_lists_some(key):
    with pytest.raises(ValueError, match=r"is unknown; .* selected by loss, nll_loss, perplexity, .* more$") as error:
        best_model_kwargs(key)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("metric", [None, OWN])
@pytest.mark.parametrize("key", ["loss", "eval_loss", "eval_some_data_loss"])
def test_the_loss_is_the_trainers_own(key, metric):
    assert best_model_kwargs(key, metric) == {"metric_for_best_model": key, "greater_is_better": False}


@pytest.mark.parametrize("key", ["tokens", "samples", "entropy", "eval_tokens", "lm_samples"])
def test_keys_without_direction_raise_and_are_not_listed(key):
    with pytest.raises(ValueError, match="neither better greater nor better smaller; ") as error:
        best_model_kwargs(key)
    assert not {"tokens", "samples", "entropy"} & {*re.split(r"\W+", str(error.value).partition(";")[2])}


def test_directions_of_a_user_metric_are_used():
    assert best_model_kwargs("regret", OWN) == {"metric_for_best_model": "regret", "greater_is_better": False}
    assert best_model_kwargs("eval_a_gain", build(a=OWN))["greater_is_better"] is True
    assert best_model_kwargs("f1_PER", OWN)["greater_is_better"] is True
    with pytest.raises(ValueError, match=r"'perplexity' is unknown.*gain, regret, f1_\{label\}$"):
        best_model_kwargs("perplexity", OWN)
    with pytest.raises(ValueError, match="is unknown"):
        best_model_kwargs("gain")
    with pytest.raises(ValueError, match="is unknown"):
        best_model_kwargs("b_gain", build(a=OWN))


def test_exact_key_has_precedence_over_a_prefixed_one():
    metric = Metric(statistics=dict, score=dict, higher_is_better={"error": False, "no_error": True})
    assert best_model_kwargs("no_error", metric)["greater_is_better"] is True
    assert best_model_kwargs("other_error", metric)["greater_is_better"] is False
    assert best_model_kwargs("teacher_forced_wer")["greater_is_better"] is False


def test_names_ending_in_loss_agree_with_the_trainers_guess():
    assert all(direction is False for key, direction in best_model.HIGHER_IS_BETTER.items() if key.endswith("loss"))
