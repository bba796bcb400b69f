"""A name that is wrong is named, beside those that are right; and no name in a message is private."""

from functools import partial

import pytest
import torch

from lossfns import (
    add_losses,
    batch_hard,
    causal_lm_loss,
    class_weighted,
    classification_loss,
    corn_levels,
    cross_entropy,
    distillation_loss,
    dpo,
    focal,
    huber,
    jensen_shannon,
    ordinal_loss,
    preference_loss,
    regression_loss,
    token_weighted,
    triplet_loss,
    weighted_sum,
    with_aux_loss,
)
from lossfns._core.combined import sequence_averaged
from lossfns._core.signature import check_options
from lossfns.training import TrainingMetrics, watch
from reducers import combine, sample_sums

LOGITS, IDS = torch.zeros(2, 3), torch.tensor([0, 1])
TEACHER = {"labels": torch.tensor([[0, 1]]), "teacher_logits": torch.zeros(1, 2, 3)}
MISSPELT = {
    "term": (lambda: classification_loss(LOGITS, IDS, term=partial(focal, gama=2.0)), "focal .*'gama'; options: gamma"),
    "part": (lambda: weighted_sum((1.0, partial(cross_entropy, a=1))), "cross_entropy .*'a'; options: none"),
    "weighted": (lambda: class_weighted(partial(focal, gama=2.0), [1.0, 1.0]), "focal .*'gama'; options: gamma"),
    "objective": (
        lambda: preference_loss(
            torch.zeros(2, 2, 3), torch.zeros(1, 2, 2).long(), objective=partial(dpo, bta=1), shift=1
        ),
        "dpo .*'bta'; options: beta, label_smoothing",
    ),
    "error": (lambda: regression_loss(LOGITS, LOGITS, term=partial(huber, dleta=1)), "huber .*'dleta'; options: delta"),
    "divergence": (
        lambda: distillation_loss(torch.zeros(1, 2, 3), TEACHER, divergence=partial(jensen_shannon, bta=0.1)),
        "jensen_shannon .*'bta'; options: beta",
    ),
    "levels": (lambda: ordinal_loss(LOGITS, IDS, levels=partial(corn_levels, a=1)), "corn_levels .*'a'; options: none"),
    "mining": (lambda: triplet_loss(LOGITS, IDS, mining=partial(batch_hard, a=1)), "batch_hard .*'a'; options: none"),
    "added": (lambda: add_losses({"a": (1.0, partial(causal_lm_loss, trm=focal))}), "causal_lm_loss .*'trm'; .*term"),
    "watched": (lambda: watch(partial(causal_lm_loss, trm=focal), TrainingMetrics()), "causal_lm_loss .*'trm'; .*term"),
    "auxiliary": (lambda: with_aux_loss(partial(causal_lm_loss, trm=1), "aux_loss", 1.0), "causal_lm_loss .*'trm'"),
    "reducer": (lambda: combine(sums=partial(sample_sums, shft=1)), "sample_sums .*'shft'; options: shift"),
}


@pytest.mark.parametrize("name", MISSPELT)
def test_unknown_option_is_named_with_the_known_ones(name):
    call, message = MISSPELT[name]
    with pytest.raises(TypeError, match=message.replace(" .*", " has no option .*", 1)):
        call()


def test_function_with_variadic_keywords_has_every_option():
    def any_term(log_prob, **options):
        return -log_prob

    check_options(partial(any_term, gama=2.0), "term")
    with pytest.raises(TypeError, match="variadic keyword"):  # which a term may not take, for another reason
        classification_loss(LOGITS, IDS, term=partial(any_term, gama=2.0))


def test_messages_and_reprs_have_no_private_name():
    weighted = class_weighted(token_weighted(cross_entropy), [1.0, 2.0])
    assert repr(weighted) == "class_weights * (1 * token_weights * (1 * cross_entropy))"
    assert repr(sequence_averaged(cross_entropy)) == "sequence_weights * (1 * cross_entropy)"
    with pytest.raises(ValueError, match=r"the term class_weights \* \(.* holds weights for 2 classes"):
        classification_loss(LOGITS, {"labels": IDS, "token_weights": torch.ones(2)}, term=weighted)
