"""The table of what methods cost, on a tiny model: its counts by hand."""

import shutil
import sys
from pathlib import Path

import measure_methods
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "training"))
from finetune_run import write_base  # noqa: E402


def test_counts(tmp_path, capsys):
    base = write_base(tmp_path / "base")  # C 24, F 20, three layers: head, fused, tail
    (tmp_path / "configs").mkdir()
    shutil.copy(ROOT / "configs" / "finetune" / "lora.json", tmp_path / "configs")
    words = ["--config_dir", tmp_path / "configs", "--model", base, "--large_model", base, "--batch", 1, "--length", 8]
    assert measure_methods.main([str(word) for word in [*words, "--steps", 1]]) == 0
    row = capsys.readouterr().out.splitlines()[-1].split("|")
    linear = [(24, 24)] * 4 + [(24, 112), (44, 24)] + [(24, 20), (24, 20), (20, 24)]
    trained = sum((inside + outside) * 8 for inside, outside in linear)
    assert [cell.strip() for cell in row[1:3]] == ["`lora`", f"{trained:,}"] and row[5].strip() == f"{trained:,}"
    assert float(row[3]) > 0


def test_settings_files_of_methods_alone_are_counted(tmp_path):
    arguments = measure_methods.settings_of(ROOT / "configs" / "finetune" / "vera.json")
    assert arguments.method == "vera"
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no settings files"):
        measure_methods.main(["--config_dir", str(tmp_path / "empty")])
