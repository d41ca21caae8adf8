"""What pip is asked for where a TensorFlow is there already."""

import subprocess
import sys
from importlib import metadata

from packaging.version import Version

from distribution import requirements
from tests.support.launched import ROOT

WANTED = [
    "keras==3.2.1",
    "tensorflow==2.21.0",
    "tensorflow-text==2.21.1",
    "numpy>=2.0",
    "tqdm>=4",
]


def test_a_tensorflow_that_fits_stays():
    colab = {"keras": "3.1", "tensorflow": "2.20.0", "tensorflow-text": "2.20.1", "numpy": "2.1.3"}
    assert requirements.missing(WANTED, colab) == ["keras==3.2.1", "tqdm>=4"]
    del colab["tensorflow-text"]
    of_this_tensorflow = ["keras==3.2.1", "tensorflow-text==2.20.*", "tqdm>=4"]
    assert requirements.missing(WANTED, colab) == of_this_tensorflow


def test_a_tensorflow_that_does_not_fit_is_replaced():
    old = {"tensorflow": "2.15.0", "tensorflow-text": "2.15.0", "numpy": "2.0.0"}
    assert requirements.missing(WANTED, old) == [line for line in WANTED if "numpy" not in line]
    assert requirements.missing(WANTED, {}) == WANTED
    with_cuda = requirements.missing(WANTED, old, gpu=True)
    assert with_cuda[1:3] == ["tensorflow[and-cuda]==2.21.0", "tensorflow-text==2.21.1"]


def test_here_nothing_is_missing():
    ended = subprocess.run(
        [sys.executable, "-m", "distribution.requirements"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert Version(metadata.version("tensorflow")) in requirements.FITS
