"""Records the order of syncs and renames."""

import os


def recorded(monkeypatch) -> list[tuple[str, str]]:
    """Returns a list that records ("sync", name) and ("rename", new name) as they happen."""
    order, opened = [], {}
    stock_open, stock_sync = os.open, os.fsync

    def open_(path, flags, *more, **named):
        descriptor = stock_open(path, flags, *more, **named)
        opened[descriptor] = os.fspath(path)
        return descriptor

    def fsync(descriptor):
        order.append(("sync", os.path.basename(opened[descriptor])))
        stock_sync(descriptor)

    def renaming(stock):
        def rename(source, target):
            order.append(("rename", os.path.basename(target)))
            stock(source, target)

        return rename

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", renaming(os.rename))
    monkeypatch.setattr(os, "replace", renaming(os.replace))
    return order
