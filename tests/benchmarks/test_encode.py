"""The benchmark of the encoder runs from its command line to its figures; what it measures needs a GPU."""

import json
from pathlib import Path

import pytest

from benchmarks.encode import arguments_of, main
from shared_runtime.conditioning.ways import Ways


def test_a_row_has_both_sides_and_their_distance(tmp_path: Path) -> None:
    file = tmp_path / "encode.json"
    main(["--tiny", "--rows", "keyframes", "--repeats", "1", "--json", str(file)])
    row = json.loads(file.read_text())["keyframes"]
    assert row["split"]["of_stock"] > 0
    assert 0 < row["split"]["error"] < 1e-4
    assert 0 < row["fp32_other_order"]["error"] < 1e-5
    assert row["split"]["at_most"] == 0.28
    assert row["stock_tf32"]["error"] == 0, "a CPU has no TensorFloat-32"


def test_a_row_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments_of(["--rows", "video,sound"])
    assert "--rows: sound; there are video, image" in capsys.readouterr().err


@pytest.mark.slow
def test_tuning_writes_a_table_of_every_layer_that_was_near_enough(tmp_path: Path) -> None:
    table, file = tmp_path / "ways.json", tmp_path / "encode.json"
    main(["--tiny", "--tune", "--rows", "keyframes", "--table", str(table), "--json", str(file)])
    ways, found = Ways.read(table), json.loads(file.read_text())
    assert ways.measured.startswith("cpu, torch")
    for kind in ("clip", "picture"):
        layers = found["tune"][kind]["layers"][ways.of(kind).layout]
        assert ways.of(kind).layers == {name: layer["chosen"] for name, layer in layers.items()}
        for layer in layers.values():
            assert layer[layer["chosen"]]["error"] <= 2e-5
            assert layer["exact_sums"] < 1e-5
