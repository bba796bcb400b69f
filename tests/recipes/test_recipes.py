"""Every recipe is a short, complete script that runs offline on its built-in data and shows the effect it describes."""

import ast
import csv
import importlib
import json
import runpy
import socket
import sys

import pytest
import transformers

from lossfns.recipes.__main__ import main, recipes

NAMES = sorted(recipes())
VOCABULARY = 4_000  # size of the built-in tokenizers

# Options that make each recipe small; all others are the recipe's defaults.
COMMON = ["--save_strategy=no", "--save_total_limit=9", "--dataloader_pin_memory=false", "--use_cpu=true", "--seed=1"]
SMALL = {
    "bloom_lora": "--max_steps 1 --samples 32 --per_device_train_batch_size 1 --per_device_eval_batch_size 1",
    "completion_only": "--max_steps 10 --samples 160",
    "distillation": "--max_steps 5 --samples 40 --learning_rate 0.01",
    "dpo": "--max_steps 8 --samples 64 --learning_rate 0.001",
    "early_stopping": "--num_train_epochs 9 --samples 40 --learning_rate 0.02 --save_strategy epoch",
    "question_answering": "--max_steps 4 --samples 48",
    "sliced_evaluation": "--max_steps 6 --samples 120",
    "text_classification": "--max_steps 4 --samples 60 --per_device_train_batch_size 1",
    "token_classification": "--max_steps 50 --samples 300 --learning_rate 0.003",
    "tuned_thresholds": "--max_steps 30",
}


def module_of(name):
    return importlib.import_module(f"lossfns.recipes.{name}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("recipes")


@pytest.fixture(scope="module")
def scores_of(folder):
    """Return a function that runs a recipe once, without a network, and returns its scores."""
    cached = {}

    def refuse(*arguments):
        raise OSError(f"a recipe tried to connect to the network: {arguments}")

    def scores(name):
        if name not in cached:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(socket.socket, "connect", refuse)
                options = [*COMMON, *SMALL[name].split(), "--output_dir", str(folder / name)]
                cached[name] = module_of(name).main(options)
        return cached[name]

    return scores


def test_every_recipe_has_small_options():
    assert set(NAMES) == set(SMALL)


@pytest.mark.parametrize("name", NAMES)
def test_is_a_short_complete_script(name):
    text = recipes()[name].read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert len(text.splitlines()) <= 90
    for part in ("Loss:", "Reducer:", "Metric:", "Collator:", "Needs:"):
        assert part in ast.get_docstring(tree)
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert None not in modules, "a copied script cannot use relative imports"
    assert not {module.partition(".")[0] for module in modules} & {"benchmarks", "tests"}
    private = [module for module in modules if module.startswith(("lossfns", "reducers", "metrics")) and "._" in module]
    assert not private
    assert text.endswith('if __name__ == "__main__":\n    main()\n')


@pytest.mark.parametrize("name", NAMES)
def test_prints_a_score_last(name, scores_of, capsys):
    scores_of(name)
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert any(character.isdigit() for character in last)


def test_bloom_reducer_needs_less_memory_for_the_same_accuracy(scores_of):
    with_logits, with_reducer = (scores_of("bloom_lora")[name] for name in ("with_logits", "with_reducer"))
    assert with_reducer["eval_token_accuracy"] == pytest.approx(with_logits["eval_token_accuracy"], abs=1e-6)
    assert with_logits["peak_mib"] > 2 * with_reducer["peak_mib"]


@pytest.mark.parametrize("name", ["completion_only", "distillation"])
def test_language_models_learn(name, scores_of):
    assert scores_of(name)["eval_perplexity"] < VOCABULARY, "the perplexity of a uniform distribution"


def test_preferences_move_in_the_right_direction(scores_of):
    scores = scores_of("dpo")
    assert scores["eval_pairs"] == 8
    assert scores["eval_reward_margin"] > 0, "the reward margin of the reference model is 0"


def test_early_stopping_keeps_the_best(scores_of, folder):
    scores = scores_of("early_stopping")
    states = [json.loads(path.read_text("utf-8")) for path in (folder / "early_stopping").glob("*/trainer_state.json")]
    history = max((state["log_history"] for state in states), key=len)
    perplexities = [entry["eval_perplexity"] for entry in history if "eval_perplexity" in entry]
    best = perplexities.index(min(perplexities)) + 1
    assert 1 < best < scores["epoch"] < 9, "training stops before the last epoch"
    assert scores["eval_perplexity"] == pytest.approx(min(perplexities))


def test_group_tokens_add_up_and_scores_lie_in_their_intervals(scores_of):
    scores = scores_of("sliced_evaluation")
    groups = {name.partition("/")[2] for name in scores if "/" in name}
    assert len(groups) == 4
    assert sum(scores[f"eval_tokens/{group}"] for group in groups) == scores["eval_tokens"]
    for group in groups:
        low, value, high = (scores[f"eval_perplexity{end}/{group}"] for end in ("_low", "", "_high"))
        assert low < value < high


def test_classification_and_answers_have_valid_scores(scores_of):
    assert 0 < scores_of("text_classification")["eval_accuracy"] <= 1
    assert scores_of("token_classification")["eval_entities"] > 50
    assert scores_of("token_classification")["eval_entity_f1"] > 0
    answers = scores_of("question_answering")
    assert 0 <= answers["eval_exact_match"] <= answers["eval_token_f1"] <= 1


def test_tuned_thresholds_improve_macro_f1(scores_of):
    scores = scores_of("tuned_thresholds")
    assert scores["f1_macro"] > scores["untuned_f1_macro"] > 0.1


ROW = {"prompt": "Say it", "completion": "it", "chosen": "it", "rejected": "no", "text": "Say", "group": "a"}


@pytest.mark.parametrize(
    ("name", "loader", "expected"),
    [
        ("bloom_lora", "load_pairs", [("Say it", "it")]),
        ("completion_only", "load_pairs", [("Say it", "it")]),
        ("dpo", "load_pairs", [ROW]),
        ("sliced_evaluation", "load_texts", [("Say", "a")]),
        ("question_answering", "load_examples", [ROW]),
    ],
)
def test_reads_json_lines_from_data_option(tmp_path, name, loader, expected):
    (tmp_path / "mine.jsonl").write_text(json.dumps(ROW) + "\n", encoding="utf-8")
    assert list(getattr(module_of(name), loader)(str(tmp_path / "mine.jsonl"))) == expected


def test_reads_csv_and_conll_from_data_option(tmp_path):
    with (tmp_path / "mine.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("text", "label"), ("a, b\nc", "x")])
    assert module_of("text_classification").load_texts(str(tmp_path / "mine.csv")) == [("a, b\nc", "x")]
    (tmp_path / "numbers.csv").write_text("0.5,1,0\n0.25,2,1\n", encoding="utf-8")
    rows = module_of("tuned_thresholds").load(str(tmp_path / "numbers.csv"))
    assert sorted((*row["inputs"], *row["labels"]) for row in rows) == [(0.25, 2, 0, 1), (0.5, 1, 1, 0)]
    (tmp_path / "mine.conll").write_text("Ann B-PER\nran O\n\n \nBonn _ B-LOC\n", encoding="utf-8")
    found = module_of("token_classification").load_sentences(str(tmp_path / "mine.conll"))
    assert found == [[("Ann", "B-PER"), ("ran", "O")], [("Bonn", "B-LOC")]]


def test_text_classification_has_an_answer_token_per_class(tmp_path):
    with (tmp_path / "mine.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(
            [("text", "label"), *((f"text {place}", f"class {place:02}") for place in range(60))]
        )
    recipe = module_of("text_classification")
    args = transformers.TrainingArguments(tmp_path, use_cpu=True, report_to="none")
    trainer = recipe.make_trainer(recipe.Options(data=str(tmp_path / "mine.csv")), args)
    answers = trainer.preprocess_logits_for_metrics.keywords["token_ids"]
    assert len(set(answers)) == 60
    words = trainer.data_collator.tokenizer.convert_ids_to_tokens(answers)
    assert words[:3] + words[25:27] == ["A", "B", "C", "Z", "a"]
    assert {row["input_ids"][-1] for row in [*trainer.train_dataset, *trainer.eval_dataset]} == set(answers)


def test_loads_the_model_option(tmp_path):
    load_model = module_of("completion_only").load_model
    for part in load_model(""):
        part.save_pretrained(tmp_path)
    model, tokenizer = load_model(str(tmp_path))
    assert model.config.vocab_size == VOCABULARY
    assert tokenizer("with")["input_ids"] == load_model("")[1]("with")["input_ids"]


def test_list_prints_every_recipe(capsys):
    main(["list"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == NAMES
    assert all(len(line.split()) > 3 for line in lines)


def test_show_prints_the_script_or_the_names_of_all(capsys):
    main(["show", "dpo"])
    assert capsys.readouterr().out == recipes()["dpo"].read_text(encoding="utf-8")
    with pytest.raises(SystemExit):
        main(["show", "nothing"])
    assert "early_stopping" in capsys.readouterr().err


def test_copy_writes_a_script_that_runs_and_never_overwrites(tmp_path, capsys, monkeypatch):
    main(["copy", "tuned_thresholds", str(tmp_path)])
    script = tmp_path / "tuned_thresholds.py"
    assert str(script) in capsys.readouterr().out
    script.write_text(script.read_text(encoding="utf-8") + "# mine\n", encoding="utf-8")
    with pytest.raises(SystemExit):
        main(["copy", "tuned_thresholds", str(script)])
    assert "already exists" in capsys.readouterr().err
    assert script.read_text(encoding="utf-8").endswith("# mine\n")
    main(["copy", "tuned_thresholds", str(tmp_path / "mine.py")])
    monkeypatch.setattr(sys, "argv", ["mine.py", *COMMON, "--max_steps=2", f"--output_dir={tmp_path}"])
    runpy.run_path(str(tmp_path / "mine.py"), run_name="__main__")
    printed = capsys.readouterr()
    assert "macro F1" in printed.out
    assert "2/2" in printed.err, "the Trainer shows progress"
