"""Every code block of the README and of docs/ runs, every export is documented, and links lead somewhere."""

import re
import shlex
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

import lossfns
import metrics
import reducers
from lossfns import collators
from lossfns.recipes import __main__ as recipes
from tests import tiny

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
DOCUMENTS = [*PAGES, ROOT / "CONTRIBUTING.md"]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"")


def name(page):
    return str(page.relative_to(ROOT))


def text(page):
    return page.read_text(encoding="utf-8")


def blocks(page, *languages):
    return [(language, body) for language, body in BLOCK.findall(text(page)) if language in languages]


def sides(diff):
    """Return the code before and after a diff block."""
    lines = diff.splitlines()
    before = [line[1:] for line in lines if not line.startswith("+")]
    after = [line[1:] for line in lines if not line.startswith("-")]
    return "\n".join(before), "\n".join(after)


@pytest.fixture
def page_module(monkeypatch):
    """Return a module with what a reader has before the first block: models, data, a collator and arguments."""
    rows = tiny.lm_rows(6)
    module = ModuleType("page")
    module.__dict__.update(
        model=tiny.model("llama"),
        teacher=tiny.model("llama", seed=1).eval(),
        seq2seq_model=tiny.model("t5"),
        tokenizer=SimpleNamespace(
            get_vocab=lambda: {"\u0120a": 4, "b": 5},
            all_special_ids=[],
            batch_decode=lambda rows, **_: ["ab" for _ in rows],
        ),
        args=tiny.arguments(max_steps=1, learning_rate=0.01),
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=tiny.pad,
        classifier=tiny.trainer(tiny.model("bert_cls").eval()),
        reviews=tiny.class_rows(12, seed=1),
        groups=["films", "products"] * 6,
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)  # so that functions of a page can be pickled
    return module


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_code_blocks_run_in_order(page, page_module, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    for language, body in blocks(page, "python", "diff"):
        if language == "diff":
            before, after = sides(body)
            compile(before, name(page), "exec")
        else:
            after = body
        exec(compile(after, name(page), "exec"), page_module.__dict__)


def test_the_change_of_the_readme_has_no_problems(page_module, capsys):
    ((_, diff),) = blocks(README, "diff")
    exec(compile(sides(diff)[1], name(README), "exec"), page_module.__dict__)
    printed = capsys.readouterr().out
    assert "check_trainer: no problems" in printed
    assert "'eval_perplexity': " in printed
    added = [line for line in diff.splitlines() if line.startswith("+    ")]
    assert len(added) == 3, "three arguments of the Trainer"


def test_the_text_of_a_broken_loss_is_what_check_loss_prints(page_module, capsys):
    page = ROOT / "docs" / "testing.md"
    ((_, expected),) = blocks(page, "text")
    (body,) = [body for _, body in blocks(page, "python") if "print(broken)" in body and "my_loss" in body]
    exec(compile(body, name(page), "exec"), page_module.__dict__)
    assert capsys.readouterr().out == expected


def test_every_export_is_on_a_page():
    pages = "\n".join(text(page) for page in PAGES if page != README)
    exports = {export for package in (lossfns, reducers, metrics, collators) for export in package.__all__}
    missing = sorted(
        export for export in exports if not re.search(rf"`{export}`|\b{export}\b[(,)]|\.{export}\b", pages)
    )
    assert not missing, f"add to the table of its family in docs/: {missing}"


def test_every_recipe_is_in_the_readme():
    recipes = {path.stem for path in (ROOT / "lossfns" / "recipes").glob("[!_]*.py")}
    assert set(re.findall(r"^\| `(\w+)` \| ", text(README).partition("## Recipes")[2], re.MULTILINE)) == recipes


def test_the_index_lists_every_page():
    linked = set(re.findall(r"\]\((\w+\.md)\)", text(ROOT / "docs" / "index.md")))
    assert linked == {page.name for page in PAGES if page != README} - {"index.md"}


def anchors(page):
    headings = re.findall(r"^#+ (.*)$", text(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", DOCUMENTS, ids=name)
def test_links_lead_somewhere(page):
    for target in filter(None, (group for match in LINK.findall(text(page)) for group in match)):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.is_file(), f"{name(page)} links to {target}"
        assert not anchor or anchor in anchors(file), f"{name(page)} links to {target}"


def test_the_readme_is_short():
    assert len(text(README).splitlines()) <= 180


def test_commands_exist():
    targets = set(re.findall(r"^([a-z-]+):", text(ROOT / "Makefile"), re.MULTILINE))
    named = {target for page in DOCUMENTS for target in re.findall(r"(?:^|`)make ([a-z-]+)", text(page), re.MULTILINE)}
    assert {"demo", "test", "lint"} <= named
    assert named <= targets


def test_commands_for_recipes_run(tmp_path, monkeypatch):
    """In this process, because the import of torch takes longer than all of them."""
    monkeypatch.chdir(tmp_path)
    shell = "\n".join(body for _, body in blocks(README, "bash"))
    commands = re.findall(r"^python -m lossfns\.recipes (.*)$", shell, re.MULTILINE)
    assert len(commands) >= 4
    for command in commands:
        recipes.main(shlex.split(command))
    assert {path.name for path in tmp_path.iterdir()} == {"my_training.py", "my_package"}


def test_the_workflow_runs_all_supported_versions():
    project = tomllib.loads(text(ROOT / "pyproject.toml"))["project"]
    matrix = yaml.safe_load(text(ROOT / ".github" / "workflows" / "test.yml"))["jobs"]["test"]["strategy"]["matrix"]
    lowest = next(row["requirements"] for row in matrix["include"] if row["versions"] == "lowest")
    pins = {pin.name: next(iter(pin.specifier)).version for pin in map(Requirement, lowest.split())}
    bounds = [Requirement(line) for line in project["dependencies"]]
    for name in ("torch", "transformers"):
        (bound,) = (one.specifier for one in bounds if one.name == name)
        (lower,) = (Version(each.version) for each in bound if each.operator == ">=")
        assert Version(pins[name]) == lower
    minors = [line.rpartition(" ")[2] for line in project["classifiers"] if re.search(r"Python :: 3\.\d+$", line)]
    assert matrix["python"] == minors
