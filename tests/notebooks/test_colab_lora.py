"""The notebook that fine-tunes Llama 3.2 with adapters, with a tiny random Llama in its place.

No cell is changed; other settings are chosen after those of the notebook.
"""

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from tests.notebooks.test_colab import run
from tests.support import causal_presets
from tests.support.kernel import Kernel
from tests.support.launched import ROOT

NOTEBOOK = ROOT / "notebooks" / "causal_lm_lora_colab.ipynb"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]
(SETTINGS,) = [number for number, code in enumerate(CODE) if "PRESET =" in code]
LLAMA_32_1B = dict(layers=16, width=2048, heads=32, key_value_heads=8, head=64)


def test_nothing_that_was_run_is_kept():
    for cell in CELLS:
        assert cell.get("outputs", []) == [] and cell.get("execution_count") is None


def test_the_commands_inherit_the_key_of_kaggle(monkeypatch):
    """Each is a process of its own, which `kagglehub.login()` here would not reach."""
    (code,) = [code for code in CODE if "KAGGLE_KEY" in code]
    monkeypatch.setenv("KAGGLE_USERNAME", "from outside")
    monkeypatch.setenv("KAGGLE_KEY", "")
    monkeypatch.setattr("getpass.getpass", lambda prompt: f"typed at {prompt}")
    exec(code, {"IN_COLAB": True, "Path": Path, "shutil": shutil})
    assert os.environ["KAGGLE_USERNAME"] == "from outside"
    assert os.environ["KAGGLE_KEY"] == "typed at KAGGLE_KEY: "


def test_the_sizes_on_paper():
    """The adapters of KerasNLP's Llama: (width, heads, rank) and (rank, width of a head)."""
    text = "".join("".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "markdown")
    sizes, rank = LLAMA_32_1B, 8
    heads = sizes["heads"] + sizes["key_value_heads"]
    adapters = sizes["layers"] * rank * (sizes["width"] * heads + 2 * sizes["head"])
    assert f"{adapters:,} x 16" in text and f"({4 * adapters / 1e6:.0f} MB" in text
    task = causal_presets.make_task("Llama3")
    backbone = task.backbone
    backbone.enable_lora(rank)
    heads = backbone.num_query_heads + backbone.num_key_value_heads
    width, head = backbone.hidden_dim, backbone.hidden_dim // backbone.num_query_heads
    trained = sum(
        weight.value.shape.num_elements()
        for weight in backbone.trainable_variables
        if "lora_kernel" in weight.path
    )
    assert trained == backbone.num_layers * rank * (width * heads + 2 * head)


@pytest.mark.long
def test_from_top_to_bottom(tmp_path):
    work = tmp_path / "keras-recipes"
    work.mkdir()
    (work / "pyproject.toml").write_text("")  # the folder of the repository, as the cells know it
    causal_presets.make_task("Llama3").save_to_preset(str(tmp_path / "preset"))
    kernel = Kernel(tmp_path, cwd=work, CUDA_VISIBLE_DEVICES="-1")
    try:
        assert "60 messages, for instance:" in run(kernel, CODE[: SETTINGS + 1])
        chosen = kernel.run("print(PRESET, RUN, SIZES)")
        assert chosen.out.startswith("llama3.2_instruct_1b runs/causal_lm/tickets --sequence-")
        tiny = "--sequence-length 256 --global-batch-size 4 --lora-rank 2 --epochs 2 --log-every 5"
        run(kernel, [f"PRESET, SIZES = {str(tmp_path / 'preset')!r}, {tiny!r}"])
        printed = run(kernel, CODE[SETTINGS + 1 :])
        messages = kernel.run("print(json.dumps(MESSAGES))").out
        lines = kernel.run("print([len(line.get_xdata()) > 1 for line in axes.lines])")
    finally:
        kernel.close()
    assert "error" not in printed.lower()
    for message in json.loads(messages):
        # A live line, of predictions that take seconds, is overwritten with spaces.
        asked = re.findall(rf"[\r\n] *{re.escape(message)}\r?\n", printed)
        assert len(asked) == 3, "asked three times"
    assert lines.out == "[True, True]\n"
    folder = work / "runs" / "causal_lm" / "tickets"
    options = json.loads((folder / "options.json").read_text())["options"]
    assert (options["template"], options["lora_rank"]) == ("chat", 2)
    assert (folder / "exports" / "huggingface" / "model.safetensors").exists()
    assert (folder.with_name("tickets-kept") / "adapter.lora.h5").exists()
