"""Recipes: what is read, what is refused, and how each refusal names its place."""

import ast
import inspect
import json
from pathlib import Path

import pytest
from pydantic import BaseModel

import peftkit.recipe
from peftkit.errors import InputError, RecipeError
from peftkit.methods import LoraConfig, PromptTuningConfig
from peftkit.recipe import Recipe, Runs, load_recipe, load_runs
from peftkit.recipe_errors import ELSEWHERE

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))

DOCUMENTED = """
base: smollm2-135m
quant: {kind: nf4, double_quant: true, compute_dtype: auto}
method: {kind: lora, r: 16, alpha: 32, dropout: 0.0, targets: all-linear, variant: plain}
data: {train: path.jsonl, valid: path.jsonl, format: auto, max_length: 512, packing: auto}
optim: {name: auto, lr: 2.0e-4, schedule: cosine, warmup: 0.03, weight_decay: 0.0, max_grad_norm: 1.0}
train: {epochs: 1, batch_tokens: 8192, grad_accum: 1, seed: 0, gradient_checkpointing: true}
eval: {every: 100, metric: loss, early_stop: null}
log: {every: 10, tensorboard: true}
out: runs/my-adapter
"""


def recipe_file(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(folder: Path, text: str, *overrides: str) -> str:
    path = recipe_file(folder, text)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    return str(caught.value).replace(str(path), "recipe.yaml")


def test_the_documented_recipe_is_read(tmp_path: Path) -> None:
    recipe = load_recipe(recipe_file(tmp_path, DOCUMENTED))
    assert recipe.method == LoraConfig(r=16, alpha=32)
    assert recipe.train.gradient_checkpointing is True
    assert recipe.optim.lr == 2e-4
    assert recipe.out == "runs/my-adapter"


def test_all_but_the_data_has_a_default(tmp_path: Path) -> None:
    recipe = load_recipe(recipe_file(tmp_path, "data: {train: x.jsonl}"))
    assert recipe.base == "smollm2-135m"
    assert recipe.quant.kind == "nf4"
    assert recipe.method == LoraConfig()
    assert refusal(tmp_path, "base: b") == ("recipe.yaml: data.train is missing: name a file of training rows")
    assert "data.train is missing" in refusal(tmp_path, "")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_every_shipped_recipe_is_read_and_begins_with_its_command(path: Path) -> None:
    assert path.read_text().startswith(f"# peftkit train recipes/{path.name}\n")
    assert load_recipe(path).base == "smollm2-135m"


def test_a_shipped_recipe_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_recipe(f"recipes/{RECIPES[0].name}").base == "smollm2-135m"


def test_every_field_has_a_default_and_a_docstring() -> None:
    tree = ast.parse(inspect.getsource(peftkit.recipe))
    sections = [
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        and any(isinstance(base, ast.Name) and base.id == "_Section" for base in node.bases)
    ]
    assert len(sections) == 7
    for section in sections:
        for statement, following in zip(section.body, [*section.body[1:], None], strict=True):
            if isinstance(statement, ast.AnnAssign):
                assert isinstance(statement.target, ast.Name)
                where = f"{section.name}.{statement.target.id}"
                assert statement.value is not None, where
                assert isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant), where
                assert "\n" not in str(following.value.value), where


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optim: {lrr: 1.0}", "recipe.yaml: optim.lrr: unknown key; did you mean 'optim.lr'?"),
        ("metod: {kind: lora}", "recipe.yaml: metod: unknown key; did you mean 'method'?"),
        ("method: {kind: lora, rnk: 3}", "recipe.yaml: method.rnk: unknown key (there are: kind, r, alpha,"),
        ("method: {kind: lora, alhpa: 3}", "recipe.yaml: method.alhpa: unknown key; did you mean 'method.alpha'?"),
        ("max_length: 9", "recipe.yaml: max_length: unknown key; did you mean 'data.max_length'?"),
        ("lr: 0.1", "recipe.yaml: lr: unknown key; did you mean 'optim.lr'?"),
        ("method: {kind: lorra}", "recipe.yaml: method.kind: no method 'lorra'; did you mean 'lora'? (there are:"),
        ("method: {r: 8}", "recipe.yaml: method: kind is missing: name one of lora, bottleneck, prefix,"),
        ("method: [{kind: lora}, {kind: bottleneck, rnk: 2}]", "recipe.yaml: method.1.rnk: unknown key"),
        ("method: [{kind: lorra}]", "recipe.yaml: method.0.kind: no method 'lorra'; did you mean 'lora'?"),
        ("method: [{r: 8}]", "recipe.yaml: method.0: kind is missing"),
        ("method: []", "recipe.yaml: method: an empty list: name a method"),
        ("method: 3", "recipe.yaml: method: must be a mapping of keys to values, as in {kind: lora}, not 3"),
        ("method: [{kind: prompt}, {kind: prefix}]", "recipe.yaml: method: a prompt adapter is there already"),
        ("method: [{kind: lora}, {kind: lora}]", "recipe.yaml: method: a lora adapter is there already"),
        ("train: 3", "recipe.yaml: train: must be a mapping of keys to values, not 3"),
        ("train: {epochs: two}", 'recipe.yaml: train.epochs: should be a valid integer, not "two"'),
        ("train: {epochs: 1.5}", "recipe.yaml: train.epochs: should be a valid integer, not 1.5"),
        ("train: {epochs: true}", "recipe.yaml: train.epochs: should be a valid integer, not true"),
        ("train: {epochs: 0}", "recipe.yaml: train.epochs: should be greater than or equal to 1, not 0"),
        ("train: {epochs: 10001}", "recipe.yaml: train.epochs: should be less than or equal to 10000, not 10001"),
        ("out: ''", "recipe.yaml: out: is empty: name the folder of the run"),
        ("optim: {betas: [0.9]}", "recipe.yaml: optim.betas.1: is missing: the value is [0.9]"),
        ("learning_rate: 1", "recipe.yaml: learning_rate: unknown key; did you mean 'optim.lr'?"),
        ("method: {kind: lora, rank: 1}", "recipe.yaml: method.rank: unknown key; did you mean 'method.r'?"),
        ("method: {kind: prompt, rank: 1}", "recipe.yaml: method.rank: unknown key (there are: "),
        ("method: {kind: prefix, r: 1}", "recipe.yaml: method.r: unknown key of prefix, it is one of lora"),
        ("log: {sterp: 1}", "recipe.yaml: log.sterp: unknown key (there are: every, samples, tensorboard, wandb)"),
        ("data: {packing: 1}", "recipe.yaml: data.packing: should be 'auto' or a valid boolean, not 1"),
        ("optim: {lr: -1}", "recipe.yaml: optim.lr: should be greater than 0, not -1"),
        ("optim: {lr: .nan}", "recipe.yaml: optim.lr: should be a finite number, not NaN"),
        ("optim: {schedule: cosin}", "recipe.yaml: optim.schedule: should be 'constant', 'linear' or 'cosine'"),
        ("optim: {betas: [0.9, 1.5]}", "recipe.yaml: optim: betas must lie between 0 and 1, not [0.9, 1.5]"),
        ("data: {train: [a, b]}", 'recipe.yaml: data.train: should be a valid string, not ["a", "b"]'),
        ("method: {kind: prompt, init: text}", "recipe.yaml: method: init: text needs init_text"),
        ("runs: []", "recipe.yaml: runs: must be a list of mappings, not []"),
        ("runs: [3]", "recipe.yaml: runs: must be a list of mappings, not [3]"),
        ("runs: [{}]\nturn_steps: 0", "recipe.yaml: turn_steps: must be a whole number above 0, not 0"),
        ("turn_steps: 5", "recipe.yaml: runs: must be a list of mappings, not null"),
        ("runs: [{base: b}]", "recipe.yaml: runs.0.base: all runs share one base: write base beside runs"),
        ("runs: [{optim: {lrr: 1}}]", "recipe.yaml: runs.0: optim.lrr: unknown key; did you mean 'optim.lr'?"),
        ('out: "a\\0b"', r"recipe.yaml: out: 'a\x00b' is no path: it holds a NUL character"),
        ("out: ~nosuchuser/a", "recipe.yaml: out: '~nosuchuser/a' is no path: there is no such user"),
    ],
)  # fmt: skip
def test_a_wrong_key_or_value_is_one_line_with_file_and_dotted_key(tmp_path: Path, text: str, message: str) -> None:
    assert refusal(tmp_path, text).splitlines()[0].startswith(message)


def test_each_fault_has_its_own_line(tmp_path: Path) -> None:
    text = refusal(tmp_path, "data: {train: x, fromat: chat}\noptim: {lr: fast}")
    assert text.splitlines() == [
        "recipe.yaml: data.fromat: unknown key; did you mean 'data.format'?",
        'recipe.yaml: optim.lr: should be a valid number, not "fast"',
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base: b\noptim: {lr: 1\ntrain: {}\n", "recipe.yaml:3: not valid YAML"),
        ("base: b\nbase: c\n", "recipe.yaml:2: not valid YAML: key 'base' is given twice"),
        ("base: b\ndata:\n\ttrain: x\n", "recipe.yaml:3: not valid YAML: found character '\\t' that cannot start any"),
        ("base: b\n3: c\n", "recipe.yaml:2: not valid YAML: key 3 is not a name"),
        ("- a\n- b\n", "recipe.yaml: a recipe is a mapping of keys to values, not a list"),
        ("base: !!python/object:os.system x\n", "recipe.yaml:1: not valid YAML"),
    ],
)
def test_broken_yaml_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    assert refusal(tmp_path, text).startswith(message)


def test_a_recipe_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"nowhere.yaml: there is no such recipe: .* recipes/address-lora\.yaml"):
        load_recipe(tmp_path / "nowhere.yaml")
    recipe_file(tmp_path, "data: {train: x}")
    with pytest.raises(RecipeError, match=r"recip\.yaml: there is no such recipe; did you mean '.*/recipe\.yaml'\?"):
        load_recipe(tmp_path / "recip.yaml")
    with pytest.raises(RecipeError, match="is a folder: name a recipe in it"):
        load_recipe(tmp_path)
    with pytest.raises(RecipeError, match=r"rows\.jsonl: a recipe is a YAML file: name rows in its data\.train"):
        load_recipe(tmp_path / "rows.jsonl")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match=r"binary.yaml: not UTF-8"):
        load_recipe(tmp_path / "binary.yaml")


def test_overrides_take_yaml_values_and_come_before_the_file(tmp_path: Path) -> None:
    path = recipe_file(tmp_path, "data: {train: x.jsonl}\noptim: {lr: 0.1}\n")
    recipe = load_recipe(
        path,
        [
            "optim.lr=1e-3",
            "optim.betas=[0.8, 0.95]",
            "data.valid=null",
            "train.gradient_checkpointing=true",
            "method={kind: prompt, num_virtual_tokens: 3}",
            "out=runs/a=b",
        ],
    )
    assert recipe.optim.lr == 1e-3
    assert recipe.optim.betas == (0.8, 0.95)
    assert recipe.data.valid is None
    assert recipe.train.gradient_checkpointing is True
    assert recipe.method == PromptTuningConfig(num_virtual_tokens=3)
    assert recipe.out == "runs/a=b"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lrr=1", "'optim.lrr=1': unknown key; did you mean 'optim.lr'?"),
        ("lr=1", "'lr=1': unknown key; did you mean 'optim.lr'?"),
        ("optm.lr=1", "'optm.lr=1': unknown key; did you mean 'optim.lr'?"),
        ("optim={lrr: 1}", "'optim={lrr: 1}': optim.lrr: unknown key; did you mean 'optim.lr'?"),
        ("train.epochs=many", "'train.epochs=many': should be a valid integer, not \"many\""),
        ("data.packing=1", "'data.packing=1': should be 'auto' or a valid boolean, not 1"),
        ("optim.betas=[0.9, 2]", "'optim.betas=[0.9, 2]': betas must lie between 0 and 1, not [0.9, 2.0]"),
        ("eval.early_stop=2", "'eval.early_stop=2': eval.early_stop needs data.valid"),
        ("eval.metric=accuracy", "'eval.metric=accuracy': eval.metric accuracy needs data.valid"),
        ("optim.lr", "'optim.lr': write it as key.path=value, as in optim.lr=1e-3"),
        ("optim..lr=1", "'optim..lr=1': write it as key.path=value"),
        ("base.name=x", "'base.name=x': base is \"b\", not a section"),
        ("optim.lr=[1", "'optim.lr=[1': not valid YAML: expected ',' or ']'"),
        (
            "method={kind:",
            "'method={kind:': not valid YAML: expected the node content, but found '<stream end>'; a value "
            "with spaces needs quotes, as in 'method={kind: lora}'",
        ),
        ("method.kind=lorra", "'method.kind=lorra': no method 'lorra'; did you mean 'lora'?"),
        ("method=lora", "'method=lora': must be a mapping of keys to values, as in {kind: lora}, not \"lora\""),
    ],
)
def test_every_wrong_override_is_named_in_one_style(tmp_path: Path, override: str, message: str) -> None:
    assert refusal(tmp_path, "base: b\ndata: {train: x}", override).startswith(f"override {message}")


def test_a_method_of_another_kind_leaves_no_key_of_the_first(tmp_path: Path) -> None:
    message = refusal(tmp_path, "method: {kind: lora, r: 2}\ndata: {train: x}", "method.kind=prefix")
    assert message == (
        "recipe.yaml: method.r: unknown key of prefix, it is one of lora; "
        "method={kind: prefix} sets the method as a whole"
    )


def test_a_fault_of_the_file_is_not_laid_to_an_override(tmp_path: Path) -> None:
    assert refusal(tmp_path, "optm: {lr: 1}\ndata: {train: x}", "optim.lr=1").startswith("recipe.yaml: optm: unknown")
    metric = "eval: {metric: accuracy}\ndata: {train: x}"  # whose message speaks of held-out rows
    assert refusal(tmp_path, metric, "out=o").startswith("recipe.yaml: eval.metric accuracy needs data.valid")


def test_what_other_trainers_call_a_setting_leads_to_a_key_that_is_there() -> None:
    for key in ELSEWHERE.values():
        section, _, name = key.rpartition(".")
        owner = LoraConfig if section == "method" else Recipe.model_fields[section].annotation if section else Recipe
        assert owner is not None and name in owner.model_fields, key


def test_data_lies_in_the_current_folder_or_else_beside_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    path = recipe_file(tmp_path / "there", "data: {train: a.jsonl, valid: 'example:sentiment/valid.jsonl'}")
    (tmp_path / "there" / "a.jsonl").touch()
    assert load_recipe(path).data.train == str(tmp_path / "there" / "a.jsonl")
    assert load_recipe(path).data.valid == "example:sentiment/valid.jsonl"
    (tmp_path / "here" / "a.jsonl").touch()
    assert load_recipe(path).data.train == "a.jsonl"


def test_a_recipe_survives_json(tmp_path: Path) -> None:
    recipe = load_recipe(recipe_file(tmp_path, DOCUMENTED))
    assert Recipe.model_validate_json(json.dumps(recipe.model_dump(mode="json"))) == recipe
    assert isinstance(recipe.method, BaseModel)


@pytest.mark.parametrize(
    "text",
    [
        "base: !!float abc",
        "base: !!bool perhaps",
        "base: !!int 0b",
        "base: !!timestamp 2026-99-99",
        "base: " + "[" * 3000 + "]" * 3000,
        "a: &a [1, 1]\nb: &b [*a, *a]\nc: [*b, *b]",
        "base: &a [*a]",
        "out: !!set {a, b}",
        "out: !!binary aGVsbG8=",
        "out: !!omap [a: 1]",
        "train: {seed: " + "9" * 5000 + "}",
    ],
)
def test_yaml_that_cannot_become_values_is_refused_in_a_line(tmp_path: Path, text: str) -> None:
    assert "not valid YAML" in refusal(tmp_path, text)


def test_a_path_that_no_system_takes_is_refused(tmp_path: Path) -> None:
    assert "is no path" in refusal(tmp_path, f"data: {{train: {'a' * 5000}}}")


def test_an_integer_of_more_digits_than_python_writes_is_refused(tmp_path: Path) -> None:
    assert "a value can't be read" in refusal(tmp_path, "train: {seed: 0x" + "f" * 5000 + "}")


@pytest.mark.parametrize("path", ["a\0b.yaml", "~nosuchuser/a.yaml"])
def test_a_recipe_whose_path_no_system_takes_is_bad_input(path: str) -> None:
    with pytest.raises(InputError, match="is no path"):
        load_recipe(path)


def test_methods_that_go_together_are_a_list(tmp_path: Path) -> None:
    text = "data: {train: x}\nmethod: [{kind: lora, r: 2}, {kind: prompt, num_virtual_tokens: 3}]"
    recipe = load_recipe(recipe_file(tmp_path, text))
    assert recipe.methods == (LoraConfig(r=2), PromptTuningConfig(num_virtual_tokens=3)) == recipe.method
    assert Recipe.model_validate(recipe.model_dump(mode="json")) == recipe
    assert load_recipe(recipe_file(tmp_path, "data: {train: x}")).methods == (LoraConfig(),)


def test_runs_share_what_they_do_not_set_themselves(tmp_path: Path) -> None:
    path = recipe_file(
        tmp_path,
        """
base: b
method: {kind: lora, r: 2}
data: {train: x, max_length: 99}
optim: {lr: 0.1, schedule: linear}
turn_steps: 5
runs:
  - {out: one}
  - {out: two, optim: {lr: 0.2}, method: {kind: prompt}}
""",
    )
    runs = load_runs(path, ["train.seed=7"])
    one, two = runs.recipes
    assert runs.turn_steps == 5
    assert (one.base, one.method, one.optim.lr, one.out) == ("b", LoraConfig(r=2), 0.1, "one")
    assert (two.base, two.method, two.optim.lr, two.out) == ("b", PromptTuningConfig(), 0.2, "two")
    assert two.optim.schedule == "linear" and two.data.max_length == 99
    assert one.train.seed == two.train.seed == 7
    with pytest.raises(RecipeError, match=r"runs: this recipe holds 2 runs where one is wanted"):
        load_recipe(path)
    with pytest.raises(RecipeError, match=r"runs\.1\.out: 'same' is, lies in or holds another run's 'same'"):
        load_runs(path, ["out=same"])


@pytest.mark.parametrize(("first", "second"), [("a/b", "a/./b/"), ("a", "a/best"), ("a/last", "a"), ("a", "x/../a")])
def test_runs_in_folders_of_each_other_are_refused(tmp_path: Path, first: str, second: str) -> None:
    path = recipe_file(tmp_path, f"data: {{train: x}}\nruns: [{{out: {first}}}, {{out: {second}}}]")
    with pytest.raises(RecipeError, match=r"runs\.1\.out: .* is, lies in or holds another run's"):
        load_runs(path)


def test_a_recipe_without_runs_is_one_run(tmp_path: Path) -> None:
    path = recipe_file(tmp_path, "data: {train: x}")
    assert load_runs(path) == Runs((load_recipe(path),))
