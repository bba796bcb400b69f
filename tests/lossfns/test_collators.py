"""Rules of every collator wrapper: what it wraps, and which releases of transformers count its labels."""

import pickle
import re
from functools import partial
from importlib import metadata

import pytest
import torch

from lossfns import collators
from lossfns.collators import count_pairs, count_sequences, label_dicts, stack_pairs, teacher_inputs, with_extras
from lossfns.collators.labels import mask_first_label, with_decoder_inputs
from tests import tiny

ROWS = [{"input_ids": [4, 5, 6], "labels": [4, 5, 6], "token_weights": [0.0, 0.5, 1.0]}] * 2


def padded(rows):
    return tiny.pad([{name: torch.tensor(value) for name, value in row.items()} for row in rows])


# Options of those wrappers that need some.
OPTIONS = {
    "count_pairs": {"shift": 1},
    "count_sequences": {"shift": 1},
    "replace_labels": {"replacements": {255: tiny.IGNORED}},
    "stack_pairs": {"shift": 1},
    "teacher_inputs": {"shift": 1},
    "with_decoder_inputs": {"model": tiny.model("t5")},
    "with_extras": {"names": [], "shift": 1},
}


def every(name):
    return partial(getattr(collators, name), **OPTIONS.get(name, {}))


@pytest.mark.parametrize("given", [None, [{"labels": [1, 2]}]], ids=["nothing", "rows"])
@pytest.mark.parametrize("name", collators.__all__)
def test_what_is_wrapped_must_be_a_collator(name, given):
    """Rows are given where the Trainer got the wrapper itself as its data collator."""
    with pytest.raises(TypeError, match=rf"takes a data collator, got {type(given).__name__}"):
        every(name)(given)


def return_rows(rows):
    return rows


@pytest.mark.parametrize("name", collators.__all__)
def test_a_collator_must_return_a_dict(name):
    with pytest.raises(TypeError, match=r"must return a dict.*got list from.*return_rows"):
        every(name)(return_rows)([{"chosen": {}, "rejected": {}}])


@pytest.mark.parametrize("name", collators.__all__)
def test_wrappers_are_picklable(name):
    wrapped = every(name)(return_rows)
    assert pickle.loads(pickle.dumps(wrapped)) == wrapped
    assert repr(wrapped)


def test_inputs_that_the_teacher_lacks_are_named():
    with pytest.raises(ValueError, match=r"the teacher needs \['pixel_values'\].*pass names="):
        teacher_inputs(padded, shift=1, names=["pixel_values"])(ROWS)


WRAPPERS = {
    "extras": partial(with_extras(padded, ["token_weights"], shift=1), ROWS),
    "teacher": partial(teacher_inputs(padded, shift=1, names=["input_ids"]), ROWS),
    "sequences": partial(count_sequences(padded, shift=1), ROWS),
    "pairs": partial(count_pairs(padded, shift=1), ROWS),
    "stacked pairs": partial(stack_pairs(padded, shift=1), [{"chosen": ROWS[0], "rejected": ROWS[1]}]),
}


@pytest.fixture
def installed(monkeypatch):
    """Pretend that a release of transformers is installed, or that none is."""

    def pretend(release):
        def version(name):
            if release is None:
                raise metadata.PackageNotFoundError(name)
            return release

        monkeypatch.setattr(metadata, "version", version)

    label_dicts.installed_release.cache_clear()
    yield pretend
    label_dicts.installed_release.cache_clear()


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("release", ["4.57.1", "5.9.0", "5.9.0.dev0"])
def test_a_dict_of_labels_is_refused_where_it_is_not_counted(installed, name, release):
    """The loss would divide by its own labels, and gradients would be too large by the number of accumulation steps."""
    installed(release)
    with pytest.raises(ImportError, match=f"need transformers 5.10 or newer, got {re.escape(release)}"):
        WRAPPERS[name]()


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("release", ["5.10.0", "5.24.0", "6.0.0rc1", None])
def test_a_dict_of_labels_is_made_where_it_is_counted(installed, name, release):
    installed(release)
    assert isinstance(WRAPPERS[name]()["labels"], dict)


def test_plain_labels_work_with_every_release(installed):
    installed("4.57.1")
    assert mask_first_label(padded)(ROWS)["labels"][:, 0].tolist() == [tiny.IGNORED] * 2


@pytest.mark.parametrize(
    ("release", "added"), [("4.57.1", False), ("5.9.0", False), ("5.10.0", True), ("5.14.1", True), ("5.15.0", False)]
)
def test_every_label_of_an_encoder_decoder_is_counted(installed, release, added):
    """5.10 to 5.14 count `labels[..., 1:]` of them. `shift_labels` that the batch already has are kept."""
    installed(release)
    model = tiny.model("t5")
    batch = with_decoder_inputs(padded, model)(ROWS)
    assert ("shift_labels" in batch) == added
    assert not added or torch.equal(batch["shift_labels"], batch["labels"])
    zeros = torch.zeros(2, 3, dtype=torch.int64)
    given = with_decoder_inputs(lambda rows: padded(rows) | {"shift_labels": zeros}, model)(ROWS)
    assert torch.equal(given["shift_labels"], zeros)
