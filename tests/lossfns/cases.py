"""A tiny model, rows, collator and loss for each kind of label dict and task, and the loss as one writes it without us.

A reference gets the model and one batch that holds all rows, and returns the mean in float64 by torch or the model
itself. `ADDITIVE` are sums over items divided by their count; the others compare the samples of a batch.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers

from lossfns import (
    causal_lm_loss,
    clip_loss,
    cross_entropy,
    ctc_loss,
    question_answering_loss,
    segmentation_loss,
    seq2seq_lm_loss,
    token_weighted,
    triplet_loss,
    unlikelihood,
)
from lossfns.collators import count_sequences, with_extras
from lossfns.collators.labels import pack_spans, replace_labels, with_decoder_inputs
from tests import tiny

N = tiny.IGNORED


class Case(NamedTuple):
    model: Callable[[], torch.nn.Module]
    rows: list[tiny.Row]
    loss: Callable[..., torch.Tensor]
    collator: Callable[..., Any]
    reference: Callable[[torch.nn.Module, dict[str, Any]], torch.Tensor]
    arguments: Mapping[str, Any] = MappingProxyType({})


# --- models ----------------------------------------------------------------------------------------------------------


def made(model_class: str, config: transformers.PretrainedConfig) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return getattr(transformers, model_class)(config).double()


def segformer():
    config = transformers.SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[3, 3],
        strides=[2, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        classifier_dropout_prob=0.0,
        drop_path_rate=0.0,
        initializer_range=0.2,
        num_labels=3,
    )
    model = made("SegformerForSemanticSegmentation", config)
    model.decode_head.batch_norm = torch.nn.Identity()  # it would mix the images of a micro-batch
    return model


def wav2vec2():
    silent = ("hidden", "activation", "attention", "feat_proj", "final")
    config = transformers.Wav2Vec2Config(
        vocab_size=8,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        conv_dim=(8, 8),
        conv_stride=(4, 2),
        conv_kernel=(8, 4),
        feat_extract_norm="layer",
        do_stable_layer_norm=True,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        initializer_range=0.2,
        apply_spec_augment=False,
        layerdrop=0.0,
        pad_token_id=0,
        **{f"{place}_dropout": 0.0 for place in silent},
    )
    return made("Wav2Vec2ForCTC", config)


def whisper():
    config = transformers.WhisperConfig(
        vocab_size=tiny.VOCAB,
        num_mel_bins=4,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        max_source_positions=8,
        max_target_positions=tiny.LONGEST,
        init_std=0.2,
        dropout=0.0,
        pad_token_id=tiny.PAD,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        begin_suppress_tokens=None,
    )
    return made("WhisperForConditionalGeneration", config)


def clip():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = sizes | {"vocab_size": tiny.VOCAB, "max_position_embeddings": tiny.LONGEST, "eos_token_id": 2}
    vision = sizes | {"image_size": 8, "patch_size": 4}
    return made("CLIPModel", transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))


# --- rows ------------------------------------------------------------------------------------------------------------


def with_columns(rows):
    """A weight and a mark for each label."""
    generator = torch.Generator().manual_seed(0)
    for row in rows:
        size = row["labels"].shape
        row["token_weights"] = torch.rand(size, generator=generator)
        row["negative"] = torch.rand(size, generator=generator) < 0.3
    return rows


def without_target(rows):
    """The third row has no label at all."""
    rows[2]["labels"] = torch.full_like(rows[2]["labels"], N)
    return rows


def maps():
    """8 x 8 images with a class a pixel, 255 where nobody said."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for row in tiny.image_rows(8):
        labels = torch.randint(3, (8, 8), generator=generator)
        labels[torch.rand(8, 8, generator=generator) < 0.2] = 255
        rows.append(row | {"labels": labels})
    return rows


def sounds():
    """40 to 120 samples and up to 4 labels each; how many frames the model makes of them."""
    generator = torch.Generator().manual_seed(0)
    lengths = wav2vec2()._get_feat_extract_output_lengths
    rows = []
    for size in torch.randint(60, 121, (8,), generator=generator).tolist():
        labels = torch.randint(1, 8, (int(torch.randint(1, 4, (), generator=generator)),), generator=generator)
        values = torch.randn(size, generator=generator, dtype=torch.float64)
        rows.append(
            {
                "input_values": values,
                "attention_mask": torch.ones(size, dtype=torch.int64),
                "labels": labels,
                "input_lengths": int(lengths(size)),
            }
        )
    return rows


def windows():
    """Questions and answers in windows of one length: their pads are classes too."""
    return [
        row | {name: F.pad(row[name], (0, 12 - len(row[name]))) for name in ("input_ids", "attention_mask")}
        for row in tiny.qa_rows(8)
    ]


def spoken():
    """Features of a fixed length and ragged labels."""
    generator = torch.Generator().manual_seed(0)
    return [
        {"input_features": torch.randn(4, 16, generator=generator, dtype=torch.float64), "labels": row["labels"]}
        for row in tiny.lm_rows(8, prompt=False)
    ]


def captioned():
    """Images with a text, which ends in 2."""
    pairs = zip(tiny.image_rows(8), tiny.lm_rows(8), strict=True)
    return [
        {
            "pixel_values": image["pixel_values"],
            "input_ids": torch.cat([text["input_ids"], torch.tensor([2])]),
            "attention_mask": torch.ones(len(text["input_ids"]) + 1, dtype=torch.int64),
            "labels": torch.tensor(index),
        }
        for index, (image, text) in enumerate(pairs)
    ]


# --- references ------------------------------------------------------------------------------------------------------


def inputs(batch):
    return {name: value for name, value in batch.items() if name not in ("labels", "shift_labels")}


def ids_of(batch):
    return batch["labels"]["labels"] if isinstance(batch["labels"], dict) else batch["labels"]


def next_token_nll(model, batch):
    """Minus the log-probability of each label but the first, 0 where there is none, and where there is one."""
    logits, labels = model(**inputs(batch)).logits[:, :-1].transpose(1, 2), ids_of(batch)[:, 1:]
    return F.cross_entropy(logits, labels, reduction="none"), labels != N


def by_sequence(model, batch):
    nll, scored = next_token_nll(model, batch)
    means = [row[here].mean() for row, here in zip(nll, scored, strict=True) if here.any()]
    return torch.stack(means).mean()


def by_weight(model, batch):
    nll, scored = next_token_nll(model, batch)
    return (nll * batch["labels"]["token_weights"][:, 1:])[scored].sum() / scored.sum()


def by_mark(model, batch):
    nll, scored = next_token_nll(model, batch)
    bad = scored & (batch["labels"]["negative"][:, 1:] == 1)
    return (nll[scored & ~bad].sum() - (1 - (-nll[bad]).exp()).log().sum()) / scored.sum()


def own_answers(model, batch):
    start, end = batch["labels"].T
    return model(**inputs(batch), start_positions=start, end_positions=end).loss


def own_loss(model, batch):
    return model(**inputs(batch), labels=batch["labels"]).loss


def by_pixel(model, batch):
    labels = batch["labels"]
    logits = F.interpolate(model(**inputs(batch)).logits, size=labels.shape[1:], mode="bilinear", align_corners=False)
    return F.cross_entropy(logits, labels) + 0.5 * dice_by_loop(logits, labels)


def dice_by_loop(logits, labels):
    """Dice of every class of every image; an image counts by its labelled pixels."""
    costs, pixels = [], []
    for p, ids in zip(logits.softmax(1), labels, strict=True):
        scored = ids != N
        dices = [
            2 * p[c][ids == c].sum() / ((ids == c).sum() + p[c][scored].sum()) for c in ids[scored].unique().tolist()
        ]
        costs.append(1 - sum(dices) / len(dices))
        pixels.append(scored.sum())
    return sum(cost * number for cost, number in zip(costs, pixels, strict=True)) / sum(pixels)


def by_sound(model, batch):
    """torch's own loss, a row at a time without its padding."""
    logits, labels = model(**inputs(batch)).logits.log_softmax(-1), batch["labels"]["labels"]
    total = 0
    for row, padded, size in zip(logits, labels, batch["labels"]["input_lengths"].tolist(), strict=True):
        ids = padded[padded != N]
        total = total + F.ctc_loss(row[:size], ids, torch.tensor(size), torch.tensor(len(ids)), reduction="sum")
    return total / (labels != N).sum()


def own_contrast(model, batch):
    return model(**inputs(batch), return_loss=True).loss


def hardest_triplets(model, batch):
    embeddings, labels = model(**inputs(batch)).logits, batch["labels"]
    costs = []
    for anchor, label in zip(embeddings, labels, strict=True):
        distances = (embeddings - anchor).square().sum(1).clamp(min=1e-300).sqrt()
        same, others = distances[(labels == label) & (distances > 1e-9)], distances[labels != label]
        costs.append(F.relu(0.2 + same.max() - others.min()) if len(same) and len(others) else embeddings.sum() * 0)
    return torch.stack(costs).mean()


# --- cases -----------------------------------------------------------------------------------------------------------


def seq2seq(model, rows=None):
    rows = tiny.lm_rows(8, prompt=False) if rows is None else rows
    return Case(model, rows, seq2seq_lm_loss, with_decoder_inputs(tiny.pad, model()), own_loss)


NAMED = {"label_names": ["labels"]}
ADDITIVE = {
    "sequences": Case(
        partial(tiny.model, "llama"),
        without_target(tiny.lm_rows(8)),
        partial(causal_lm_loss, normalize="sequences"),
        count_sequences(tiny.pad, shift=1),
        by_sequence,
    ),
    "token weights": Case(
        partial(tiny.model, "llama"),
        with_columns(tiny.lm_rows(8)),
        partial(causal_lm_loss, term=token_weighted(cross_entropy)),
        with_extras(tiny.pad, ["token_weights", "negative"], shift=1),
        by_weight,
    ),
    "unlikelihood": Case(
        partial(tiny.model, "gpt2"),
        with_columns(tiny.lm_rows(8)),
        partial(causal_lm_loss, term=unlikelihood),
        with_extras(tiny.pad, ["negative", "token_weights"], shift=1),
        by_mark,
    ),
    "answers": Case(
        partial(tiny.model, "bert_qa"),
        windows(),
        question_answering_loss,
        pack_spans(tiny.pad),
        own_answers,
        NAMED,
    ),
    "pixels": Case(
        segformer, maps(), partial(segmentation_loss, dice=0.5), replace_labels(tiny.pad, {255: N}), by_pixel
    ),
    "speech": Case(wav2vec2, sounds(), ctc_loss, with_extras(tiny.pad, ["input_lengths"], shift=0), by_sound),
    "t5": seq2seq(partial(tiny.model, "t5")),
    "bart": seq2seq(partial(tiny.model, "bart")),
    "whisper": seq2seq(whisper, spoken()),
}
CONTRASTS = {
    "clip": Case(clip, captioned(), clip_loss, tiny.pad, own_contrast, NAMED),
    "triplets": Case(partial(tiny.model, "bert_cls"), tiny.class_rows(8), triplet_loss, tiny.pad, hardest_triplets),
}
CASES = ADDITIVE | CONTRASTS


def trainer(case: Case, **arguments: Any) -> transformers.Trainer:
    """The stock Trainer of a case, which trains and evaluates on the same rows."""
    settings = {**case.arguments, **arguments}
    return tiny.trainer(case.model(), case.rows, case.loss, collator=case.collator, eval_rows=case.rows, **settings)
