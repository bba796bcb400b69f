from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import EvalPrediction

from metrics import Metric
from metrics._core.evaluation import batches, named_columns

from .evaluations import evaluation

IDS = np.arange(12).reshape(4, 3)


def only(eval_pred):
    (batch,) = batches(eval_pred)
    return batch


def test_the_trainers_own_object_is_taken():
    batch = only(EvalPrediction(predictions=IDS, label_ids=IDS[:, 0]))
    assert batch.rows == 4
    assert batch.predictions is IDS


def test_nested_predictions_keep_their_structure():
    predictions = {"sums": {"nll": IDS[:, 0]}, "pair": (IDS, IDS[:, 1])}
    batch = only(evaluation(predictions, IDS))
    assert batch.predictions["sums"]["nll"].tolist() == IDS[:, 0].tolist()
    assert [array.shape for array in batch.predictions["pair"]] == [(4, 3), (4,)]


def test_labels_are_taken_from_a_dict_and_tuples_stay():
    weights = np.ones(99)  # not labels, so not looked at
    assert only(evaluation(IDS, {"labels": IDS[:, 1], "weights": weights})).labels.tolist() == IDS[:, 1].tolist()
    first, second = only(evaluation(IDS, (IDS[:, 0], {"labels": IDS[:, 2]}))).labels
    assert (first.tolist(), second.tolist()) == (IDS[:, 0].tolist(), IDS[:, 2].tolist())
    with pytest.raises(ValueError, match="needs the key 'labels', got start, end"):
        batches(evaluation(IDS, {"start": IDS, "end": IDS}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64])
def test_tensors_become_arrays_of_the_same_values(dtype):
    tensor = torch.tensor([1.5, 2.0, 250.0]).to(dtype).requires_grad_(dtype.is_floating_point)
    array = only(evaluation({"x": tensor.clone()}, torch.zeros(3))).predictions["x"]
    assert isinstance(array, np.ndarray)
    assert array.astype(np.float64).tolist() == tensor.double().tolist()


def test_lists_of_labels_are_batches():
    first, second = batches(evaluation([{"x": IDS[:1]}, {"x": IDS[1:]}], [IDS[:1], IDS[1:]]))
    assert (first.rows, second.rows) == (1, 3)
    ragged = batches(evaluation([IDS[:2], IDS[2:, :2]], [IDS[:2], IDS[2:, :2]]))
    assert [batch.labels.shape for batch in ragged] == [(2, 3), (2, 2)]
    of_tuples = batches(evaluation([(IDS, IDS)], [(IDS, IDS)]))
    assert len(of_tuples[0].predictions) == 2


def test_list_of_predictions_with_an_array_of_labels_is_a_structure():
    assert len(only(evaluation([IDS, IDS], IDS)).predictions) == 2


@pytest.mark.parametrize(
    ("predictions", "labels", "message"),
    [
        (np.zeros(7), IDS, r"predictions has shape \(7,\), the labels have shape \(4, 3\)"),
        ({"ids": IDS, "mean": np.array(3.0)}, IDS, r"predictions\.mean has shape \(\)"),
        ((IDS, {"deep": (IDS[:3],)}), IDS, r"predictions\.1\.deep\.0 has shape \(3, 3\)"),
        (IDS, (IDS, IDS[:3]), r"labels\.1 has shape \(3, 3\)"),
        (IDS, np.array(3), r"labels has shape \(\)"),
        (IDS, (), "labels are missing"),
    ],
)
def test_all_arrays_must_have_one_row_per_sample(predictions, labels, message):
    with pytest.raises(ValueError, match=message):
        batches(evaluation(predictions, labels))


@pytest.mark.parametrize("wrong", [(IDS, IDS), IDS, None, SimpleNamespace(predictions=IDS)])
def test_only_an_eval_prediction_is_taken(wrong):
    metric = Metric(statistics=lambda predictions, labels: {"n": labels}, score=dict, higher_is_better={"n": None})
    with pytest.raises(TypeError, match="takes an EvalPrediction"):
        metric(wrong)


def test_columns_are_named_at_two_levels():
    found = named_columns({"a": IDS, "more": {"b": IDS, "c": IDS}, "pair": (IDS, IDS)})
    assert list(found) == ["a", "b", "c", "pair"]
    assert named_columns(IDS) == named_columns((IDS, {"a": IDS})) == {}
    with pytest.raises(ValueError, match=r"two columns are called 'a', .*: a \(4, 3\) int64, more\.a"):
        named_columns({"a": IDS, "more": {"a": IDS}})
