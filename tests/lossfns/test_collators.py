"""What a newer transformers is needed for says so on an older one, before a number is wrong."""

import re
from functools import partial
from importlib import metadata

import pytest
import torch

from lossfns.collators import count_pairs, count_sequences, label_dicts, stack_pairs, teacher_inputs, with_extras
from lossfns.collators.labels import mask_first_label, with_decoder_inputs
from tests import tiny

ROWS = [{"input_ids": [4, 5, 6], "labels": [4, 5, 6], "token_weights": [0.0, 0.5, 1.0]}] * 2


def padded(rows):
    return tiny.pad([{name: torch.tensor(value) for name, value in row.items()} for row in rows])


WRAPPERS = {
    "extras": partial(with_extras(padded, ["token_weights"], shift=1), ROWS),
    "teacher": partial(teacher_inputs(padded, shift=1, names=["input_ids"]), ROWS),
    "sequences": partial(count_sequences(padded, shift=1), ROWS),
    "pairs": partial(count_pairs(padded, shift=1), ROWS),
    "stacked pairs": partial(stack_pairs(padded, shift=1), [{"chosen": ROWS[0], "rejected": ROWS[1]}]),
}


@pytest.fixture
def installed(monkeypatch):
    """Pretends that a release of transformers is installed, or none."""

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
    """The loss would divide by its own count: gradients as many times too large as there are accumulation steps."""
    installed(release)
    with pytest.raises(ImportError, match=f"need transformers 5.10 or newer, and {re.escape(release)} is installed"):
        WRAPPERS[name]()


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("release", ["5.10.0", "5.24.0", "6.0.0rc1", None])
def test_it_is_made_where_it_is_counted(installed, name, release):
    installed(release)
    assert isinstance(WRAPPERS[name]()["labels"], dict)


def test_plain_labels_are_for_every_release(installed):
    installed("4.57.1")
    assert mask_first_label(padded)(ROWS)["labels"][:, 0].tolist() == [tiny.IGNORED] * 2


@pytest.mark.parametrize(
    ("release", "added"), [("4.57.1", False), ("5.9.0", False), ("5.10.0", True), ("5.14.1", True), ("5.15.0", False)]
)
def test_every_label_of_an_encoder_decoder_is_counted(installed, release, added):
    """5.10 to 5.14 count `labels[..., 1:]` of them; what the batch holds already is what is to be counted."""
    installed(release)
    model = tiny.model("t5")
    batch = with_decoder_inputs(padded, model)(ROWS)
    assert ("shift_labels" in batch) == added
    assert not added or torch.equal(batch["shift_labels"], batch["labels"])
    own = torch.zeros(2, 3, dtype=torch.int64)
    given = with_decoder_inputs(lambda rows: padded(rows) | {"shift_labels": own}, model)(ROWS)
    assert torch.equal(given["shift_labels"], own)
