"""layout.json, by which a checkpoint says how it was made."""

import pytest

from ernie35se.training.layouts import LAYOUT_FILE, Layout


@pytest.mark.parametrize("text", ['{"tensor": ', "[1]", '{"tensors": 2}'])
def test_a_damaged_one_is_named(tmp_path, text):
    (tmp_path / LAYOUT_FILE).write_text(text)
    with pytest.raises(ValueError, match="layout.json does not say how the checkpoint was made .*copy the checkpoint again"):
        Layout.of_checkpoint(tmp_path)


def test_a_whole_one_is_read(tmp_path):
    (tmp_path / LAYOUT_FILE).write_text('{"tensor": 2, "stage": "stage1"}')
    assert Layout.of_checkpoint(tmp_path) == Layout(tensor=2, stage="stage1")
