"""Programs that are started without standard streams, as `>&- 2>&-` does."""

import subprocess
import sys

import pytest

from tests.support.processes import ROOT

WITHOUT = "import os; [os.close(number) for number in range(3)]; "
START = f"{WITHOUT}os.execv({sys.executable!r}, [{sys.executable!r}, '-c', {{!r}}])"
# Reports by a file: nothing else is left.
REPORT = """
import os, sys
opened = os.open({path!r}, os.O_CREAT | os.O_WRONLY)
print("a line", flush=True)
print("an error", file=sys.stderr, flush=True)
os.write(2, b"of native code")
os.write(opened, f"{{opened > 2}} {{sys.stdin.read()!r}} {{sys.stdout.isatty()}}".encode())
"""


@pytest.mark.parametrize("opened_by", ["import recipes", "from machine import output as o; o"])
def test_files_do_not_get_the_numbers_of_closed_streams(opened_by, tmp_path):
    ending = "" if opened_by == "import recipes" else ".open_closed_streams()"
    program = opened_by + ending + REPORT.format(path=str(tmp_path / "report"))
    ended = subprocess.run([sys.executable, "-c", START.format(program)], cwd=ROOT)
    assert ended.returncode == 0
    assert (tmp_path / "report").read_text() == "True '' False"


def test_the_launcher_ends_with_the_status_of_its_processes(tmp_path):
    arguments = [sys.executable, "-m", "launch", "-m", "platform"]
    program = f"{WITHOUT}os.chdir({str(tmp_path)!r}); os.execv({sys.executable!r}, {arguments!r})"
    ended = subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": str(ROOT)})
    assert ended.returncode == 0


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # the second in the locale C
@pytest.mark.parametrize("begin", ["import recipes", "with o.silent_broken_pipe(): pass"])
def test_what_the_encoding_lacks_is_escaped(begin, errors):
    program = f"from machine import output as o\n{begin}\nprint('数 é \\udcff')"
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={"PYTHONIOENCODING": f"latin-1:{errors}"},
        capture_output=True,
    )
    assert ended.stdout == b"\\u6570 \xe9 \\udcff\n", ended.stderr
