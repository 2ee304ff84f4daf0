"""The paper's tables and figures as cells: complete, consistent, and filled by the right records."""

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from cmcl.reproduction import CELLS, RECIPES, TARGETS, Cell, find, grid
from cmcl.reproduction.cells import choose, fills, known_checksums, search, select, summarise
from cmcl.training import Recipe
from report_samples import changed, made_record

BY_ID = {cell.id: cell for cell in CELLS}


def printed(value):
    """Every (oracle, top1) anywhere inside a JSON value."""
    if isinstance(value, dict):
        if "oracle" in value:
            yield value["oracle"], value["top1"]
        value = list(value.values())
    for inner in value if isinstance(value, list) else ():
        yield from printed(inner)


@pytest.mark.parametrize(("table", "count"), [("table1", 5), ("table2", 18), ("table3", 24)])
def test_every_number_of_a_table_has_its_cell(table, count):
    cells = [cell for cell in CELLS if cell.where[0] == table]
    numbers = Counter((cell.paper["oracle"], cell.paper["top1"]) for cell in cells)
    assert numbers == Counter(printed(TARGETS[table]))
    assert len(cells) == count


def test_rows_are_trained_as_they_say():
    for row in TARGETS["table1"]["rows"]:
        (cell,) = [c for c in CELLS if c.where[0] == "table1" and c.paper["top1"] == row["top1"]]
        recipe = cell.recipe
        assert (recipe.method, recipe.sharing) == (row["method"], row["sharing"])
        assert recipe.objective["labels"] == ("sampled" if row["stochastic_labels"] else "exact")
        assert (recipe.network, recipe.members) == ("cnn", 5)
        assert recipe.objective["overlap"] == (5 if row["method"] == "ie" else 1)
    for row, m in product(TARGETS["table2"]["rows"], (5, 10)):
        label = row["method"] + (f"-k{row['k']}" if row["k"] else "")
        cell = BY_ID[f"table2/cifar10-cnn-m{m}-{label}"]
        assert cell.paper == {key: row[f"m{m}"][key] for key in ("oracle", "top1")}
        assert (cell.recipe.method, cell.recipe.members) == (row["method"], m)
        assert cell.recipe.objective["overlap"] == (row["k"] or m)
        assert cell.recipe.sharing == (row["method"] == "cmcl")
    for row, data in product(TARGETS["table3"]["rows"], ("cifar10", "svhn")):
        cell = BY_ID[f"table3/{data}-{row['network']}-{row['method']}"]
        assert cell.paper == {key: row[data][key] for key in ("oracle", "top1")}
        assert (cell.recipe.data, cell.recipe.network) == (data, row["network"])
        assert cell.single == (row["method"] == "single")
        assert cell.recipe.method == ("ie" if cell.single else row["method"])
        if row["method"] == "cmcl":  # as Table 3's caption says of ours
            assert (cell.recipe.beta, cell.recipe.overlap, cell.recipe.sharing) == (0.75, 4, True)


@pytest.mark.parametrize(
    ("name", "steps", "rates"),
    [
        ("cifar10-cnn-ie", 156_250, {0: 0.01, 46_874: 0.01, 46_875: 0.002, 93_750: 4e-4, 125_000: 8e-5}),
        ("cifar10-vggnet17-ie", 39_063, {0: 0.1, 9_765: 0.1, 9_766: 0.02, 19_532: 0.004, 29_298: 8e-4}),
        ("cifar10-resnet20-mcl", 64_000, {31_999: 0.1, 32_000: 0.01, 47_999: 0.01, 48_000: 0.001}),
        ("svhn-resnet20-cmcl", 93_120, {46_559: 0.1, 46_560: 0.01, 69_840: 0.001}),
        ("svhn-googlenet18-cmcl", 58_200, {14_549: 0.1, 14_550: 0.02}),
    ],
)
def test_lengths_and_learning_rates(name, steps, rates):
    recipe = find(name)
    assert recipe.total_steps(50_000) == steps
    for step, rate in rates.items():
        assert recipe.lr_at(step, steps) == pytest.approx(rate), step


def test_optimisers():
    cnn, resnet, fcn = find("cifar10-cnn-cmcl"), find("svhn-resnet20-ie"), find("icoseg-fcn-m3-cmcl")
    assert (cnn.batch_size, cnn.nesterov, cnn.weight_decay) == (64, True, 5e-4)
    assert (resnet.batch_size, resnet.nesterov, resnet.weight_decay) == (128, False, 1e-4)
    assert (fcn.optimizer, fcn.batch_size, fcn.epochs, fcn.warm_start) == ("adam", 20, 300, 20)
    assert fcn.sharing
    assert find("icoseg-fcn-m3-ie").warm_start == 0


def test_names_are_readable_and_mean_one_thing():
    assert len(BY_ID) == len(CELLS)
    assert len({recipe.hash for recipe in RECIPES.values()}) == len(RECIPES)
    used = {cell.name for cell in CELLS}
    own = {name for name in RECIPES if name.startswith(("digits-", "shapes-")) or "-modern-" in name}
    own.add("cifar10-cnn-cmcl-default")
    assert used == RECIPES.keys() - own
    for id_ in (
        "table1/cifar10-cnn-cmcl-sharing",
        "fig1a/cifar10-cnn-mcl",
        "fig2c/cifar10-cnn-ie-adversarial",
        "fig3/icoseg-fcn-m5-cmcl",
        "fig4a/cifar10-resnet20-m10-cmcl",
        "fig4bc/icoseg-fcn-m3-ie",
    ):
        assert id_ in BY_ID
    assert BY_ID["table2/cifar10-cnn-m5-cmcl-k1"].name == "cifar10-cnn-cmcl-sharing-sampled"
    assert BY_ID["fig2b/cifar10-cnn-cmcl"].recipe.labels == "exact"
    assert BY_ID["fig4bc/icoseg-fcn-m1-cmcl"].name == "icoseg-fcn-m1-ie"


def test_the_headline_keeps_its_hash():
    """A changed hash orphans every record of the recipe: change it only with the meaning."""
    assert find("cifar10-resnet20-cmcl").hash == "db8f676e20163ee5"


def test_select():
    assert len(select(["all"])) == len(CELLS)
    assert {cell.where[0] for cell in select(["fig4", "table1"])} == {"table1", "fig4a", "fig4bc"}
    assert [cell.id for cell in select(["fig2c"])] == ["fig2c/cifar10-cnn-ie-adversarial"]
    assert len(select(["table3/svhn-resnet20-single"])) == 1
    with pytest.raises(ValueError, match="Got 'tabel1'. Did you mean 'table1'"):
        select(["tabel1"])
    with pytest.raises(ValueError, match="Valid names: all, default, modern, table1"):
        select(["zzz"])
    with pytest.raises(ValueError, match="Did you mean 'cifar10-resnet20-cmcl'"):
        find("cifar10-resnet20-cmlc")


def test_the_default_beside_independent_members():
    """The same network and training; the method is that of a recipe that names none."""
    ie, ours = (cell.recipe for cell in select(["default"]))
    assert ie == find("cifar10-cnn-ie")
    assert replace(ours, method="ie", beta=ie.beta, overlap=ie.overlap) == ie
    assert ours.objective == Recipe(epochs=1).objective


def test_searches_hold_data_out():
    found = grid("cifar10-resnet20-cmcl")
    assert len(found) == 15
    best = found["cifar10-resnet20-cmcl-beta1.25-k3"]
    assert (best.beta, best.overlap, best.validation) == (1.25, 3, 0.1)
    on_test = grid("cifar10-resnet20-cmcl", betas=[1.0], overlaps=[2], validation=0)
    assert list(on_test) == ["cifar10-resnet20-cmcl-beta1-k2-chosen-on-test"]


def test_listing_needs_no_torch():
    code = "import sys, cmcl.reproduction; sys.exit('torch' in sys.modules)"
    source = str(Path(__file__).parents[1] / "src")
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": source})


IE = "digits-ie"
RECORDS = [made_record(IE, seed, top1=10.0 + 2 * seed, oracle=4.0) for seed in (0, 1)]
CELL = Cell(f"table0/{IE}", IE, ("table0", "ie"), {"oracle": 1.0, "top1": 2.0})


def test_figure_4a_is_complete():
    found = {(cell.where[2], cell.where[1]): cell.recipe for cell in CELLS if cell.where[0] == "fig4a"}
    assert set(found) == {(m, way) for m in ("m2", "m5", "m10") for way in ("ie", "ie-sharing", "cmcl")}
    for (m, method), recipe in found.items():
        assert (f"m{recipe.members}", recipe.sharing) == (m, method != "ie")
        assert recipe.objective["overlap"] == (recipe.members if method != "cmcl" else 1 if m == "m2" else 4)
        same = ("data", "network", "steps", "lr", "milestones", "batch_size", "weight_decay")
        assert all(getattr(recipe, key) == getattr(find("cifar10-resnet20-cmcl"), key) for key in same)


def test_what_fills_a_cell():
    record = changed(RECORDS[0], ood=None)
    assert fills(record, CELL)
    for change in ({"recipe_hash": "0" * 16}, {"full_length": False}, {"full_test": False}):
        assert not fills(changed(record, **change), CELL), change
    assert not fills(record, CELL, {"digits": {"train": "x", "test": "y"}})
    figure2 = changed(CELL, where=("fig2a", "ie"))
    assert not fills(record, figure2), "figure 2 needs OOD data"
    assert fills(record, figure2, ood=False)
    assert fills(changed(record, ood="svhn"), figure2)


def test_data_unlike_the_others_do_not_count():
    stray = changed(RECORDS[0], seed=9, checksums={"train": "x", "test": "y"})
    assert known_checksums([*RECORDS, stray])["digits"] == RECORDS[0].checksums
    (summary,) = summarise([CELL], [*RECORDS, stray])
    assert summary["ours"]["top1"]["n"] == 2
    assert summary["partial"] == [stray.file_name]


def test_summary():
    two = changed(find(IE), members=2)
    a, b = (
        made_record(IE, seed, top1=top1, oracle=4.0, recipe=two, recipe_hash=find(IE).hash, members=members)
        for seed, top1, members in ((0, 10.0, [10.0, 20.0]), (1, 12.0, [11.0, 13.0]))
    )
    both, alone, figure = summarise([CELL, changed(CELL, single=True), changed(CELL, paper=None)], [a, b])
    assert (both["id"], both["paper"]) == (f"table0/{IE}", {"oracle": 1.0, "top1": 2.0})
    top1 = {"mean": 11.0, "std": pytest.approx(2**0.5, abs=1e-6), "n": 2}
    assert both["ours"] == {"oracle": {"mean": 4.0, "std": 0.0, "n": 2}, "picked": top1, "top1": top1}
    assert alone["ours"]["top1"] == {"mean": 13.5, "std": pytest.approx(4.5**0.5, abs=1e-6), "n": 2}
    assert alone["ours"]["oracle"] == alone["ours"]["top1"]
    assert figure["paper"] == {"oracle": None, "top1": None}
    assert summarise([CELL], [])[0]["ours"] is None


def test_choose():
    name = "cifar10-cnn-cmcl"
    cells = search(select([f"table1/{name}"]))[name][:2]
    (a, _), (b, recipe) = ((cell.name, cell.recipe) for cell in cells)

    def one(name, top1, held_out, **changes):
        validation = {"top1": held_out, "picked": 1.0, "oracle": 1.0}
        return changed(made_record(name, top1=top1, validation=validation), **changes)

    found = [one(a, 5.0, 8.0), one(a, 5.0, 9.0), one(b, 6.0, 7.0), one(b, 0.0, 0.0, full_length=False)]
    top1 = {"mean": 7.0, "std": None, "n": 1}
    best = {
        "beta": recipe.beta,
        "overlap": recipe.overlap,
        "name": b,
        "chosen_on": "validation",
        "top1": top1,
    }
    assert choose(cells, [*found, one(b, 0.0, 0.0, recipe_hash="another")]) == best
    on_test = choose(cells, found, on_test=True)
    assert (on_test["name"], on_test["chosen_on"]) == (a, "test")
    assert choose(cells, found[:2]) is None, "not finished"
    without = [changed(record, validation=None) for record in found]
    assert choose(cells, without) is None
    assert choose(cells, without, on_test=True) == on_test
