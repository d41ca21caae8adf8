"""Native code's output during TensorFlow's import, with a fake TensorFlow that always writes."""

import subprocess
import sys

import pytest

from tests.support.processes import ROOT

FAKE = """
import os
os.write(2, b"noise of the import, level %s\\n" % os.environ["TF_CPP_MIN_LOG_LEVEL"].encode())
class config:
    @staticmethod
    def list_physical_devices(kind):
        os.write(2, f"noise of the drivers, {kind}\\n".encode())
"""
PROGRAM = """
import logging, os, sys, warnings
from machine.quiet_start import start_quietly
start_quietly()
early = "tensorflow" in sys.modules
import tensorflow
os.write(2, b"heard afterwards\\n")
for text in ("Skipping variable loading for optimizer 'adam'", "a warning"):
    warnings.warn(text)
    logging.getLogger("tensorflow").warning(text)
print(early, os.environ.get("TF_CPP_MIN_LOG_LEVEL"))
"""


@pytest.fixture
def start(tmp_path):
    def start(fake=FAKE, program=PROGRAM, **environ):
        (tmp_path / "tensorflow.py").write_text(fake)
        return subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": ""} | environ,
            capture_output=True,
            text=True,
        )

    return start


def test_import_is_silent_and_what_follows_is_heard(start):
    ended = start()
    assert ended.returncode == 0 and "noise" not in ended.stderr
    assert ended.stderr.startswith("heard afterwards\n")
    assert ended.stderr.count("a warning") == 2 and "Skipping" not in ended.stderr
    assert ended.stdout == "False None\n"  # nothing stays for the processes that it starts


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_collection_looks_at_what_is_imported(enabled, start):
    fake = FAKE + "import gc\nkept = [[] for _ in range(50_000)]\nduring = gc.isenabled()\n"
    program = "import gc\n" + ("" if enabled else "gc.disable()\n") + PROGRAM
    program += "print(tensorflow.during, gc.isenabled(), gc.get_freeze_count() > 50_000)\n"
    assert start(fake, program).stdout.splitlines()[1] == f"False {enabled} True"


def test_who_asks_for_the_lines_gets_all_of_them(start):
    ended = start(TF_CPP_MIN_LOG_LEVEL="0")
    assert "noise of the import, level 0" in ended.stderr
    assert ended.stdout.endswith(" 0\n")


def test_failed_import_shows_what_was_written(start):
    ended = start(fake=FAKE + "raise ImportError('a library is missing')")
    assert ended.returncode == 1
    assert "noise of the import, level 3" in ended.stderr
    assert ended.stderr.endswith("ImportError: a library is missing\n")


@pytest.mark.parametrize("end", ["os._exit(1)", "os.abort()", "os.kill(os.getpid(), 9)"])
def test_what_native_code_wrote_before_it_ended_the_process_is_shown(start, end):
    """As TensorFlow does for an unknown flag in TF_XLA_FLAGS: nothing of Python's runs then."""
    fake = f"import os\nos.write(2, b'two lines\\nUnknown flag: --bad')\n{end}\n"
    ended = start(fake=fake)
    assert ended.returncode in (1, -6, -9)
    assert ended.stderr == "two lines\nUnknown flag: --bad"
