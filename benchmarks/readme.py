"""`python -m benchmarks.readme`: put the numbers of the result files into the README's table of choices.

A test holds the two against each other.
"""

from collections.abc import Sequence

from . import harness, hidden, losses
from .harness import Result

README = harness.REPOSITORY / "README.md"
BEGIN, END = "<!-- written by `python -m benchmarks.readme` -->", "<!-- until here -->"
VOCABULARY = ("bfloat16", 151_936)

# the logits ..., how, when
CHOICES = (
    ("exist", "`causal_lm_loss`", "the default; hooks, callbacks and other code may read them"),
    (
        "are written over by their gradient",
        "`partial(causal_lm_loss, overwrite_logits=True)`",
        "training, any model; nothing may read the logits after the loss",
    ),
    (
        "exist where a label is",
        "`keep_supervised_logits(collator)`",
        "long prompts, short completions; one process a GPU",
    ),
    ("never exist", "`source=hidden_states(model)`", "large vocabularies, long sequences; training and evaluation"),
)


def decision_table(results: Sequence[Result]) -> str:
    """Peak and time of each way over those of the stock loss, bfloat16 and V 151,936; blank where none is measured."""
    found = {(result.benchmark, result.allocator): result for result in results if result.device == "cpu"}
    numbers = [of_logits(found, losses.OWN), of_logits(found, losses.OVER), "its positions alone", of_hidden(found)]
    lines = [(*choice, number) for choice, number in zip(CHOICES, numbers, strict=True)]
    return harness.table(("the logits ...", "how", "when", "peak; time, over stock"), lines)


def of_logits(found: dict[tuple[str, str], Result], loss: str) -> str:
    """Of a step as in the Trainer, from fresh logits on."""
    cases = [losses.Cases(found["losses", name].rows) for name in harness.ALLOCATORS if ("losses", name) in found]
    peaks = [case(VOCABULARY, loss)["released"] / case(VOCABULARY, losses.STOCK)["released"] for case in cases]
    return cell(peaks, [case.ratio(VOCABULARY, (loss, "all"), (losses.STOCK, "all")).median for case in cases])


def of_hidden(found: dict[tuple[str, str], Result]) -> str:
    """Of a step from the hidden states on: the head, the loss, and both backwards."""
    peaks, times = [], []
    for name in harness.ALLOCATORS:
        rows = found["hidden", name].rows if ("hidden", name) in found else []
        for dtype, share, case in hidden.cases(rows):
            if (dtype, share) == (VOCABULARY[0], "all") and hidden.OURS in case:
                row, base = case[hidden.OURS], case[hidden.STOCK]
                peaks.append(row["peak"] / base["peak"])
                times.append(harness.ratio(row["seconds"], base["seconds"]).median)
    return cell(peaks, times)


def cell(peaks: Sequence[float], times: Sequence[float]) -> str:
    """The peak does not depend on the allocator, the times stand in its settings' order."""
    return f"{peaks[0]:.2f}; {' / '.join(f'{time:.2f}' for time in times)}" if peaks else ""


def updated(text: str, results: Sequence[Result]) -> str:
    """`text` with the table between its marks written anew."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{decision_table(results)}\n\n{END}{after}"


def main() -> None:
    results = harness.read_results(harness.REPOSITORY / "benchmarks" / "results")
    README.write_text(updated(README.read_text(encoding="utf-8"), results), encoding="utf-8")


if __name__ == "__main__":
    main()
