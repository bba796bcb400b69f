"""Entity scores against seqeval and against conlleval."""

import re
import shutil
import subprocess
import sys
import warnings

import numpy as np
import pytest
from seqeval import scheme as schemes
from seqeval.metrics import sequence_labeling, v1

from benchmarks import assets
from metrics import entity_f1
from tests import tiny

from .evaluations import evaluation

KEYS = ("entity_precision", "entity_recall", "entity_f1")
PREFIXES = {"IOB1": "BI", "IOB2": "BI", "IOE1": "IE", "IOE2": "IE", "IOBES": "BIES", "BILOU": "BILU"}


def tags_of(scheme, types=("LOC", "PER")):
    return ["O", *(f"{prefix}-{kind}" for prefix in PREFIXES[scheme] for kind in types)]


def words(ids, labels, tags):
    """The tags of each sample, without those whose label is ignored."""
    return [
        [tags[place] for place, label in zip(row, target, strict=True) if label != tiny.IGNORED]
        for row, target in zip(ids.tolist(), labels.tolist(), strict=True)
    ]


def seqeval(ids, labels, tags, scheme, *, lenient, average="micro"):
    true, found = words(labels, labels, tags), words(ids, labels, tags)
    score = sequence_labeling.precision_recall_fscore_support if lenient else v1.precision_recall_fscore_support
    options = {} if lenient else {"scheme": getattr(schemes, scheme)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return score(true, found, average=average, zero_division=0, **options)


def noisy(shape, size, seed, *, right=0.6):
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, size, shape)
    ids = np.where(generator.random(shape) < right, labels, generator.integers(0, size, shape))
    return ids, np.where(generator.random(shape) < 0.15, tiny.IGNORED, labels)


@pytest.fixture(scope="module")
def newspaper():
    """English chunks by hand, and as a chunker found them."""
    sentences = assets.chunked_sentences()
    tags = sorted({tag for sentence in sentences for tag in (*sentence.chunks, *sentence.found)})
    longest = max(len(sentence.chunks) for sentence in sentences)

    def table(rows):
        return np.array([[tags.index(tag) for tag in row] + [tiny.IGNORED] * (longest - len(row)) for row in rows])

    return *(table([getattr(sentence, kind) for sentence in sentences]) for kind in ("found", "chunks")), tags


@pytest.mark.parametrize("lenient", [False, True])
@pytest.mark.parametrize("scheme", PREFIXES)
def test_every_scheme_scores_as_in_seqeval(scheme, lenient):
    tags = tags_of(scheme)
    # What seqeval's lenient mode makes of L and U is what conlleval makes of no tag at all; they are E and S.
    shown = [tag.replace("L-", "E-").replace("U-", "S-") for tag in tags] if lenient else tags
    metric = entity_f1(dict(enumerate(tags)), scheme=scheme, lenient=lenient)
    for seed in range(40):
        ids, labels = noisy((5, 9), len(tags), seed)
        scores = metric(evaluation(ids, labels))
        expected = seqeval(ids, labels, shown, scheme, lenient=lenient)[:3]
        assert [scores[key] for key in KEYS] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("scheme", PREFIXES)
def test_only_bilou_differs_from_the_default_mode_of_seqeval(scheme):
    tags = tags_of(scheme)
    ids, labels = noisy((5, 9), len(tags), seed=0)
    scores = entity_f1(dict(enumerate(tags)), scheme=scheme, lenient=True)(evaluation(ids, labels))
    expected = pytest.approx(seqeval(ids, labels, tags, scheme, lenient=True)[:3], abs=1e-12)
    assert ([scores[key] for key in KEYS] == expected) is (scheme != "BILOU")


@pytest.mark.parametrize("lenient", [False, True])
def test_real_texts_score_as_in_seqeval(newspaper, lenient):
    ids, labels, tags = newspaper
    scores = entity_f1(dict(enumerate(tags)), scheme="IOB2", lenient=lenient)(evaluation(ids, labels))
    *values, support = seqeval(ids, labels, tags, "IOB2", lenient=lenient)
    *each, _ = seqeval(ids, labels, tags, "IOB2", lenient=lenient, average=None)
    kinds = sorted({tag[2:] for tag in tags} - {""})
    assert [scores[key] for key in KEYS] == pytest.approx(values, rel=1e-12)
    assert scores["entities"] == support > 400
    for key, by_type in zip(KEYS, each, strict=True):
        found = {name: scores[f"{key}/{name}"] for name in kinds if not np.isnan(scores[f"{key}/{name}"])}
        assert list(found.values()) == pytest.approx(by_type.tolist(), rel=1e-12)


def conlleval_itself(true, found, folder):
    """Precision, recall and F1 in per cent with two digits, of each type and, under "", of all."""
    script = folder / "conlleval.pl"
    script.write_text(assets.conlleval())
    rows = (zip(*pair, strict=True) for pair in zip(true, found, strict=True))
    lines = "\n\n".join("\n".join(f"token {tag} {guess}" for tag, guess in row) for row in rows)
    done = subprocess.run(["perl", script], input=lines, capture_output=True, text=True, check=True, timeout=60)
    scores = re.findall(r"precision: +([\d.]+)%; recall: +([\d.]+)%; FB1: +([\d.]+)", done.stdout)
    names = ["", *re.findall(r"(\S+): precision", done.stdout)]
    return {name: list(map(float, values)) for name, values in zip(names, scores, strict=True)}


@pytest.mark.skipif(shutil.which("perl") is None, reason="conlleval is written in Perl")
def test_real_texts_score_as_in_conlleval(newspaper, tmp_path):
    ids, labels, tags = newspaper
    scores = entity_f1(dict(enumerate(tags)), scheme="IOB2", lenient=True)(evaluation(ids, labels))
    expected = conlleval_itself(*(words(table, labels, tags) for table in (labels, ids)), tmp_path)
    assert len(expected) > 5
    for kind, values in expected.items():
        own = [100 * scores[f"{key}/{kind}" if kind else key] for key in KEYS]
        assert own == pytest.approx(values, abs=0.0051)  # two digits


def test_scores_equal_those_printed_by_conlleval(newspaper):
    """conlleval's own answer to the English chunks, for where there is no Perl."""
    ids, labels, tags = newspaper
    metric = entity_f1(dict(enumerate(tags)), scheme="IOB2", lenient=True)
    scores = metric(evaluation(ids, labels))
    assert [round(100 * scores[key], 2) for key in KEYS] == [68.83, 80.83, 74.35]
    assert [round(100 * scores[f"{key}/NP"], 2) for key in KEYS] == [64.98, 78.63, 71.16]
    assert (scores["entities"], metric(evaluation(labels, labels))["entity_f1"]) == (459, 1.0)


@pytest.mark.parametrize("lenient", [False, True])
def test_number_of_python_calls_does_not_grow_with_the_tokens(lenient):
    tags = tags_of("IOB2")
    metric = entity_f1(dict(enumerate(tags)), scheme="IOB2", lenient=lenient)

    def calls(samples):
        evaluated, made = evaluation(*noisy((samples, 30), len(tags), 0, right=0.9)), []
        sys.setprofile(lambda frame, event, argument: made.append(event))
        try:
            metric(evaluated)
        finally:
            sys.setprofile(None)
        return len(made)

    calls(2)  # what is imported once
    assert calls(2000) < 1.2 * calls(20)


def test_samples_are_kept_apart():
    metric = entity_f1({0: "O", 1: "B-X", 2: "I-X"}, scheme="IOB2", lenient=True)
    labels, ids = np.array([[0, 1], [2, 0]]), np.array([[0, 1], [2, 0]])
    assert metric(evaluation(ids, labels))["entities"] == 2
    joined = metric(evaluation(ids.reshape(1, 4), labels.reshape(1, 4)))
    assert joined["entities"] == 1  # the broken variant: what one long sample would give


def test_ignored_tokens_are_removed_before_entities_are_read():
    metric = entity_f1({0: "O", 1: "B-X", 2: "I-X"}, scheme="IOB2")
    labels, ids = np.array([[1, -100, 2]]), np.array([[1, 0, 2]])
    assert metric(evaluation(ids, labels))["entity_f1"] == 1.0
    assert metric(evaluation(ids, np.array([[1, 2, 2]])))["entity_f1"] == 0.0  # the broken variant: parts are labelled


def test_without_entities_the_score_is_zero_and_that_of_a_type_undefined():
    labels = np.zeros((2, 3), np.int64)
    scores = entity_f1(dict(enumerate(tags_of("IOB2"))), scheme="IOB2")(evaluation(labels, labels))
    assert [scores[key] for key in KEYS] == [0.0, 0.0, 0.0]
    assert np.isnan(scores["entity_f1/PER"])


@pytest.mark.parametrize(
    ("tags", "scheme"), [("O B-X E-X", "IOB2"), ("O B-X L-X", "IOBES"), ("O person", "IOB2"), ("O", "IOB2")]
)
def test_tags_must_be_those_of_the_scheme(tags, scheme):
    with pytest.raises(ValueError, match=f"got {tags.split()[-1]!r}"):
        entity_f1(dict(enumerate(tags.split())), scheme=scheme)
