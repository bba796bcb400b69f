"""Every export is registered, on its page of docs/, and keeps the rules or has a reason not to that still holds."""

import re
from functools import partial
from pathlib import Path

import pytest

import lossfns
import metrics
import reducers
from lossfns import collators
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


PACKAGES = {
    lossfns: "LOSS_EXPORTS, TERM_EXPORTS, OUTCOME_EXPORTS, REAL_EXPORTS or OPTION_EXPORTS",
    collators: "COLLATOR_EXPORTS",
    reducers: "REDUCER_EXPORTS",
    metrics: "METRIC_EXPORTS",
}


def line_to_add(package, name):
    page = {collators: "collators", reducers: "reducers", metrics: "metrics"}.get(package, "losses")
    arguments = '{"argument of a call that works": ...}, ways=(Way({"option of check_...": ...}),)'
    owner = package.__name__.rpartition(".")[-1]
    return f'add to {PACKAGES[package]} in tests/registry.py:\n    Export({owner}.{name}, "{page}", {arguments}),'


def missing(package, names):
    """Return what to do about exports of a package that the registry lacks."""
    registered = {export.name for export in registry.EXPORTS}
    return [line_to_add(package, name) for name in names if name not in registered]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_every_export_is_registered(package):
    assert not missing(package, package.__all__), "\n".join(missing(package, package.__all__))


def test_a_missing_entry_names_the_line_to_add():
    (message,) = missing(lossfns, ["focal", "focal_2"])
    assert "add to LOSS_EXPORTS, TERM_EXPORTS" in message
    assert 'in tests/registry.py:\n    Export(lossfns.focal_2, "losses", {' in message


def test_every_entry_is_exported():
    exported = {name for package in PACKAGES for name in package.__all__}
    assert {export.name.partition("(")[0] for export in registry.EXPORTS} == exported


def test_every_entry_is_checked_by_rules_or_says_why_not():
    titles = {entry.name for entry in ALL}
    for export in registry.EXPORTS:
        assert bool(export.why) != (export.name.partition("(")[0] in titles), export.name


# Without bad inputs of their own: their arguments are tensors that a loss passes, or objects of another library.
ONLY_TENSORS = {
    *("cross_entropy", "z_loss", "dft", "entropy_bonus", "unlikelihood", "teacher_divergence", "gaussian_nll"),
    *("mse", "mae", "log_cosh", "poisson_nll", "forward_kl", "reverse_kl", "total_variation"),
    *("coral_levels", "corn_levels", "batch_hard", "semi_hard", "watch", "Combined", "TrainingMetrics"),
}


def test_every_entry_has_a_call_that_works():
    without = {export.name for export in registry.EXPORTS if export.works is None and export.evaluation is None}
    assert without == ONLY_TENSORS


DOCS = Path(__file__).resolve().parent.parent / "docs"


@pytest.mark.skipif(not DOCS.is_dir(), reason="this checkout has no docs/")
def test_every_entry_is_on_its_page():
    pages = {export.page: (DOCS / f"{export.page}.md").read_text(encoding="utf-8") for export in registry.EXPORTS}
    for export in registry.EXPORTS:
        name = export.name.partition("(")[0]
        assert re.search(rf"\b{name}\b", pages[export.page]), f"name {name} in the table of docs/{export.page}.md"


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
