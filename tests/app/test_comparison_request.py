"""Reading a comparison: the [compare] table, flags over it, grids, and what is refused in one line."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

from dpoptim.app import Recipe
from dpoptim.app.comparison.request import Request, read_request
from dpoptim.app.recipes.recipe import VARIANTS
from tests.app.comparisons import recipe_for

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
budget_for_tuning = 0.5
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


def test_the_table_is_read_and_a_variants_own_values_go_over_those_of_all(file):
    request = read_request(file)
    assert request.variants == ("scale_then_privatize", "dp_sgd")
    assert request.seeds == (7, 8, 9, 10)
    assert (request.budget_for_tuning, request.tuning_steps, request.metric) == (0.5, 10, "loss")
    assert request.points("dp_sgd") == [
        {"learning_rate": 0.1, "clip_norm": 0.5},
        {"learning_rate": 1.0, "clip_norm": 0.5},
    ]
    assert request.points("scale_then_privatize") == [
        {"learning_rate": 0.01, "clip_norm": 0.5, "eps_scale": 1e-3},
        {"learning_rate": 0.01, "clip_norm": 0.5, "eps_scale": 1e-2},
    ]


def test_flags_go_over_the_table(file):
    request = read_request(
        file,
        variants=["dp_sgd"],
        seeds=2,
        grid={"learning_rate": [5.0], "scale_then_privatize": {"eps_scale": [1.0]}},
        budget_for_tuning="none",
        epsilon=1.5,
        device="cpu",
    )
    assert request.recipe.epsilon == 1.5
    assert request.recipe.device == "cpu"
    assert (request.variants, request.seeds, request.budget_for_tuning) == (("dp_sgd",), (7, 8), "none")
    assert request.points("dp_sgd") == [{"learning_rate": 5.0, "clip_norm": 0.5}]
    assert request.points("scale_then_privatize")[0]["eps_scale"] == 1.0


def test_without_a_table_all_variants_are_compared_at_the_recipes_settings(tmp_path):
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
        ({"variants": ("adam",)}, "no such variant; there are scale_then_privatize"),
        ({"variants": ("dp_sgd", "dp_sgd")}, "one twice"),
        ({"seeds": ()}, "seeds is empty"),
        ({"metric": "f1"}, "metric='f1' must be one of loss, accuracy"),
        ({"tuning_steps": 0}, "tuning_steps=0"),
        ({"grid": {"learning_rate": [0.1, 0.2]}}, r"budget_for_tuning is not given.*2 settings of dp_sgd.*NOT covered"),
        (
            {"grid": {"eps_scale": [0.1]}},
            r"not a setting of dp_sgd; put it under \[compare.grid.scale_then_privatize\]",
        ),
        ({"grid": {"dp_sgd": {"eps": [0.1]}}}, "eps is not a setting of dp_sgd; leave it out"),
        ({"grid": {"steps": [10, 20]}}, "steps is the same for all"),
        ({"grid": {"speed": [1.0]}}, "speed is no setting to choose; there are learning_rate"),
        ({"grid": {"adam": {"learning_rate": [0.1]}}}, "grid='adam': there is no such variant"),
        ({"grid": {"learning_rate": []}}, "has no value"),
        ({"grid": {"learning_rate": [1, 1.0]}, "budget_for_tuning": 1.0}, "a value twice"),
        ({"grid": {"learning_rate": [-1.0]}}, "learning_rate=-1.0"),
        ({"grid": {"learning_rate": ["fast"]}}, "learning_rate='fast'"),
        ({"budget_for_tuning": "free"}, 'must be an epsilon, "public" or "none"'),
        ({"budget_for_tuning": 0.0}, "finite epsilon above 0"),
        ({"budget_for_tuning": True}, "budget_for_tuning=True"),
        ({"budget_for_tuning": "public"}, "goes with a file"),
        ({"budget_for_tuning": 1.0, "tuning_data": "public.csv"}, "goes with a file"),
        ({"budget_for_tuning": "public", "tuning_data": "/nowhere/private.csv"}, "is the private data itself"),
    ],
)
def test_what_is_refused(changes, message):
    values = {"variants": ("dp_sgd", "post_processing"), "seeds": (0,), **changes}
    with pytest.raises(ValueError, match=message) as error:
        Request(recipe=recipe_for(Path("/nowhere")), **values)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[compare]\nvariant = 3", "compare.variant=3 is no setting of a comparison; did you mean variants?"),
        ("[compare]\nseeds = 0", "seeds=0"),
        ("[compare]\nseeds = 100000", "at most 1000"),
        ("[compare]\nseeds = 1.5", "seeds=1.5"),
        ("[compare]\nvariants = 'dp_sgd'", "must be a list of names"),
        ("[compare]\nreferences = 1", "references=1 must be true or false"),
        ("[compare]\ngrid = 3", r"compare.grid=3 must be a table"),
        ("compare = 3", r"compare=3 must be a table"),
        ("[compare", "no TOML file"),
        ("learning_rat = 1", "did you mean learning_rate"),
    ],
)
def test_files_that_are_refused(tmp_path, text, message):
    path = tmp_path / "recipe.toml"
    path.write_text(f'model = "mlp"\ndata = "a.csv"\nepsilon = 1.0\n{text}\n')
    with pytest.raises(ValueError, match=message):
        read_request(path)
    with pytest.raises(ValueError, match="does not exist"):
        read_request(tmp_path / "none.toml")


def test_what_may_change_in_a_folder_is_not_part_of_it():
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


def test_the_example_is_a_comparison():
    request = read_request(ROOT / "examples" / "recipes" / "compare.toml")
    assert len(request.variants) >= 3
    assert len(request.seeds) >= 3
    assert request.budget_for_tuning is not None
    assert all(len(request.points(variant)) > 1 for variant in request.variants)


def test_the_documentation_shows_what_can_be_read(tmp_path):
    text = (ROOT / "docs" / "compare.md").read_text()
    blocks = [part.split("```")[0] for part in text.split("```toml\n")[1:]]
    assert blocks
    for block in blocks:
        path = tmp_path / "recipe.toml"
        path.write_text(block)
        assert isinstance(read_request(path).recipe, Recipe)
    assert doctest.testfile(str(ROOT / "docs" / "compare.md"), module_relative=False) == (0, 4)
