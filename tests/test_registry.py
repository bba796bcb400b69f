"""Everything exported is registered, and keeps the rules, or has a reason not to that still holds."""

from functools import partial

import pytest

import lossfns
import metrics
import reducers
from lossfns.testing import check_loss, check_term, loss_rules, term_rules
from metrics.testing import check_metric, metric_rules
from reducers.testing import check_reducer, reducer_rules
from tests import registry
from tests.kit.verdicts import broken_rules

TERMS = [*registry.TERMS, *registry.OUTCOME_TERMS, *registry.REAL_TERMS]
ALL = [*registry.LOSSES, *TERMS, *registry.REDUCERS, *registry.METRICS]


def labels(entry):
    return entry.label


def in_loss(entry):
    """A term within the loss that takes it."""
    if entry in registry.OUTCOME_TERMS:
        return partial(lossfns.multi_label_loss, term=entry.function), {"task": "multi_label"}
    if entry in registry.REAL_TERMS:
        return partial(lossfns.regression_loss, term=entry.function), {"task": "regression"}
    return partial(lossfns.causal_lm_loss, term=entry.function), {"task": "causal_lm"}


@pytest.mark.parametrize("package", [lossfns, reducers, metrics], ids=lambda package: package.__name__)
def test_everything_exported_is_registered(package):
    registered = {entry.name for entry in ALL} | {*registry.NOT_CALLED_BY_THE_TRAINER}
    assert set(package.__all__) - registered == set()


def test_everything_registered_is_exported():
    exported = {*lossfns.__all__, *reducers.__all__, *metrics.__all__}
    assert {entry.name for entry in ALL} | {*registry.NOT_CALLED_BY_THE_TRAINER} <= exported


@pytest.mark.parametrize("entry", registry.LOSSES, ids=labels)
def test_losses(entry):
    report = check_loss(entry.function, **entry.options, skip=entry.skip)
    assert all(verdict.comparisons for verdict in report.verdicts)


@pytest.mark.parametrize("entry", TERMS, ids=labels)
def test_terms(entry):
    check_term(entry.function, **entry.options, skip=entry.skip)


@pytest.mark.parametrize("entry", [entry for entry in TERMS if entry.name != "gaussian_nll"], ids=labels)
def test_terms_in_their_losses(entry):
    """gaussian_nll wants two logits a target: it stands among the losses."""
    loss, options = in_loss(entry)
    check_loss(loss, **options, **entry.options, skip=entry.skip)


@pytest.mark.parametrize("entry", registry.REDUCERS, ids=labels)
def test_reducers(entry):
    report = check_reducer(entry.function, **entry.options, skip=entry.skip)
    assert all(verdict.comparisons for verdict in report.verdicts)


@pytest.mark.parametrize("entry", registry.METRICS, ids=labels)
def test_metrics(entry):
    report = check_metric(entry.function, **entry.options, skip=entry.skip)
    for verdict in report.verdicts:
        assert verdict.comparisons or verdict.refusals, verdict.rule
        assert all(refusal.reason.startswith("ValueError: ") for refusal in verdict.refusals), verdict.rule


@pytest.mark.parametrize("entry", [entry for entry in ALL if entry.skip], ids=labels)
def test_an_exception_is_needed(entry):
    """Who keeps a rule needs no excuse from it."""
    kind = next(
        rules
        for entries, rules in (
            (registry.LOSSES, loss_rules),
            (TERMS, term_rules),
            (registry.REDUCERS, reducer_rules),
            (registry.METRICS, metric_rules),
        )
        if entry in entries
    )
    assert {*entry.skip} == {*broken_rules(entry.function, kind(**entry.options))}


def test_an_exception_belongs_to_an_entry():
    named = {label for _, reasons in registry.EXCEPTIONS.values() for label in reasons}
    assert named <= {entry.label for entry in ALL}
