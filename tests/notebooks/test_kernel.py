"""Recipes in the cells of a real Jupyter kernel: one kernel for all, the tests in order."""

import json
import re

import pytest

from tests.support.kernel import Kernel

pytestmark = pytest.mark.long

# Run by the kernel: what a run must leave as it was.
SNAPSHOT = """
import inspect, logging, signal, sys
from recipes import bert_mlm, dna_melting, mnist
import keras

def snapshot():
    functions = {}
    for name, module in list(sys.modules.items()):
        if name.startswith(("keras.src", "tensorflow.python.distribute.")):
            for key, thing in list(vars(module).items()):
                if inspect.isfunction(thing):
                    functions[name, key] = id(thing)
                elif inspect.isclass(thing):
                    for method, code in list(vars(thing).items()):
                        if inspect.isfunction(code):
                            functions[name, key, method] = id(code)
    log, tensorflow = logging.getLogger("recipes"), logging.getLogger("tensorflow")
    return {
        "functions": functions,
        "signals": [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)],
        "log": (log.handlers[:], log.level, log.propagate, log.isEnabledFor(logging.INFO)),
        "others": (logging.getLogger().handlers[:], tensorflow.handlers[:], tensorflow.level),
        "precision": (keras.config.floatx(), keras.config.dtype_policy().name),
    }

def changes():
    now = snapshot()
    known = now["functions"].keys() & before["functions"].keys()
    found = [key for key in known if now["functions"][key] != before["functions"][key]]
    return found + [key for key in now if key != "functions" and now[key] != before[key]]

before = snapshot()
print(len(before["functions"]) > 1000, before["precision"])
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    made = Kernel(tmp_path_factory.mktemp("notebook"))
    try:
        cell = made.run(SNAPSHOT)
        assert (cell.error, cell.err) == (None, ""), "the import prints something"
        assert cell.out == "True ('float32', 'float32')\n"
        yield made
    finally:
        made.close()


MNIST = (
    "mnist.Options(max_steps=6, run_dir='mnist', dataset='digits', strategy='mirrored', replicas=2)"
)


def test_a_recipe_in_a_cell(kernel):
    cell = kernel.run(f"results = mnist.main({MNIST})\nprint(results['steps'], changes())")
    assert (cell.error, cell.err) == (None, ""), cell.message
    lines = [line for line in cell.lines() if line]
    assert lines[-1] == "6 []", "steps, and what the run has left behind"
    # The cell shows the log.
    logged = (kernel.folder / "mnist" / "worker-0.log").read_text().splitlines()
    logged = [line.split(" ", 2)[2].rstrip() for line in logged]
    assert lines[:-1] == logged and any(line.startswith("step 6/6  loss") for line in logged)


def test_a_finished_run_is_told_again(kernel):
    cell = kernel.run(f"again = mnist.main({MNIST})\nprint(again['recipe'], again['steps'])")
    assert cell.error is None
    assert cell.out == "the run in mnist is finished: nothing to do\nmnist 6\n"


def test_another_number_of_replicas_needs_another_kernel(kernel):
    cell = kernel.run("mnist.main(mnist.Options(dataset='digits', replicas=3))")
    assert cell.error == "DistributionError"
    assert "TensorFlow already runs with another number of devices" in cell.message
    assert "restart the kernel" in cell.message
    assert not (kernel.folder / "runs").exists()
    assert kernel.run("print(changes())").out == "[]\n"


def test_interrupted_cell_saves_and_says_how_to_resume(kernel):
    code = "mnist.main(mnist.Options(dataset='digits', epochs=400, precision='float64'))"
    request = kernel.begin(code)
    shown = kernel.end(request, until=r"epoch 2  .*accuracy ").out
    assert re.search(r"step \d+/16000  loss .*  [\d,]+ examples/s  .* left", shown)
    kernel.manager.interrupt_kernel()
    cell = kernel.end(request)
    assert cell.error == "Stopped"
    assert "SIGINT: saving and stopping" in cell.err
    resume = re.fullmatch(
        r"stopped and saved\. Resume with:\n  (mnist\.main\(mnist\.Options\(.*\)\))", cell.message
    )[1]
    assert kernel.run("print(changes())").out == "[]\n"
    # What it says is typed in, resumes there, and is stopped again.
    request = kernel.begin(resume)
    cell = kernel.end(request, until=r"resumes at step \d+ from ")
    step = int(re.search(r"resumes at step (\d+)", cell.out)[1])
    assert step >= 80  # two epochs of 40
    kernel.end(request, until=r"epoch \d+  .*accuracy ")
    kernel.manager.interrupt_kernel()
    assert kernel.end(request).error == "Stopped"
    (run,) = (kernel.folder / "runs" / "mnist").iterdir()
    newest = sorted((run / "checkpoints").iterdir())[-1]
    assert json.loads((newest / "state.json").read_text())["step"] > step


def test_second_interrupt_ends_the_cell_and_not_the_kernel(kernel):
    # The first is noted, and the cell does not look at it.
    cell = kernel.run(
        "import os, time\n"
        "from training import signals\n"
        "s = signals.signals\n"
        "s.install(); s.training = True\n"
        "signals.SAME_REQUEST_SECONDS = 0\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT); time.sleep(0.01); print('noted', s.asked)\n"
        "    os.kill(os.getpid(), signal.SIGINT); time.sleep(5)\n"
        "finally:\n"
        "    s.restore()\n"
    )
    assert (cell.out, cell.error) == ("noted True\n", "StopRequested")
    assert kernel.run("print('alive', changes())").out == "alive []\n"
