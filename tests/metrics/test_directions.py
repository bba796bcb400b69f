import pytest

from metrics import Metric, best_model_kwargs, build, directions, language, language_modeling

from .evaluations import columns, evaluation, samples

OWN = Metric(statistics=dict, score=dict, directions={"gain": True, "regret": False, "size": None, "f1_{label}": True})


@pytest.mark.parametrize(
    ("key", "greater"),
    [
        ("perplexity", False),
        ("nll_loss", False),
        ("token_accuracy", True),
        ("top_5_accuracy", True),
        ("top_10_accuracy", True),
        ("sequence_accuracy", True),
        ("eval_perplexity", False),
        ("lm_perplexity", False),
        ("eval_lm_top_5_accuracy", True),
        ("eval_wiki_text_nll_loss", False),
    ],
)
def test_known_keys(key, greater):
    expected = {"metric_for_best_model": key, "greater_is_better": greater}
    assert best_model_kwargs(key) == expected
    assert best_model_kwargs(key, build(language_modeling(), lm=language_modeling())) == expected


@pytest.mark.parametrize("key", ["perplexty", "myperplexity", "loss", "", "perplexity_", "top__accuracies", "eval_"])
def test_unknown_keys_list_the_known(key):
    with pytest.raises(ValueError, match=r"is not known.*nll_loss, perplexity, token_accuracy, top_\{k\}_accuracy"):
        best_model_kwargs(key)


@pytest.mark.parametrize("key", ["tokens", "samples", "entropy", "eval_tokens", "lm_samples"])
def test_keys_without_direction_raise_and_are_not_listed(key):
    with pytest.raises(ValueError, match="no better or worse") as error:
        best_model_kwargs(key)
    known = str(error.value).split("can be chosen by ")[1].split(", ")
    assert "perplexity" in known
    assert not {"tokens", "samples", "entropy"} & {*known}


def test_a_users_metric_brings_its_own():
    assert best_model_kwargs("regret", OWN) == {"metric_for_best_model": "regret", "greater_is_better": False}
    assert best_model_kwargs("eval_a_gain", build(a=OWN))["greater_is_better"] is True
    assert best_model_kwargs("f1_PER", OWN)["greater_is_better"] is True
    with pytest.raises(ValueError, match=r"'perplexity' is not known.*gain, regret, f1_\{label\}$"):
        best_model_kwargs("perplexity", OWN)
    with pytest.raises(ValueError, match="not known"):
        best_model_kwargs("gain")
    with pytest.raises(ValueError, match="not known"):
        best_model_kwargs("b_gain", build(a=OWN))


def test_a_whole_name_goes_before_a_prefix_and_a_shorter_one():
    metric = Metric(statistics=dict, score=dict, directions={"error": False, "no_error": True})
    assert best_model_kwargs("no_error", metric)["greater_is_better"] is True
    assert best_model_kwargs("other_error", metric)["greater_is_better"] is False


def test_every_key_that_is_returned_has_a_direction():
    predictions = columns(samples(5))
    predictions |= {"bytes": predictions["tokens"], "characters": predictions["tokens"]}
    scores = language_modeling()(evaluation(predictions, predictions["nll"]))
    assert len(scores) == len(language.DIRECTIONS)
    for key in scores:
        entry = "top_{k}_accuracy" if key == "top_5_accuracy" else key
        assert directions.DIRECTIONS[entry] is language.DIRECTIONS[entry]


def test_names_ending_in_loss_agree_with_the_trainers_guess():
    assert all(direction is False for key, direction in directions.DIRECTIONS.items() if key.endswith("loss"))
