"""How layers become one: the rules as properties."""

from hypothesis import given
from hypothesis import strategies as st

from shared_schema.deploy.layers import file_layers
from shared_schema.deploy.merge import Layer, Tree, blame, dotted, merge, merge_all

keys = st.sampled_from("abcd")
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from(("", "cpu", "0,1"))
    | st.lists(st.integers(), max_size=3)
)
trees: st.SearchStrategy[Tree] = st.recursive(
    st.dictionaries(keys, leaves, max_size=4), lambda below: st.dictionaries(keys, leaves | below, max_size=4)
)  # type: ignore[assignment]
stages = st.lists(st.sampled_from((0, 1)), unique=True, max_size=2)


@given(trees)
def test_nothing_over_a_tree_or_under_it_changes_it(tree: Tree) -> None:
    assert merge(tree, {}) == tree == merge({}, tree) == merge(tree, tree)


@given(trees, trees)
def test_neither_side_is_changed(base: Tree, over: Tree) -> None:
    before = repr(base), repr(over)
    merge(base, over)
    assert before == (repr(base), repr(over))


@given(trees, trees)
def test_mappings_merge_deeply_and_everything_else_replaces(base: Tree, over: Tree) -> None:
    merged = merge(base, over)
    assert set(merged) == set(base) | set(over)
    for key, value in merged.items():
        below, above = base.get(key), over.get(key)
        if isinstance(below, dict) and isinstance(above, dict):
            assert value == merge(below, above)
        else:
            assert value == (above if key in over else below)


@given(trees, trees, trees)
def test_layers_are_laid_one_after_the_other(first: Tree, second: Tree, third: Tree) -> None:
    layers = [Layer(name, tree) for name, tree in (("1", first), ("2", second), ("3", third))]
    assert merge_all(layers) == merge(merge(first, second), third)
    assert merge_all([]) == {}


@given(st.dictionaries(keys, st.integers()), st.dictionaries(keys, st.integers()), stages, stages)
def test_stages_merge_by_id_in_any_order(base: Tree, over: Tree, below: list[int], above: list[int]) -> None:
    bottom, _ = file_layers("base", {"stages": [{"stage_id": i, **base} for i in below]})
    top, _ = file_layers("over", {"stages": [{"stage_id": i, **over} for i in above]})
    merged = merge_all([bottom, top])["stages"]
    assert merged == {
        i: {"stage_id": i, **(base if i in below else {}), **(over if i in above else {})} for i in {*below, *above}
    }


@given(trees, trees)
def test_the_topmost_layer_that_has_a_key_is_blamed(base: Tree, over: Tree) -> None:
    layers = [Layer("base", base), Layer("over", over)]
    for key in base | over:
        assert blame(layers, (key,)) == ("over" if key in over else "base")
        assert blame(layers, (key, "not there", 7)) == ("over" if key in over else "base")


def test_what_no_layer_says_is_blamed_on_the_lowest_file() -> None:
    assert blame([Layer("base", {}), Layer("--stage-overrides", {"stages": {}})], ("model",)) == "base"


def test_items_of_a_list_are_blamed_on_the_layer_that_has_the_list() -> None:
    layers = [Layer("base", {"a": [1, 2]}), Layer("over", {"a": [1]})]
    assert blame(layers, ("a", 1)) == "base"
    assert blame(layers, ("a", 0)) == "over"


def test_a_path_reads_like_the_file() -> None:
    assert dotted(("stages", 1, "parallel_config", "ulysses_degree")) == "stages[1].parallel_config.ulysses_degree"
