"""tools/benchmark.py: its arithmetic, that its checks can fail, and that groups run at toy size."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from benchmarks import measure, report, sides, training  # noqa: E402


def test_the_fit_recovers_a_known_exponent():
    x = [1, 2, 5, 9]
    fit = measure.fit_power_law(x, [3 * value**1.7 for value in x])
    assert fit.factor == pytest.approx(3) and fit.exponent == pytest.approx(1.7) and fit.worst < 1e-9
    with pytest.raises(ValueError, match="two different x"):
        measure.fit_power_law([2, 2], [1, 3])


def test_ratios_are_taken_round_by_round_and_targets_can_be_missed():
    assert measure.ratios([2, 40], [1, 10]) == (3, 2, 4, 2)
    assert measure.Check("x", measure.spread([1.2]), least=1.25).met is False
    assert measure.Check("x", measure.spread([0.2]), most=0.3).met is True
    assert measure.Check("x", measure.spread([0.2])).met is None


def test_sides_run_in_turn_and_the_first_round_is_not_counted():
    calls, counter = [], iter(range(100))

    def side(name):
        return lambda: calls.append(name) or {"n": next(counter)}

    found = measure.in_turn({"a": side("a"), "b": side("b")}, rounds=2)
    assert calls == list("ababab") and found == {"a": {"n": [2, 4]}, "b": {"n": [3, 5]}}


def test_rows_survive_json_and_the_table_shows_a_miss(tmp_path):
    row = measure.Row("r", "s", {"a": measure.spread([1, 3])}, [measure.Check("c", measure.spread([2.0]), most=1)], "n")
    again = measure.Row.from_json(json.loads(json.dumps(row.as_json())))
    assert again == row
    results = {"groups": {"g": {"machine": measure.machine(), "rows": [row.as_json()]}}}
    assert "| 2 | ≤ 1 | **no** |" in report.table(results)
    report.chart(results, tmp_path / "c.png")
    assert (tmp_path / "c.png").read_bytes()[:4] == b"\x89PNG"


def test_peak_memory_sees_an_array():
    if not sides.resident("VmHWM"):
        pytest.skip("no /proc here")
    _, peak = sides.PeakMemory().of(lambda: np.ones(5_000_000).sum())
    assert 38e6 < peak < 80e6


def test_toy_index_group_through_the_command(tool, tmp_path):
    done = tool("benchmark", "index", "--toy", "--rounds", 1, "--json", tmp_path / "r.json")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "r.json").read_text())["groups"]["index"]["rows"]
    assert len(rows) == 2 and all(side["median"] > 0 for row in rows for side in row["sides"].values())
    assert tool("benchmark", "index", "--profile").returncode == 2


def test_the_equivalence_check_notices_a_changed_weight(tmp_path):
    pytest.importorskip("torch")
    with training.Workers() as workers:
        settings = {"batch": 2, "length": 9, "config": sides.TOY}
        ours, theirs = workers.start("ours", **settings), workers.start("pytorch", **settings)
        training.equivalence(ours, theirs)
        loss = ours.ask("export", path=str(tmp_path))["loss"]
        with np.load(tmp_path / "weights.npz") as stored:
            weights = dict(stored)
        weights["ernie.layers.1.self_attn_mlp.o_proj.weight"][0, 0] += 0.1
        np.savez(tmp_path / "weights.npz", **weights)
        assert theirs.ask("compare", path=str(tmp_path), loss=loss)["gradient"] > training.EQUIVALENT
