"""Runs cells of tests in a real Jupyter kernel."""

import os
import queue
import re
import time

import jupyter_client

from tests.support.launched import ROOT


class Cell:
    """The output of a cell and how it ended."""

    def __init__(self):
        self.out = self.err = ""
        self.error: str | None = None  # the exception's class
        self.message = ""

    def lines(self):
        """Returns its visible standard output, without bars and colours."""
        return [line.split("\r")[-1].rstrip() for line in self.out.split("\n")]


class Kernel:
    """A kernel, and its client.

    Args:
        folder: its working directory, also for IPython's files.
        words: additional words of its command line.
        cwd: another working directory.
        environ: additional environment variables.
    """

    def __init__(self, folder, *words, cwd=None, **environ):
        self.folder = folder
        self.manager = jupyter_client.KernelManager()
        # A user's notebook does not have the variables of this test run.
        inherited = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
        ours = {"PYTHONPATH": str(ROOT), "IPYTHONDIR": str(folder / "ipython")}
        self.manager.start_kernel(
            cwd=str(cwd or folder),
            env=inherited | ours | environ,
            extra_arguments=["--HistoryManager.enabled=False", *words],
        )
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def begin(self, code):
        return self.client.execute(code, store_history=False)

    def end(self, request, until=None, seconds=90):
        """Waits for the end of a cell, or until its output matches."""
        cell, deadline = Cell(), time.monotonic() + seconds
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=max(0.1, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"still running\n{cell.out[-1000:]}\n{cell.err}") from None
            if message["parent_header"].get("msg_id") != request:
                continue
            content = message["content"]
            if message["msg_type"] == "stream":
                name = {"stdout": "out", "stderr": "err"}[content["name"]]
                setattr(cell, name, getattr(cell, name) + content["text"])
            elif message["msg_type"] == "error":
                cell.error, cell.message = content["ename"], content["evalue"]
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                return cell
            if until and re.search(until, cell.out):
                return cell

    def run(self, code, seconds=90):
        return self.end(self.begin(code), seconds=seconds)

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
