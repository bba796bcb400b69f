"""Tasks for losses whose outputs or labels have another shape than those of the named tasks."""

from dataclasses import replace
from operator import itemgetter

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_outputs import QuestionAnsweringModelOutput

from lossfns.testing import Task
from lossfns.testing.tasks import TASKS

IGNORED = -100
SCORED = TASKS["masked_lm"].make(torch.Generator(), 7)[1] != IGNORED  # rows of different lengths, prompts, gaps


def normal(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def choice(generator, classes, *shape, least=0):
    return torch.randint(least, classes, shape, generator=generator)


def images(generator, classes):
    """Images of 8 x 2 pixels with gaps; channels are last here, and first in the output of the model."""
    scored = torch.stack([SCORED, SCORED.flip(1)], -1)
    labels = choice(generator, classes, *scored.shape).masked_fill(~scored, IGNORED)
    return normal(generator, *scored.shape, classes), labels


def coarse_images(generator, classes):
    logits, labels = images(generator, classes)
    return logits[:, ::2, :1], labels


def channels_first(logits):
    return {"logits": logits.movedim(-1, 1)}


def spans(generator, places):
    labels = choice(generator, places, 4, 2)
    labels[1, 0], labels[2, 1] = IGNORED, IGNORED
    return normal(generator, 4, 2, places), labels


def starts_and_ends(logits):
    return QuestionAnsweringModelOutput(start_logits=logits[:, 0], end_logits=logits[:, 1])


def frames(generator, classes):
    """Eight frames for up to three labels; id 0 is the blank."""
    labels = choice(generator, classes, 4, 3, least=1)
    labels[1:, 2], labels[2, 1] = IGNORED, IGNORED
    return normal(generator, 4, 8, classes), labels


IMAGES = Task("images", images, sequence=True, output=channels_first)
COARSE_IMAGES = Task("coarse images", coarse_images, output=channels_first)
SPANS = Task("spans", spans, output=starts_and_ends)
FRAME_COUNTS = {"input_lengths": lambda labels: torch.tensor([8, 7, 5, 6])[: len(labels)]}

FRAMES = Task("frames", frames, values=lambda classes: range(1, classes))


def targets(generator, classes):
    labels = normal(generator, 4, 3)
    labels[1, 2] = IGNORED
    return normal(generator, 4, 3), labels


def means_and_variances(generator, classes):
    return normal(generator, 4, 2), normal(generator, 4)


TARGETS = Task("targets", targets, values=TASKS["regression"].values)
VARIANCES = Task("means and variances", means_and_variances, values=TASKS["regression"].values)


def two_views(generator, size):
    return normal(generator, 4, 2, size), choice(generator, 3, 4)


def similarities(generator, classes):
    """Similarities of each text to four images, of each image to four texts, and the index of the sample."""
    both = torch.stack([2 * normal(generator, 4, 4), torch.zeros(4, 4), torch.eye(4)], 1)
    return both, choice(generator, 3, 4)


def among_each_other(logits):
    texts, images, places = logits[:, 0], logits[:, 1], logits[:, 2].argmax(-1)
    return {"logits_per_text": texts[:, places] + images[:, places].T}


def embeddings(generator, size):
    return normal(generator, 4, size), torch.tensor([0, 2, 0, 2])


VIEWS = Task("two views", two_views, output=lambda logits: {"queries": logits[:, 0], "keys": logits[:, 1]})
SIMILARITIES = Task("similarities", similarities, output=among_each_other)
EMBEDDINGS = Task("embeddings", embeddings)
QUERIES_AND_KEYS = itemgetter("queries", "keys")


def two_heads(logits):
    """A second head that predicts the label of the first one position earlier."""
    return {"logits": logits, "further": 0.5 * F.pad(logits[:, 1:], (0, 0, 0, 1))}


def routed(logits):
    return {"logits": logits, "aux_loss": torch.full((), 2.0, device=logits.device)}


def teacher_logits(labels):
    return normal(torch.Generator().manual_seed(5), *labels.shape, 7)


def best_ids(labels):
    return teacher_logits(labels).topk(3).indices


def best_log_probs(labels):
    return teacher_logits(labels).log_softmax(-1).topk(3).values


class Teacher(nn.Module):
    """A frozen model that reads its logits from a table."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(teacher_logits(torch.zeros(7)), requires_grad=False)
        self.eval()

    def forward(self, input_ids):
        return {"logits": self.table[input_ids.clamp(min=0)]}


TEACHER_LOGITS = {"teacher_logits": teacher_logits}
TEACHER_IDS = {"teacher_ids": best_ids, "teacher_log_probs": best_log_probs}
TEACHER_INPUTS = {"teacher_input_ids": lambda labels: labels.clamp(min=0)}

TWO_HEADS = replace(TASKS["causal_lm"], name="two heads", output=two_heads)
ROUTED = replace(TASKS["causal_lm"], name="a mixture of experts", output=routed)


def completions(generator, classes):
    """A chosen and a rejected completion per sample, with prompts and padding; one of them is empty."""
    scored = torch.stack([SCORED, SCORED.roll(1, 0)], -1)
    scored[2, :, 1] = False
    labels = choice(generator, classes, *scored.shape).masked_fill(~scored, IGNORED)
    return normal(generator, *scored.shape, classes), labels


def chosen_then_rejected(logits):
    return {"logits": logits.permute(2, 0, 1, 3).flatten(0, 1)}


def of_pairs(start, step):
    return lambda labels: start + step * torch.arange(len(labels))


def rewards(generator, classes):
    return normal(generator, 4, 2), torch.tensor([0, 0, IGNORED, 0])


REFERENCE = {
    "pair_ids": of_pairs(0, 1),
    "reference_chosen": of_pairs(-25.0, -0.5),
    "reference_rejected": of_pairs(-24.0, 0.25),
}

COMPLETIONS = Task("pairs", completions, sequence=True, shift=1, by_sequence=True, output=chosen_then_rejected)
REWARDS = Task(
    "rewards", rewards, values=lambda classes: (0,), output=lambda logits: {"logits": logits.T.reshape(-1, 1)}
)
