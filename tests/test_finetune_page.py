"""docs/finetune.md stays true: its settings tables, the files it names, its commands and records.

To renew the settings tables after a change of finetune_arguments.py: python tests/test_finetune_page.py
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "finetune.md"
BEGIN, END = "<!-- settings: begin -->\n", "<!-- settings: end -->"
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tools"), str(ROOT / "tests" / "training")]


def text() -> str:
    return PAGE.read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text(), re.MULTILINE | re.DOTALL)


def settings_markdown() -> str:
    from ernie35se.training.finetune_arguments import finetune_settings_table

    parts = []
    for group, rows in finetune_settings_table().items():
        parts.append(f"| {group} | default | |\n|---|---|---|\n")
        parts += [
            f"| `{flag}` | {f'`{default}`' if default else ''} | {words} |\n" for flag, default, words in rows
        ]
        parts.append("\n")
    return "".join(parts)


def test_the_settings_tables_are_those_of_the_code():
    written = text()[text().index(BEGIN) + len(BEGIN) : text().index(END)]
    assert written == settings_markdown(), "run: python tests/test_finetune_page.py"


def test_every_settings_file_is_named():
    stems = {path.stem for path in (ROOT / "configs" / "finetune").glob("*.json")} - {
        "demo_cpu",
        "sft_packed",
    }
    assert stems <= set(re.findall(r"^\| `(\w+)` \|", text(), re.MULTILINE))


def test_the_table_of_costs_is_that_of_the_settings_files():
    """What trains and the GB are counted again, for the small and the 3B model; what was measured is there."""
    import measure_methods

    section = text()[text().index("### What each costs") : text().index("### What each can do")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\| `.*$", section, re.MULTILINE)]
    files = {path.stem: path for path in (ROOT / "configs" / "finetune").glob("*.json")}
    assert {row[0].strip("`") for row in rows} == set(files) - set(measure_methods.SKIPPED)
    for name, trains, seconds, mib, large, gigabytes in rows:
        file = files[name.strip("`")]
        counted = [measure_methods.count_large(file, model) for model in ("ernie/tiny-random-ernie", "baidu/ernie-3.5-se-3b")]
        assert [trains, large] == [f"{made['trained']:,}" for made in counted], name
        assert gigabytes == f"{counted[1]['gb']:.1f}" and float(seconds) > 0 and int(mib.replace(",", "")) > 0


def test_the_records_of_the_page_are_read(tmp_path):
    from ernie35se.data.records import read_conversations

    lines = blocks("json")[0].splitlines()
    assert len(lines) == 5
    for number, line in enumerate(lines):
        (tmp_path / f"{number}.json").write_text(line)
        assert read_conversations([tmp_path / f"{number}.json"])[0].turns


def test_the_commands_run(tmp_path, monkeypatch):
    import merge_lora_params
    import run_finetune
    from finetune_run import settings, words_of, write_base, write_records

    monkeypatch.setattr("ernie35se.training.callbacks.draw_curves", lambda *args: None)
    base, data = write_base(tmp_path / "base"), write_records(tmp_path / "data")
    done = []
    for block in blocks("bash"):
        words = shlex.split(block.replace("\\\n", " "))
        assert words[0] == "python" and (ROOT / words[1]).is_file()
        if "qwen" in words[2]:
            assert (ROOT / words[2]).is_file()  # tests/test_run_finetune.py runs those
            continue
        words = [
            {"output/pretrain": str(base), "data": str(data)}.get(w, w.replace("output/", f"{tmp_path}/"))
            for w in words
        ]
        if "run_finetune" in words[1]:
            small = settings(base, data, tmp_path / "lora", max_steps=2)
            assert run_finetune.main([*words[2:], *words_of(small)]) == 0
        else:
            merge_lora_params.main(words[2:])
        done.append(words[1])
    assert done == ["scripts/run_finetune.py", "tools/merge_lora_params.py"]
    assert (tmp_path / "merged" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    "command", ["--preview_data", "--template", "--zero_padding", "--flash_mask", "--lora_path"]
)
def test_flags_of_the_page_exist(command):
    assert f"| `{command}` |" in text()


def test_help_is_grouped_by_part(capsys):
    import run_finetune

    with pytest.raises(SystemExit) as ended:
        run_finetune.main(["--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    places = [out.index(f"\n{group}:") for group in ("model", "data", "training")]
    assert places == sorted(places) and places[0] < out.index("--lora_rank") < places[1] < out.index(
        "--template"
    )


def test_a_settings_file_is_strict(tmp_path, capsys):
    import run_finetune

    file = tmp_path / "x.json"
    for content, message in (
        ({"model_name_or_path": "m", "lora_rnk": 4}, "unknown setting 'lora_rnk'; did you mean lora_rank?"),
        ({"model_name_or_path": "m", "lora_rank": "4"}, 'lora_rank = "4": expected an integer'),
    ):
        file.write_text(json.dumps(content))
        assert run_finetune.main([str(file)]) == 2
        assert message in capsys.readouterr().err


if __name__ == "__main__":
    page = text()
    start, end = page.index(BEGIN) + len(BEGIN), page.index(END)
    PAGE.write_text(page[:start] + settings_markdown() + page[end:], encoding="utf-8")
