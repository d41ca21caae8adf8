"""Replaces a function of a class or module while a context is open; every patch uses it."""

import contextlib
import functools
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def replaced(owner, name: str, make: Callable) -> Iterator[None]:
    """Replaces a function of a class or module by `make(stock)`, and restores it."""
    stock = getattr(owner, name)
    is_own = name in vars(owner)  # else it is inherited
    setattr(owner, name, functools.wraps(stock)(make(stock)))
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, stock)
        else:
            delattr(owner, name)
