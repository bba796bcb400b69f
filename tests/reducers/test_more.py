"""Reducers of ranks, answers, spans, pixels, calibration and text, against loops."""

import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks import assets
from lossfns import hidden_states
from reducers import (
    answer_logits,
    calibration_bins,
    confusion_counts,
    ctc_greedy,
    embeddings,
    generated,
    label_rank,
    sample_sums,
    segmentation_counts,
    spans,
    text_lengths,
    token_bytes,
)
from tests import oracle, tiny

N = -100


def normal(*shape, seed=0, dtype=torch.float64):
    return (2 * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))).to(dtype)


LABELS = torch.tensor([[1, 2, 3, 4, 5], [N, 2, 9, N, N], [N] * 5])


# --- ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_ranks_are_those_of_a_sort(shift, dtype):
    logits = normal(3, 5, 11).round().to(dtype)  # with many ties
    found = label_rank((torch.tensor(0.5), logits), LABELS, shift=shift)["ranks"]
    expected = torch.full_like(LABELS, N)
    for place, row in oracle.pairs(logits, LABELS, shift=shift):
        expected[place] = oracle.ranking(logits[row]).index(int(LABELS[place]))
    assert found.tolist() == expected.tolist()
    assert found.dtype == torch.int32


def test_ranks_without_logits():
    model = tiny.model("llama").eval()
    ids = torch.arange(4, 16).view(2, 6)
    with torch.no_grad():
        expected = label_rank(model(input_ids=ids).logits, ids, shift=1)["ranks"]
        with hidden_states(model) as source:
            found = label_rank(model(input_ids=ids).logits, ids, shift=1, source=source)["ranks"]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_answers_stand_where_the_first_label_is_predicted(side):
    rows = [[N, N, 7, 5], [N, 3], [N, N, N, 9, 1]]
    logits = [normal(len(row), 11, seed=len(row)) for row in rows]
    width = max(map(len, rows))
    labels = torch.full((4, width), N)
    padded = torch.zeros(4, width, 11, dtype=torch.float64)
    for place, (row, x) in enumerate(zip(rows, logits, strict=True)):
        there = slice(width - len(row), width) if side == "left" else slice(len(row))
        labels[place, there], padded[place, there] = torch.tensor(row), x
    found = answer_logits(padded, labels, token_ids=[9, 3, 7], shift=1)
    firsts = [x[next(i for i, label in enumerate(row) if label != N) - 1] for row, x in zip(rows, logits, strict=True)]
    for place, x in enumerate(firsts):
        weights = [math.exp(float(x[token])) for token in (9, 3, 7)]
        assert found["probabilities"][place].tolist() == pytest.approx([w / sum(weights) for w in weights], rel=1e-12)
        assert int(found["ids"][place]) == max(range(3), key=weights.__getitem__)
    assert found["answers"].tolist() == [2, 1, 0, N]
    assert (found["ids"][3].item(), found["probabilities"][3].tolist()) == (N, [0.0] * 3)  # a row without a label


@pytest.mark.parametrize(
    "reducer", [partial(answer_logits, token_ids=[7, 9, 4], shift=1), partial(confusion_counts, shift=1)]
)
def test_answers_and_counts_without_logits(reducer):
    model = tiny.model("llama").eval()
    ids = torch.arange(4, 16).view(2, 6)
    labels = ids.clone()
    labels[0, :3] = N
    with torch.no_grad():
        expected = reducer(model(input_ids=ids).logits, labels)
        with hidden_states(model) as source:
            found = reducer(model(input_ids=ids).logits, labels, source=source)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.allclose(found[name].double(), values.double(), rtol=1e-5, atol=0)


def test_an_answer_that_is_none_of_them():
    found = answer_logits(normal(1, 3, 11), torch.tensor([[N, 4, 9]]), token_ids=[9, 3], shift=1)
    assert found["answers"].tolist() == [N]
    for token_ids in ([], [11]):
        with pytest.raises(ValueError, match="first tokens of the answers"):
            answer_logits(normal(1, 3, 11), torch.tensor([[N, 4, 9]]), token_ids=token_ids, shift=1)


# --- spans ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("top_n", "max_length"), [(1, 1), (5, 3), (20, 30), (60, 4)])
def test_spans_are_the_best_of_all(top_n, max_length):
    start, end = normal(4, 7), normal(4, 7, seed=1)
    found = spans((start, end, (normal(2, 2),)), None, top_n=top_n, max_length=max_length)
    for row in range(4):
        every = [(float(start[row, a] + end[row, b]), a, b) for a in range(7) for b in range(a, min(7, a + max_length))]
        best = sorted(every, key=lambda span: (-span[0], *span[1:]))[:top_n]
        kept = len(best)
        assert found["starts"][row].tolist() == [a for _, a, _ in best] + [N] * (top_n - kept)
        assert found["ends"][row].tolist() == [b for _, _, b in best] + [N] * (top_n - kept)
        assert found["scores"][row, :kept].tolist() == pytest.approx([score for score, _, _ in best])
    assert found["null_scores"].tolist() == (start[:, 0] + end[:, 0]).tolist()
    assert found["starts"].dtype == torch.int32


def test_what_has_no_score_is_no_span_and_hides_none():
    start, end = torch.tensor([[math.nan, 3.0, 1.0], [math.nan] * 3]), torch.tensor([[9.0, math.nan, 2.0], [0.0] * 3])
    found = spans((start, end), None, top_n=3)
    assert found["starts"].tolist() == [[1, 2, N], [N] * 3]
    assert found["ends"].tolist() == [[2, 2, N], [N] * 3]
    assert found["scores"].tolist() == [[5.0, 3.0, 0.0], [0.0] * 3]
    assert found["null_scores"].isnan().all()


def test_spans_need_two_ends():
    with pytest.raises(ValueError, match="one output"):
        spans(normal(2, 3), None)
    with pytest.raises(ValueError, match="at least 1, got 0 and 30"):
        spans((normal(2, 3), normal(2, 3)), None, top_n=0)
    with pytest.raises(ValueError, match=r"\(2, 3\) and \(2, 4\)"):
        spans((normal(2, 3), normal(2, 4)), None)


# --- pixels, vectors, calibration -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(4, 4), (9, 6)])
def test_pixels_are_counted_at_the_labels_size(size):
    logits = normal(3, 5, 4, 4, dtype=torch.float32)
    labels = torch.randint(0, 5, (3, *size), generator=torch.Generator().manual_seed(0))
    labels[0, :2], labels[2] = N, N
    found = segmentation_counts((torch.tensor(1.0), logits), labels)["confusion"]
    large = torch.nn.functional.interpolate(logits, size=size, mode="bilinear", align_corners=False)
    for row, (target, best) in enumerate(zip(labels.numpy(), large.argmax(1).numpy(), strict=True)):
        there = target != N
        expected = confusion_matrix(target[there], best[there], labels=range(5)) if there.any() else np.zeros(25)
        assert found[row].tolist() == expected.ravel().tolist()


def test_pixels_of_a_model_that_has_diverged_are_not_counted():
    logits, labels = normal(3, 5, 2, 2), torch.zeros(3, 2, 2, dtype=torch.long)
    expected = segmentation_counts(logits, labels)["confusion"]
    logits[0, 3, 1, 1], logits[1, :, 0, 0], labels[1, 0, 0] = torch.nan, torch.nan, N
    expected[0], expected[1] = -1, segmentation_counts(logits[1:2].nan_to_num(), labels[1:2])["confusion"][0]
    assert torch.equal(segmentation_counts(logits, labels)["confusion"], expected)


def test_labels_of_pixels_are_checked():
    for labels, message in [
        (torch.zeros(2, 3, dtype=torch.long), "batch, height, width"),
        (torch.zeros(3, 2, 2, dtype=torch.long), "expected logits"),
        (torch.zeros(2, 0, 2, dtype=torch.long), r"at least one in each image; got \(2, 0, 2\)"),
        (torch.full((2, 2, 2), 255), "label 255 is out of range"),
    ]:
        with pytest.raises(ValueError, match=message):
            segmentation_counts(normal(2, 5, 2, 2), labels, select=lambda outputs: outputs)


def test_vectors():
    first, second = normal(3, 4), normal(3, 4, seed=1, dtype=torch.float16)
    found = embeddings((first, second), None, select=lambda outputs: {"queries": outputs[0], "documents": outputs[1]})
    assert torch.allclose(found["queries"], first / first.square().sum(1, keepdim=True).sqrt(), rtol=1e-12)
    assert found["documents"].dtype == torch.float32
    assert torch.equal(embeddings(first, None, select=lambda outputs: outputs, unit_length=False), first)
    with pytest.raises(ValueError, match="Pool tokens"):
        embeddings(normal(2, 3, 4), None, select=lambda outputs: outputs)


def test_bins_of_confidence():
    logits = normal(3, 5, 11)
    found = calibration_bins(logits, LABELS, shift=1, bins=4)
    expected = {name: np.zeros((3, 4)) for name in found}
    for place, row in oracle.pairs(logits, LABELS, shift=1):
        p = logits[row].softmax(0)
        bin_of = min(3, math.ceil(float(p.max()) * 4) - 1)
        expected["bin_labels"][place[0], bin_of] += 1
        expected["bin_confidence"][place[0], bin_of] += float(p.max())
        expected["bin_correct"][place[0], bin_of] += int(p.argmax()) == int(LABELS[place])
    for name, sums in found.items():
        assert sums.numpy() == pytest.approx(expected[name], rel=1e-12)


def test_a_confidence_that_is_nan_stays_so():
    logits = normal(2, 3, 11)
    logits[0, 1] = torch.nan
    found = calibration_bins(logits, torch.zeros(2, 3, dtype=torch.long), shift=0, bins=4)
    assert found["bin_confidence"].sum(1).isnan().tolist() == [True, False]
    assert found["bin_labels"].sum().item() == 6
    answers = answer_logits(logits, torch.tensor([[N, N, 2], [N, N, 2]]), token_ids=[2, 3], shift=1)
    assert answers["ids"][0] == N != answers["ids"][1]


# --- text -------------------------------------------------------------------------------------------------------------

TEXTS = ["State of the Union: a naïve plan, 5 € — 日本語 and 🙂.", "  two  spaces\n\nand lines", "É" * 9]


def byte_level():
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer, trained.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        [assets.english_text()[:20_000], *TEXTS],
        trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["<eos>"], show_progress=False),
    )
    return PreTrainedTokenizerFast(tokenizer_object=trained, eos_token="<eos>")


def pieces():
    vocabulary = {
        "<pad>": 0,
        **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)},
        "\u2581": 257,
        "a": 258,
        "\u2581a": 259,
    }
    trained = Tokenizer(models.BPE(vocabulary, [("\u2581", "a")], byte_fallback=True))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    return PreTrainedTokenizerFast(tokenizer_object=trained, pad_token="<pad>")


@pytest.mark.parametrize("make", [byte_level, pieces])
def test_tokens_are_as_long_as_their_text(make):
    tokenizer = make()
    table = token_bytes(tokenizer)
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert int(table["bytes"][ids].sum()) == len(text.encode())
        assert int(table["characters"][ids].sum()) == len(text)
    assert int(table["bytes"][tokenizer.all_special_ids].sum()) == 0


@pytest.mark.parametrize(
    ("vocabulary", "lengths", "characters"),
    [
        ({"\u2581the": 0, "\u2581a": 1, "\u0120": 2}, [4, 2, 2], [4, 2, 1]),  # a Maltese letter among pieces
        ({"\u0120the": 0, "\u0120a": 1, "    ": 2, "<a\u2581b>": 3}, [4, 2, 4, 7], [4, 2, 4, 5]),  # added as text
    ],
    ids=["pieces", "byte-level"],
)
def test_marks_of_the_other_kind_of_vocabulary(vocabulary, lengths, characters):
    table = token_bytes(SimpleNamespace(get_vocab=lambda: vocabulary, all_special_ids=[]))
    assert {name: values.tolist() for name, values in table.items()} == {"bytes": lengths, "characters": characters}


def test_added_tokens_are_as_long_as_their_text():
    """They are matched as text, whatever their letters stand for in the vocabulary."""
    tokenizer = byte_level()
    tokenizer.add_tokens(["\u00e9!"])
    ids = tokenizer("\u00e9!", add_special_tokens=False)["input_ids"]
    table = token_bytes(tokenizer)
    assert len(ids) == 1
    assert (int(table["bytes"][ids]), int(table["characters"][ids])) == (3, 2)


def test_tokens_of_a_real_vocabulary():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(assets.DATA / "smollm2")
    table = token_bytes(tokenizer)
    ids = tokenizer(text := assets.english_text()[:50_000] + TEXTS[0])["input_ids"]
    assert int(table["bytes"][ids].sum()) == len(text.encode())
    assert int(table["characters"][ids].sum()) == len(text)


def test_pieces_of_words_are_refused():
    trained = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    with pytest.raises(ValueError, match="neither byte-level"):
        token_bytes(PreTrainedTokenizerFast(tokenizer_object=trained, unk_token="[UNK]"))


def test_lengths_count_where_the_sums_count():
    ones = {"bytes": torch.ones(11, dtype=torch.long), "characters": torch.arange(11)}
    for shift in (0, 1):
        found = text_lengths((), LABELS, lengths=ones, shift=shift)
        assert found["bytes"].tolist() == sample_sums(normal(3, 5, 11), LABELS, shift=shift)["tokens"].tolist()
    assert text_lengths((), {"labels": LABELS}, lengths=ones, shift=1)["characters"].tolist() == [14, 11, 0]
    with pytest.raises(ValueError, match="label 9 has no length: the table has 9"):
        text_lengths((), LABELS, lengths={"bytes": torch.ones(9)}, shift=1)
    with pytest.raises(ValueError, match="got None"):
        text_lengths((), None, lengths=ones, shift=1)


def test_generated_takes_ids_only():
    assert generated((torch.tensor([[3, N]], dtype=torch.int32), normal(1)), None)["generated"].tolist() == [[3, N]]
    with pytest.raises(TypeError, match="predict_with_generate=True"):
        generated(normal(1, 2, 3), None)


def test_best_paths_of_frames():
    paths = [[0, 5, 5, 0, 5, 3], [1, 1, 1, 0, 0, 0], [0] * 6, [2, 0, 2, 2, 4, 4]]
    logits = torch.nn.functional.one_hot(torch.tensor(paths), 7).float()
    logits[1, 4:] = N  # frames added across ranks
    found = ctc_greedy(logits, None)["generated"]
    assert [[place for place in row if place != N] for row in found.tolist()] == [[5, 5, 3], [1], [], [2, 2, 4]]
    with pytest.raises(TypeError, match=r"input_lengths must be integers.*torch.float32"):
        ctc_greedy(logits, {"input_lengths": torch.tensor([2.5, 6, 6, 3])})
    cut = ctc_greedy(logits, {"input_lengths": torch.tensor([2, 6, 6, 3])}, blank=0)["generated"]
    assert [[place for place in row if place != N] for row in cut.tolist()] == [[5], [1], [], [2, 2]]


@pytest.mark.parametrize(
    "reducer",
    [
        partial(label_rank, shift=1),
        partial(answer_logits, token_ids=[1, 2], shift=1),
        partial(calibration_bins, shift=1),
        partial(text_lengths, lengths={"bytes": torch.ones(11)}, shift=1),
    ],
)
def test_inputs_stay_as_they_are_and_empty_batches_pass(reducer):
    logits, labels = normal(3, 5, 11), LABELS.clone()
    before = logits.clone()
    reducer(logits, labels)
    assert torch.equal(logits, before)
    assert torch.equal(labels, LABELS)
    assert all(value.shape[0] == 0 for value in reducer(logits[:0], labels[:0]).values())
