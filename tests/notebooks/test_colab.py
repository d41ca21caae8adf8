"""The notebook for Colab, cell by cell, in a real kernel on the CPU.

No cell is changed but for the address of the repository; other options are chosen between cells.
"""

import json
import os
import re
import shutil
import subprocess

import pytest

from tests.support.kernel import Kernel
from tests.support.launched import ROOT

NOTEBOOK = ROOT / "notebooks" / "bert_mlm_colab.ipynb"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]
# A BERT that trains in seconds; 20 steps make an epoch.
TINY = dict(
    preset="scratch",
    vocabulary_size=60,
    num_layers=1,
    hidden_dim=16,
    sequence_length=32,
    max_examples=160,
    global_batch_size=8,
    base_learning_rate=0.01,
    log_every=20,
)
# What a runtime of Colab has imported before the first cell.
FAKE_DRIVE = """
from pathlib import Path

def mount(path):
    (Path(path) / "MyDrive").mkdir(parents=True)
"""


def code_with(text: str) -> int:
    """The number of the one cell of code that holds a text."""
    (found,) = [number for number, code in enumerate(CODE) if text in code]
    return found


TRAIN = code_with("bert_mlm.main(options)")
REPOSITORY = "https://github.com/OWNER/keras-recipes"


def choose(**options) -> str:
    """A cell that changes the notebook's options to those of a run that takes seconds."""
    named = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return (
        "import dataclasses\n"
        f"options = dataclasses.replace(options, {named})\n"
        "options.run_dir = Path(options.run_dir)"
    )


def test_nothing_that_was_run_is_kept():
    for cell in CELLS:
        assert cell.get("outputs", []) == [] and cell.get("execution_count") is None


@pytest.fixture
def start(tmp_path):
    """Starts a kernel as Jupyter does where the notebook lies, and runs cells before another."""
    kernels = []

    def begin(*words, cwd=NOTEBOOK.parent, **environ):
        environ = {"PYTHONPATH": "", "CUDA_VISIBLE_DEVICES": "-1"} | environ
        kernels.append(Kernel(tmp_path, *words, cwd=cwd, **environ))
        return kernels[-1]

    yield begin
    for kernel in kernels:
        kernel.close()


def run(kernel, cells) -> str:
    """Runs cells, none of which may fail; returns what they printed."""
    printed = ""
    for code in cells:
        cell = kernel.run(code, seconds=240)
        assert cell.error is None, f"{code}\n{cell.out[-2000:]}\n{cell.error}: {cell.message}"
        printed += cell.out
    return printed


# Instead of what asks for the missing packages, and of the shell.
MISSING_PACKAGES = """
import sys
from pathlib import Path

IN_COLAB, commands = True, []
get_ipython().getoutput = lambda *words, **named: ["a==1", "b>=2"]
get_ipython().system = commands.append
"""


def test_missing_packages_are_installed(start):
    kernel = start()
    for notebook in sorted(NOTEBOOK.parent.glob("*.ipynb")):
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        (install,) = ["".join(c["source"]) for c in cells if "%pip" in "".join(c["source"])]
        run(kernel, [MISSING_PACKAGES, install])
        [command] = kernel.run("print(*commands, sep='\\n')").out.splitlines()
        assert command.endswith("pip install --quiet 'a==1' 'b>=2'")


@pytest.mark.long
def test_from_top_to_bottom_and_interrupted_once(start, tiny_text, tmp_path):
    run_dir = tmp_path / "runs" / "colab"
    kernel = start()
    assert "to install: nothing" in run(kernel, CODE[:TRAIN])
    # Unchanged it would download WikiText-2 and train for minutes.
    chosen = kernel.run("print(options.dataset, options.preset, options.epochs, options.run_dir)")
    assert chosen.out == "wikitext-2 auto 3 runs/bert_mlm/wikipedia\n"
    changed = TINY | dict(dataset=str(tiny_text), epochs=30, run_dir=str(run_dir))
    run(kernel, [choose(**changed, strategy="mirrored", replicas=2)])
    # Interrupted in mid-training it saves, and the same cell resumes.
    request = kernel.begin(CODE[TRAIN])
    begun = kernel.end(request, until=r"epoch 2  accuracy ", seconds=240)
    assert "replicas       2 in 1 worker(s): MirroredStrategy" in begun.out
    kernel.manager.interrupt_kernel()
    cell = kernel.end(request)
    assert cell.error == "Stopped" and "stopped and saved. Resume with:" in cell.message
    printed = run(kernel, [CODE[TRAIN]])
    step = int(re.search(r"resumes at step (\d+) from ", printed)[1])
    assert 40 <= step < 600
    # Once more: it is finished. Then the rest.
    assert "is finished: nothing to do" in run(kernel, [CODE[TRAIN]])
    printed = run(kernel, CODE[TRAIN + 1 :])
    assert len(re.findall(r"^ +\d+\.\d%  ", printed, re.MULTILINE)) == 15  # fills
    assert re.search(r"^test: perplexity \d+\.\d, accuracy \d+\.\d%$", printed, re.MULTILINE)
    # The plot: losses of the steps, of the validation, and of word frequencies.
    lines = kernel.run("print([len(line.get_xdata()) for line in axes.lines])")
    assert lines.out == "[30, 30, 2]\n"
    results = json.loads((run_dir / "results.json").read_text())
    assert (results["steps"], results["strategy"], results["replicas"]) == (600, "mirrored", 2)
    kept = run_dir.with_name("colab-kept")
    assert (kept / "model" / "task.json").exists()
    assert (kept / "exports" / "saved_model" / "saved_model.pb").exists()
    assert not (ROOT / "runs").exists() or run_dir.name not in os.listdir(ROOT / "runs")


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("git"), reason="NOT TESTED: no git is installed")
def test_the_cells_that_need_colab(start, tiny_run, tmp_path):
    """Clone, install and save, where `google.colab` is there and the repository on this disk."""
    package = tmp_path / "packages" / "google" / "colab"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "drive.py").write_text(FAKE_DRIVE)
    repository = tmp_path / "repository"
    ignored = shutil.ignore_patterns(".git", ".venv*", "runs", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, repository, ignore=ignored)
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "--quiet"], ["add", "."], [*who, "commit", "--quiet", "-m", "all"]):
        subprocess.run(["git", "-C", repository, *words], check=True)
    content = tmp_path / "content"
    content.mkdir()
    first = "import sys; sys.path.insert(0, {!r}); import google.colab"
    words = "--IPKernelApp.exec_lines=" + first.format(str(tmp_path / "packages"))
    for _ in range(2):  # the second time as after a restart: the clone is there
        kernel = start(words, cwd=content)
        first_cell = CODE[0].replace(REPOSITORY, f"file://{repository}")
        assert first_cell != CODE[0]
        cells = [first_cell, *CODE[1 : code_with("machine.requirements") + 1]]
        printed = run(kernel, cells)
        assert "to install: nothing" in printed and "fatal" not in printed
        run(kernel, [first_cell])
        assert kernel.run("print(Path.cwd())").out == f"{content}/keras-recipes\n"
        assert not (content / "keras-recipes" / "keras-recipes").exists()
    assert kernel.run("import data; print(data.__file__)").out.startswith(str(content))
    # A finished run stands for the cells between.
    assert kernel.run(CODE[code_with("bert_mlm.Options")]).error is None
    run_dir = content / "keras-recipes" / "runs" / "bert_mlm" / "wikipedia"
    shutil.copytree(tiny_run.folder, run_dir)
    (run_dir / "exports").mkdir()
    run(kernel, [CODE[code_with("drive.mount")]])
    assert (content / "drive" / "MyDrive" / "bert" / "model" / "task.json").exists()
