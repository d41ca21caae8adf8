"""Files and folders that cannot be read, also by root, who runs the tests in a container."""

import builtins
import io
import os
from pathlib import Path


def close(path, monkeypatch):
    """Closes a file or folder for the test."""
    closed = os.path.realpath(path)

    def guarded(stock, itself):
        def call(name, *more, **named):
            if isinstance(name, str | os.PathLike):
                place = os.path.realpath(name)
                if (itself and place == closed) or Path(closed) in Path(place).parents:
                    raise PermissionError(13, "Permission denied", os.fspath(name))
            return stock(name, *more, **named)

        return call

    monkeypatch.setattr(os, "stat", guarded(os.stat, itself=False))
    monkeypatch.setattr(os, "listdir", guarded(os.listdir, itself=True))
    monkeypatch.setattr(builtins, "open", guarded(builtins.open, itself=True))
    monkeypatch.setattr(io, "open", builtins.open)  # which pathlib uses
