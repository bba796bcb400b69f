"""Labels in a dict and the count of sequences: the batches of the collators, and training on them in the Trainer."""

from functools import partial

import pytest
import torch
import transformers

from lossfns import causal_lm_loss, cross_entropy, hidden_states, masked_lm_loss, seq2seq_lm_loss, token_weighted
from lossfns.collators import count_pairs, count_sequences, mask_sequence_starts, with_extras
from lossfns.collators.labels import mask_first_label
from tests import tiny
from tests.contract.probes import LossSpy, gradient, skip_unless_counted
from tests.lossfns.cases import ADDITIVE, CASES, N, trainer

skip_unless_counted()


def expected_gradient(case):
    model = case.model()
    return gradient(model, case.reference(model, case.collator(case.rows)))


def assert_right(made, case):
    torch.testing.assert_close(tiny.gradient_of(made), expected_gradient(case), rtol=0, atol=1e-10)


FOUR_STEPS = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}


@pytest.mark.parametrize("rows", [2, 3])
@pytest.mark.parametrize("name", ADDITIVE)
def test_accumulation_changes_nothing(name, rows):
    """Four micro-batches of two rows, or three of at most three."""
    window = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": -(-8 // rows)}
    assert_right(trainer(ADDITIVE[name], **window), ADDITIVE[name])


@pytest.mark.parametrize("name", ["sequences", "token weights"])
def test_data_parallel_changes_nothing(name):
    """The loss gets the dict for all replicas. `shift_labels` goes to the replicas, whose models ignore it."""
    case, settings = ADDITIVE[name], {"replicas": 2, "per_device_train_batch_size": 4}
    assert_right(tiny.trainer(case.model(), case.rows, case.loss, collator=case.collator, **settings), case)


@pytest.mark.parametrize("name", ["sequences", "token weights", "unlikelihood"])
def test_hidden_states_change_nothing(name):
    case, model = ADDITIVE[name], ADDITIVE[name].model()
    loss = partial(case.loss, source=hidden_states(model))
    assert_right(tiny.trainer(model, case.rows, loss, collator=case.collator, **FOUR_STEPS), case)


@pytest.mark.parametrize("name", sorted(CASES.keys() - ADDITIVE.keys()))
def test_losses_that_are_not_sums_are_right_in_one_batch(name):
    assert_right(trainer(CASES[name]), CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_three_steps_and_an_evaluation(name):
    case = CASES[name]
    made = trainer(case, per_device_train_batch_size=4, learning_rate=0.02, max_steps=3)
    made.train()
    assert len(tiny.logged(made)) == 3
    with torch.no_grad():
        expected = case.reference(made.model.eval(), case.collator(case.rows)).item()
    assert made.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)


def facts():
    """The gradient of every additive case, and the weights that reach a reducer, on one of two ranks."""
    small = FOUR_STEPS | {"gradient_accumulation_steps": 2}
    return {
        "gradients": {name: tiny.gradient_of(trainer(case, **small)).tolist() for name, case in ADDITIVE.items()},
        "weights": evaluated_weights(),
    }


def evaluated_weights(batch_size=2):
    """The weights that `compute_metrics` receives, at labelled tokens, and the width of each row."""
    case, found = ADDITIVE["token weights"], {}

    def metric(prediction):
        found.update(prediction.label_ids)
        return {}

    rows = case.rows[:5]
    tiny.trainer(
        case.model(),
        None,
        case.loss,
        reducer=lambda logits, labels: labels["token_weights"],
        metric=metric,
        eval_rows=rows,
        collator=case.collator,
        per_device_eval_batch_size=batch_size,
    ).evaluate()
    return [
        [weights[ids != N].tolist(), len(ids)]
        for weights, ids in zip(found["token_weights"], found["labels"], strict=True)
    ]


@pytest.mark.distributed
def test_two_ranks_change_nothing():
    ranks = tiny.run_distributed(facts)
    rows = ADDITIVE["token weights"].rows[:5]
    longest = max(len(row["labels"]) for row in rows)
    weights = [[row["token_weights"][row["labels"] != N].tolist(), longest] for row in rows]
    for rank in ranks:
        assert rank["weights"] == weights
        for name, case in ADDITIVE.items():
            found = torch.tensor(rank["gradients"][name], dtype=torch.float64)
            assert (found - expected_gradient(case)).abs().max() < 1e-10, name


@pytest.mark.parametrize("batch_size", [1, 5])
def test_weights_survive_padding_across_batches(batch_size):
    rows = ADDITIVE["token weights"].rows[:5]
    assert [weights for weights, _ in evaluated_weights(batch_size)] == [
        row["token_weights"][row["labels"] != N].tolist() for row in rows
    ]


ROWS = [
    {"input_ids": [4, 5, 6, 7], "labels": [N, 5, 6, 7], "weight": [0.0, 0.1, 0.2, 0.3], "worth": 2.0},
    {"input_ids": [8, 9], "labels": [N, 9], "weight": [0.4, 0.5], "worth": -1.0},
]


def padded(rows, side="right"):
    return tiny.pad([{name: torch.tensor(value) for name, value in row.items()} for row in rows], side=side)


padded_left = partial(padded, side="left")


def wide(rows):
    """Padded to a multiple of 8."""
    batch = padded(rows)
    return {name: torch.nn.functional.pad(t, (0, 4), value=N if name == "labels" else 0) for name, t in batch.items()}


def without_labels(rows):
    """The labels are made by the collator, as for language modeling."""
    batch = padded([{"input_ids": row["input_ids"]} for row in rows])
    return batch | {"labels": batch["input_ids"].masked_fill(batch["input_ids"] == 0, N)}


def packed(rows):
    return transformers.DataCollatorWithFlattening()(rows)


@pytest.mark.parametrize(
    ("collator", "expected"),
    [
        (padded, [[0.0, 0.1, 0.2, 0.3], [0.4, 0.5, 0, 0]]),
        (padded_left, [[0.0, 0.1, 0.2, 0.3], [0, 0, 0.4, 0.5]]),
        (wide, [[0.0, 0.1, 0.2, 0.3, 0, 0, 0, 0], [0.4, 0.5, 0, 0, 0, 0, 0, 0]]),
        (without_labels, [[0.0, 0.1, 0.2, 0.3], [0.4, 0.5, 0, 0]]),
        (packed, [[0.0, 0.1, 0.2, 0.3, 0.4, 0.5]]),
        (mask_first_label(padded_left), [[0.0, 0.1, 0.2, 0.3], [0, 0, 0.4, 0.5]]),
    ],
    ids=["right", "left", "to a multiple", "labels by the collator", "packed", "behind another wrapper"],
)
def test_extras_are_placed_at_their_labels(collator, expected):
    rows = [{name: value for name, value in row.items() if name != "worth"} for row in ROWS]
    if collator is without_labels:
        rows = [{name: value for name, value in row.items() if name != "labels"} for row in rows]
    batch = with_extras(collator, ["weight"], shift=1)(rows)
    assert batch["labels"]["weight"].tolist() == torch.tensor(expected).tolist()
    assert batch["labels"]["weight"].dtype == torch.float32
    assert "weight" not in batch
    without = collator([{name: value for name, value in row.items() if name != "weight"} for row in rows])
    assert torch.equal(batch["labels"]["labels"], without["labels"])
    assert (batch["shift_labels"] != N).sum() == (without["labels"][:, 1:] != N).sum()


def test_one_number_per_sample():
    batch = with_extras(padded, ["worth", "weight"], shift=0)(ROWS)
    assert batch["labels"]["worth"].tolist() == [2.0, -1.0]
    assert torch.equal(batch["shift_labels"], batch["labels"]["labels"])


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (True, torch.int64),
        (3, torch.int64),
        (0.5, torch.float32),
        (torch.tensor(0.5, dtype=torch.float64), torch.float32),
        (torch.tensor(7, dtype=torch.uint8), torch.int64),
        (torch.tensor(0.5, dtype=torch.bfloat16), torch.float32),
    ],
)
def test_dtypes_that_survive_padding_on_one_rank(value, dtype):
    """bool becomes int64 on the rank that is padded, and a gather of two dtypes aborts both ranks (see `facts`)."""
    rows = [{"labels": [5], "extra": value}] * 2
    assert with_extras(padded, ["extra"], shift=0)(rows)["labels"]["extra"].dtype == dtype


def test_an_extra_that_the_collator_returns():
    def collator(rows):
        return padded(rows) | {"margin": torch.tensor([0.25, 0.5])}

    batch = with_extras(collator, ["margin", "worth"], shift=1)(
        [{k: row[k] for k in ("labels", "worth")} for row in ROWS]
    )
    assert batch["labels"]["margin"].tolist() == [0.25, 0.5]
    assert "margin" not in batch


def test_labels_without_a_sequence_need_no_shift():
    rows = [{"labels": 1, "token_weights": 0.5}, {"labels": 0, "token_weights": 2.0}]
    batch = with_extras(padded, ["token_weights"])(rows)
    assert batch["shift_labels"].tolist() == [1, 0]


def truncated(rows):
    batch = padded(rows)
    return {name: values[:, :3] for name, values in batch.items()}


@pytest.mark.parametrize(
    ("collator", "shift", "weight", "message"),
    [
        (padded, None, [0.0, 0.1, 0.2, 0.3], r"labels of shape \(2, 4\) need a shift: pass shift=1"),
        (truncated, 1, [0.0, 0.1, 0.2, 0.3], "'weight' cannot be aligned with the labels"),
        (padded, 1, [1.0], "'weight' cannot be aligned"),
        (padded, 1, 1.0, "one number per sample or one per label"),
    ],
)
def test_extras_that_are_refused(collator, shift, weight, message):
    rows = [{name: row[name] for name in ("input_ids", "labels", "weight")} for row in ROWS]
    options = {} if shift is None else {"shift": shift}
    with pytest.raises(ValueError, match=message):
        with_extras(collator, ["weight"], **options)([rows[0] | {"weight": weight}, rows[1]])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["wieght"], r"got \['wieght'\], which are not among .*: did you mean 'weight'\? The Trainer keeps"),
        (["score"], r"got \['score'\].*'worth'\]: The Trainer keeps them only with"),
        (["kind"], "the extra 'kind' must be numbers, got a str, 'news'"),
        ("weight", "sequence, got 'weight'"),
    ],
)
def test_names_that_are_refused(names, message):
    added = {"kind": "news"} if names == ["kind"] else {}
    with pytest.raises((TypeError, ValueError), match=message):
        with_extras(padded, names, shift=1)([row | added for row in ROWS])


@pytest.mark.parametrize(("shift", "counted"), [(0, 3), (1, 2)])
def test_one_count_per_sequence_with_a_predicted_label(shift, counted):
    rows = [{"labels": [5, 6]}, {"labels": [7, N]}, {"labels": [N, N]}, {"labels": [N, 8]}]
    batch = count_sequences(padded, shift=shift)(rows)
    assert batch["shift_labels"][batch["shift_labels"] != N].tolist() == [0] * counted
    assert not batch["labels"]["sequence_ids"].any()


def test_packed_sequences_are_numbered():
    batch = {
        "labels": torch.tensor([[N, 5, 6, N, 7, N, N, 8]]),
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2]]),
    }
    found = count_sequences(lambda rows: batch, shift=1)([])
    assert found["labels"]["sequence_ids"].tolist() == [[0, 0, 0, 1, 1, 2, 2, 2]]
    assert found["shift_labels"].tolist() == [[N, 0, N, N, 0, N, N, 0]]


def test_extras_and_sequences_in_either_order():
    rows = [{name: row[name] for name in ("labels", "weight")} for row in ROWS]
    one = with_extras(count_sequences(padded, shift=1), ["weight"])(rows)
    other = count_sequences(with_extras(padded, ["weight"], shift=1), shift=1)(rows)
    assert torch.equal(one["shift_labels"], other["shift_labels"])
    assert one["labels"].keys() == other["labels"].keys() == {"labels", "weight", "sequence_ids"}


LOGITS = torch.randn(2, 4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([[N, 1, N, 6], [0, 3, 2, 5]])


def marked(shift=1, wrap=count_sequences):
    return wrap(lambda rows: {"labels": LABELS}, shift=shift)([])["labels"]


@pytest.mark.parametrize("count", [None, 2, torch.tensor(2.0), torch.tensor([[1], [1]])], ids=str)
def test_the_mean_over_sequences_of_their_means(count):
    nll = torch.nn.functional.cross_entropy(LOGITS[:, :-1].transpose(1, 2), LABELS[:, 1:], reduction="none")
    expected = (nll[0].sum() / 2 + nll[1].sum() / 3) / 2
    found = causal_lm_loss(LOGITS, marked(), count, normalize="sequences")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
    assert found.item() != pytest.approx(causal_lm_loss(LOGITS, LABELS).item(), rel=1e-3)


def test_weights_inside_a_sequence():
    weights = torch.rand(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    nll = torch.nn.functional.cross_entropy(LOGITS.transpose(1, 2), LABELS, reduction="none") * weights
    expected = (nll[0].sum() / 2 + nll[1].sum() / 4) / 2
    labels = marked(shift=0) | {"token_weights": weights}
    found = masked_lm_loss(LOGITS, labels, normalize="sequences", term=token_weighted(cross_entropy))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("loss", [causal_lm_loss, masked_lm_loss, seq2seq_lm_loss])
@pytest.mark.parametrize(
    ("labels", "normalize", "message"),
    [
        (LABELS, "sequences", r"have no 'sequence_ids'.*count_sequences\(collator"),
        (marked(wrap=count_pairs), "sequences", r"have no 'sequence_ids'.*count_sequences"),
        (marked(), "tokens", r"wrapped in count_sequences.*divides by tokens.*normalize='sequences'"),
        (marked(), "weights", "wrapped in count_sequences"),
        (marked(wrap=count_pairs), "tokens", "wrapped in count_pairs"),
        (LABELS, "samples", "normalize must be 'tokens', 'sequences' or 'weights', got 'samples'"),
    ],
)
def test_a_unit_that_differs_from_the_count_is_refused(loss, labels, normalize, message):
    with pytest.raises(ValueError, match=message):
        loss(LOGITS, labels, 2, normalize=normalize)


@pytest.mark.parametrize(
    ("sequence_ids", "message"),
    [
        (torch.full_like(LABELS, LABELS.shape[1]), r"count_sequences.*must be in \[0, (\d)\), got \1 to \1"),
        (torch.full_like(LABELS, -1), "got -1 to -1"),
        (LABELS[:, 0], "of the labels' shape"),
        (torch.zeros(LABELS.shape), "must hold integers of the labels' shape"),
    ],
)
def test_a_marker_made_by_hand_is_checked(sequence_ids, message):
    """An id beyond its row would silently change the weight of a sequence in the next row."""
    with pytest.raises(ValueError, match=message):
        causal_lm_loss(LOGITS, {"labels": LABELS, "sequence_ids": sequence_ids}, 2, normalize="sequences")


def test_a_marker_is_not_read_where_nothing_is_scored():
    labels = marked()
    padding = labels["labels"] == N
    other = labels | {"sequence_ids": labels["sequence_ids"].masked_fill(padding, N)}
    assert padding.any()
    assert causal_lm_loss(LOGITS, other, 2, normalize="sequences") == causal_lm_loss(
        LOGITS, labels, 2, normalize="sequences"
    )


def test_the_trainer_counts_sequences():
    """Seven of eight have a predicted label. A sum over tokens divided by that would be many times too large."""
    case, spy = ADDITIVE["sequences"], LossSpy()
    tiny.trainer(case.model(), case.rows, spy, collator=case.collator).train()
    assert spy.counts == [7]
    assert tiny.count(case.rows, shift=1) > 14


LISTS = [{name: row[name].tolist() for name in ("input_ids", "labels")} for row in tiny.lm_rows(8, prompt=False)]


def packed_without_mask(rows):
    """Broken: sequences one after the other, each of which predicts the first label of the next one."""
    batch = transformers.DataCollatorWithFlattening()(rows)
    return batch | {"labels": torch.cat([torch.tensor(row["labels"]) for row in rows])[None]}


@pytest.mark.parametrize("normalize", ["tokens", "sequences"])
@pytest.mark.parametrize("steps", [1, 4])
def test_packed_sequences_give_the_gradient_of_padded_ones(normalize, steps):
    loss = partial(causal_lm_loss, normalize=normalize)
    unit = partial(count_sequences, shift=1) if normalize == "sequences" else lambda collator: collator
    rows = [{name: torch.tensor(value) for name, value in row.items()} for row in LISTS]
    expected = tiny.gradient_of(tiny.trainer(tiny.model("llama"), rows, loss, collator=unit(mask_first_label(masked))))
    settings = {"per_device_train_batch_size": 8 // steps, "gradient_accumulation_steps": steps}
    found, broken = (
        tiny.gradient_of(tiny.trainer(tiny.model("llama"), LISTS, loss, collator=unit(collator), **settings))
        for collator in (mask_sequence_starts(packed_without_mask), packed_without_mask)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    assert (broken - expected).abs().max() > 1e-3


def masked(rows):
    batch = tiny.pad(rows)
    return batch | {"attention_mask": (batch["labels"] != N).long()}


@pytest.mark.parametrize("batch", [{}, {"position_ids": torch.zeros(3, 1, 4)}])
def test_sequence_starts_need_position_ids(batch):
    with pytest.raises(ValueError, match=r"position_ids of the labels' shape \(1, 4\).*mask_first_label"):
        mask_sequence_starts(lambda rows: {"labels": LABELS[:1]} | batch)([])
