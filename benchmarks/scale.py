"""What models of 8 to 72 billion parameters would need: computed from coefficients of the results, and marked so."""

from collections.abc import Sequence

import numpy as np

from . import evaluation, harness, hidden, peers
from .harness import Result, Row, human_bytes
from .losses import OVER, OWN, STOCK

# Vocabulary and width of the published configurations.
MODELS = {
    "Llama 3 8B": (128_256, 4096),
    "Qwen3 8B": (151_936, 4096),
    "Gemma 2 27B": (256_000, 4608),
    "Llama 3 70B": (128_256, 8192),
    "Qwen2.5 72B": (152_064, 8192),
}
TOKENS = (32_768, 131_072, 1_048_576)
SAMPLES, LENGTH = 10_000, 2048
LOGIT = 2  # bytes, bfloat16


def section(results: Sequence[Result]) -> str:
    """The tables that the results have coefficients for; empty where they have none."""
    rows = {name: _rows(results, name) for name in ("peers", "hidden", "evaluation")}
    parts = [_training(rows["peers"], rows["hidden"]), _evaluation(rows["evaluation"])]
    shown = [part for part in parts if part]
    return "\n\n".join(["**Computed, not measured**, from the coefficients above.", *shown]) if shown else ""


def _rows(results: Sequence[Result], benchmark: str) -> list[Row]:
    """Of the first result that shows something: bytes do not depend on the allocator."""
    found = [result.rows for result in results if result.benchmark == benchmark and not result.quick]
    return found[0] if found else []


# --- training ---------------------------------------------------------------------------------------------------------


def slopes(rows: Sequence[Row]) -> dict[str, float]:
    """Bytes a logit that each loss of given logits needs above them: its slope for the largest vocabulary it has."""
    found: dict[str, float] = {}
    for (field, vocabulary, loss), lines in sorted(peers.lines_of(rows).items()):
        line = lines.line("peak")
        if field == "logits" and line is not None:
            found[loss] = line.slope / vocabulary
    return found


def hidden_coefficients(of_peers: Sequence[Row], of_hidden: Sequence[Row]) -> np.ndarray | None:
    """Bytes an element of the hidden states, of the head, and of the vocabulary, by least squares over all peaks."""
    points = [
        (row["tokens"], row["vocabulary"], peers.HIDDEN, row["peak"])
        for row in of_peers
        if row["field"] == "hidden states" and row["loss"] == hidden.OURS and row["tokens"] > peers.BLOCK
    ]
    for row in of_hidden:
        if row.get("loss") == hidden.OURS and (row["dtype"], row["supervised"]) == ("bfloat16", "all"):
            width = row["hidden_bytes"] // (2 * row["tokens"])
            points += [
                (row["tokens"], hidden.VOCABULARY, width, row["peak"]),
                (row["tokens"] // 2, hidden.VOCABULARY, width, row["peak_of_half_the_tokens"]),
            ]
    if len({width for _, _, width, _ in points}) < 2:
        return None
    features = np.array([(tokens * width, vocabulary * width, vocabulary) for tokens, vocabulary, width, _ in points])
    return np.linalg.lstsq(features.astype(float), np.array([peak for *_, peak in points]), rcond=None)[0]


def _training(of_peers: Sequence[Row], of_hidden: Sequence[Row]) -> str:
    a_logit = slopes(of_peers)
    if not {STOCK, OWN, OVER} <= a_logit.keys():
        return ""
    of_states = hidden_coefficients(of_peers, of_hidden)
    named = ", ".join(f"{name} {a_logit[name]:.2f}" for name in (STOCK, OWN, OVER))
    text = (
        f"A batch's bfloat16 logits and what its loss and gradient need with them. Bytes a logit above the logits: "
        f"{named}."
    )
    if of_states is not None:
        text += (
            f" From hidden states: {of_states[0]:.2f} bytes an element of theirs, {of_states[1]:.2f} an element of the "
            f"head, {of_states[2]:.0f} a token of the vocabulary; no logits."
        )
    header = ("model", "V", "H", "tokens", "logits", STOCK, OWN, OVER, hidden.OURS)
    cells = []
    for name, (vocabulary, width) in MODELS.items():
        for tokens in TOKENS:
            logits = tokens * vocabulary
            needs = [human_bytes((LOGIT + a_logit[loss]) * logits) for loss in (STOCK, OWN, OVER)]
            states = "-"
            if of_states is not None:
                states = human_bytes(of_states @ (tokens * width, vocabulary * width, vocabulary))
            case = [name, f"{vocabulary:,}", f"{width:,}", f"{tokens:,}", human_bytes(LOGIT * logits)]
            cells.append([*case, *needs, states])
    return f"{text}\n\n{harness.table(header, cells)}"


# --- evaluation -------------------------------------------------------------------------------------------------------


def _evaluation(rows: Sequence[Row]) -> str:
    growth = [row for row in rows if "seconds" in row and not row["computed"]]
    if not growth:
        return ""
    stock = [row for row in growth if row["setup"] == evaluation.NOTHING][-2:]
    kept = _slope(stock, "kept") / (stock[0]["tokens"] * stock[0]["vocabulary"])
    resident = _slope(stock, "resident") / (stock[0]["tokens"] * stock[0]["vocabulary"])
    own = [row for row in growth if row["setup"] == evaluation.SUMS][-2:]
    sums = _slope(own, "kept")
    text = (
        f"An evaluation of {SAMPLES:,} samples of {LENGTH:,} tokens. With nothing configured the Trainer keeps "
        f"{kept:.2f} bytes a logit, and the process grows by {resident:.2f}; `{evaluation.SUMS}` keeps {sums:.0f} "
        "bytes a sample."
    )
    cells = []
    for name, (vocabulary, _) in MODELS.items():
        logits = SAMPLES * LENGTH * vocabulary
        cells.append([name, *map(human_bytes, (kept * logits, resident * logits, sums * SAMPLES))])
    header = ("model", "kept, nothing configured", "process, the same", f"kept, {evaluation.SUMS}")
    return f"{text}\n\n{harness.table(header, cells)}"


def _slope(rows: Sequence[Row], figure: str) -> float:
    few, more = rows
    return (more[figure] - few[figure]) / (more["samples"] - few["samples"])
