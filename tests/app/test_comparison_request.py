"""Reading a comparison: the [compare] table, overrides, grids, and refusals."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

from dpoptim.app import Recipe
from dpoptim.app.comparison.request import Request, name_of_setting, read_request
from dpoptim.app.recipes.recipe import VARIANTS
from tests.app.comparisons import recipe_for
from tests.pages import blocks

ROOT = Path(__file__).parents[2]

TEXT = """\
model = "mlp"
data = "private.csv"
epsilon = 3.0
eps_scale = 0.01
seed = 7

[compare]
variants = ["scale_then_privatize", "dp_sgd"]
seeds = 4
tuning_epsilon = 0.5
tuning_steps = 10

[compare.grid]
learning_rate = [0.1, 1.0]
clip_norm = 0.5

[compare.grid.scale_then_privatize]
eps_scale = [1e-3, 1e-2]
learning_rate = [0.01]
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(TEXT)
    return path


def test_values_for_one_variant_override_values_for_all(file):
    request = read_request(file)
    assert request.variants == ("scale_then_privatize", "dp_sgd")
    assert request.seeds == (7, 8, 9, 10)
    assert (request.tuning_epsilon, request.tuning_steps, request.metric) == (0.5, 10, "loss")
    assert request.points("dp_sgd") == [
        {"learning_rate": 0.1, "clip_norm": 0.5},
        {"learning_rate": 1.0, "clip_norm": 0.5},
    ]
    assert request.points("scale_then_privatize") == [
        {"learning_rate": 0.01, "clip_norm": 0.5, "eps_scale": 1e-3},
        {"learning_rate": 0.01, "clip_norm": 0.5, "eps_scale": 1e-2},
    ]


def test_arguments_override_the_file(file):
    request = read_request(
        file,
        variants=["dp_sgd"],
        seeds=2,
        grid={"learning_rate": [5.0], "scale_then_privatize": {"eps_scale": [1.0]}},
        tuning_epsilon="uncovered",
        epsilon=1.5,
        device="cpu",
    )
    assert request.recipe.epsilon == 1.5
    assert request.recipe.device == "cpu"
    assert (request.variants, request.seeds, request.tuning_epsilon) == (("dp_sgd",), (7, 8), "uncovered")
    assert request.points("dp_sgd") == [{"learning_rate": 5.0, "clip_norm": 0.5}]
    assert request.points("scale_then_privatize")[0]["eps_scale"] == 1.0


def test_all_variants_are_compared_by_default(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text('model = "mlp"\ndata = "private.csv"\nepsilon = 3\n')
    request = read_request(path)
    assert request.variants == VARIANTS
    assert request.seeds == (0, 1, 2)
    assert request.points("dp_sgd") == [{}]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variants": ()}, "variants is empty"),
        ({"variants": ("adam",)}, "Expected variants to be one of 'scale_then_privatize'.*, got 'adam'"),
        ({"variants": ("dp_sgd", "dp_sgd")}, "has a duplicate"),
        ({"seeds": ()}, "seeds is empty"),
        ({"metric": "f1"}, "Expected metric to be one of 'loss', 'accuracy', got 'f1'"),
        ({"tuning_steps": 0}, "Expected tuning_steps to be a whole number >= 1, got 0"),
        ({"grid": {"learning_rate": [0.1, 0.2]}}, r"tuning_epsilon is missing.*dp_sgd has 2 settings.*NOT covered"),
        (
            {"grid": {"eps_scale": [0.1]}},
            r"cannot be tuned for dp_sgd; put it under \[compare.grid.scale_then_privatize\]",
        ),
        ({"grid": {"dp_sgd": {"eps": [0.1]}}}, "eps cannot be tuned for dp_sgd; choose from learning_rate"),
        ({"grid": {"steps": [10, 20]}}, "steps cannot be tuned for dp_sgd; choose from"),
        ({"grid": {"speed": [1.0]}}, "speed cannot be tuned for dp_sgd; choose from learning_rate"),
        (
            {"grid": {"adam": {"learning_rate": [0.1]}}},
            "Expected grid to be one of .*, got 'adam'",
        ),
        ({"grid": {"learning_rate": []}}, "has no value"),
        ({"grid": {"learning_rate": [1, 1.0]}, "tuning_epsilon": 1.0}, "has a duplicate"),
        ({"grid": {"learning_rate": [-1.0]}}, "Expected learning_rate >= 0, got -1.0"),
        ({"grid": {"learning_rate": ["fast"]}}, "Expected learning_rate >= 0, got 'fast'"),
        ({"tuning_epsilon": "free"}, 'Expected tuning_epsilon > 0, got \'free\'. Or give "public" or "uncovered"'),
        ({"tuning_epsilon": 0.0}, "Expected tuning_epsilon > 0, got 0.0"),
        ({"tuning_epsilon": True}, "Expected tuning_epsilon > 0, got True"),
        ({"tuning_epsilon": "public"}, "do not match. Give tuning_data with"),
        ({"tuning_epsilon": 1.0, "tuning_data": "public.csv"}, "do not match. Give tuning_data with"),
    ],
)
def test_bad_requests_are_refused(changes, message):
    values = {"variants": ("dp_sgd", "post_processing"), "seeds": (0,), **changes}
    with pytest.raises(ValueError, match=message) as error:
        Request(recipe=recipe_for(Path("/nowhere")), **values)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[compare]\nvariant = 3", "compare.variant=3 is not a setting of a comparison; did you mean variants?"),
        ("[compare]\nseeds = 0", "Expected seeds to be a whole number >= 1, got 0"),
        ("[compare]\nseeds = 1.5", "Expected seeds to be a whole number >= 1, got 1.5"),
        ("[compare]\nvariants = 'dp_sgd'", "must be a list of names"),
        ("[compare]\nreferences = 1", "references=1 must be true or false"),
        ("[compare]\ngrid = 3", r"compare.grid=3 must be a table"),
        ("compare = 3", r"compare=3 must be a table"),
        ("[compare", "not (a )?TOML"),
        ("learning_rat = 1", "did you mean learning_rate"),
    ],
)
def test_bad_files_are_refused(tmp_path, text, message):
    path = tmp_path / "recipe.toml"
    path.write_text(f'model = "mlp"\ndata = "a.csv"\nepsilon = 1.0\n{text}\n')
    with pytest.raises(ValueError, match=message):
        read_request(path)
    with pytest.raises(ValueError, match="does not exist"):
        read_request(tmp_path / "none.toml")


def test_settings_that_may_change_between_calls():
    def asked(**changes):
        recipe = recipe_for(Path("/nowhere"), **changes.pop("recipe", {}))
        return Request(recipe=recipe, variants=("dp_sgd",), seeds=(0,), **changes).asked()

    same = asked()
    assert asked(recipe={"device": "cpu", "log_every": 3, "variant": "dp_sgd"}) == same
    for changed in (
        {"recipe": {"epsilon": 2.0}},
        {"recipe": {"steps": 9}},
        {"metric": "accuracy"},
        {"tuning_steps": 2},
    ):
        assert asked(**changed) != same


def test_example_recipe_is_valid():
    request = read_request(ROOT / "examples" / "recipes" / "compare.toml")
    assert len(request.variants) >= 3
    assert len(request.seeds) >= 3
    assert request.tuning_epsilon is not None
    assert all(len(request.points(variant)) > 1 for variant in request.variants)


def test_recipes_in_the_documentation_are_valid(tmp_path):
    recipes = blocks(ROOT / "docs" / "compare.md", "toml")
    assert recipes
    for recipe in recipes:
        path = tmp_path / "recipe.toml"
        path.write_text(recipe)
        assert isinstance(read_request(path).recipe, Recipe)
    assert doctest.testfile(str(ROOT / "docs" / "compare.md"), module_relative=False) == (0, 4)


def test_settings_name_folders():
    assert name_of_setting({"learning_rate": 0.001, "betas": [0.9, 0.99]}) == "learning_rate=0.001,betas=0.9-0.99"
    assert name_of_setting({}) == "as-in-recipe"
