"""Imports modules of Keras that no recipe needs at their first use.

`import keras` imports scikit-learn and matplotlib where they are installed, for `keras.wrappers`
and `keras.visualization`: a quarter of the seconds that the imports of a recipe take. The private
name stands here, not in `distribution.keras_compat`, since that imports Keras.
"""

import importlib
import importlib.machinery
import sys
import types

# A package comes before the one that imports from it.
LATE = ("keras.src.visualization", "keras.visualization", "keras.wrappers")


def import_late() -> None:
    """Makes Keras import the modules `LATE` at their first use; imports nothing.

    Until then a stand-in is in their place. Does nothing if Keras is imported already.
    """
    if "keras" not in sys.modules:
        for name in LATE:
            sys.modules.setdefault(name, _StandIn(name))


class _StandIn(types.ModuleType):
    """Stands for a module until something in it is asked for."""

    def __getattr__(self, name: str):
        if name == "__path__":  # of a package, read by imports of a module in it
            return self._path()
        if name == "__all__":  # read by `from module import *`, which looks into no __dir__
            module = self._imported()
            return getattr(module, name, [n for n in dir(module) if not n.startswith("_")])
        if name.startswith("__"):  # `inspect` reads such names of every module
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(self._imported(), name)

    def __dir__(self):
        return dir(self._imported())

    def _path(self):
        parent = sys.modules[self.__name__.rpartition(".")[0]]
        spec = importlib.machinery.PathFinder.find_spec(self.__name__, parent.__path__)
        if spec is None or spec.submodule_search_locations is None:
            raise AttributeError(f"{self.__name__} is not a package")
        return spec.submodule_search_locations

    def _imported(self) -> types.ModuleType:
        for name in LATE:
            if isinstance(sys.modules.get(name), _StandIn):
                del sys.modules[name]
        for name in LATE:
            importlib.import_module(name)
        return sys.modules[self.__name__]
