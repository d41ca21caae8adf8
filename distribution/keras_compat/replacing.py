"""Replaces a function of a class or module while a context is open; every patch uses it."""

import contextlib
import functools
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def replaced(owner, name: str, make: Callable) -> Iterator[None]:
    """Replaces a function or property of a class or module by `make(stock)`; restores it."""
    stock = getattr(owner, name)
    is_own = name in vars(owner)  # else it is inherited
    made = make(stock)
    setattr(owner, name, functools.wraps(stock)(made) if callable(stock) else made)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, stock)
        else:
            delattr(owner, name)
