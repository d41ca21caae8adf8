import os
import types

import pytest

from data import installed_docs
from data.splits import split_of

MODULE = '''"""Tools that turn words into numbers
and numbers into words, for those who need it.

Example:

```python
words = tools.read(path)

print(words)
```
"""

class Reader:
    r"""Reads a file of words \\d and keeps them in memory for later use.

    A reader is closed when the block ends, also in the case of an error::

        with the reader as it is in this code for the test:
            pass

    Args:
        path: The `path` of the file which is read when the
            reader is opened.
        size (int): An integer.
        *others: Files that are read after the first one is done.

    | name | what it is for the reader and the file |
    |------|----------------------------------------|

    - The first item of a list is a sentence, see [the site](https://x.org/a).
    * The second item is one too, with a :func:`~tools.read` in the text.

    >>> reader = Reader("the file that is to be read in this test.")
    a line that is printed by the reader and that is no prose.

    Parameters
    ----------
    shape : tuple of int, which is the shape of the array to be made
        The shape of the array that is made by the reader.
    """

    def read(self):
        """Tools that turn words into numbers and numbers into words, for those who need it!"""

    async def close(self):
        """Closes it."""

add_newdoc("numpy", "array", ("sort", """
    sort(axis=-1)

    Sorts the array in place, which is faster than to make a copy.
    """))
'''

PROSE = [
    "Tools that turn words into numbers and numbers into words, for those who need it.",
    r"Reads a file of words \d and keeps them in memory for later use.",
    "A reader is closed when the block ends, also in the case of an error:",
    "The path of the file which is read when the reader is opened.",
    "Files that are read after the first one is done.",
    "The first item of a list is a sentence, see the site.",
    "The second item is one too, with a tools.read in the text.",
    "The shape of the array that is made by the reader.",
    "Sorts the array in place, which is faster than to make a copy.",
]


def make_package(folder):
    folder.mkdir()
    (folder / "__init__.py").write_text(MODULE)
    hidden = '"""This is a sentence which must not be seen by the reader."""'
    for name in (
        "gen_ops.py",
        "x_pb2.py",
        "x_test.py",
        "_api/a.py",
        "tests/a.py",
        "distutils/a.py",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(hidden)
    (folder / "made.py").write_text(f"# Machine generated, do not edit.\n{hidden}")
    (folder / "broken.py").write_text(f"{hidden}\ndef def")
    (folder / "bytes.py").write_bytes(b'"""Not all that is in a file is \xff UTF-8."""')
    for number in range(100):
        (folder / f"m{number}.py").write_text(f'"""This is the docstring of module {number}."""')
    return folder


def test_prose_is_extracted(tmp_path):
    root = make_package(tmp_path / "package")
    labelled = installed_docs.extract_prose({"package": root})
    splits = {split: [line for line, _ in found] for split, found in labelled.items()}
    split = splits[split_of("package/__init__.py")]
    assert [line for line in split if "docstring of module" not in line][: len(PROSE)] == PROSE
    lines = sum(splits.values(), [])
    assert len(lines) == len(set(lines)) == len(PROSE) + 101
    assert not any("must not be seen" in line for line in lines)
    assert all(splits.values()) and len(splits["train"]) > 80
    assert labelled == installed_docs.extract_prose({"package": root})


def test_the_same_paragraph_is_kept_once_and_counts_for_the_first_package(tmp_path):
    roots = {name: make_package(tmp_path / name) for name in ("one", "two")}
    one = installed_docs.extract_prose({"one": roots["one"]})
    assert installed_docs.extract_prose(roots) == one
    assert {package for found in one.values() for _, package in found} == {"one"}


def test_each_paragraph_has_its_package_and_each_module_its_split(tmp_path):
    roots = {name: tmp_path / name for name in ("one", "two")}
    for name, root in roots.items():
        root.mkdir()
        for number in range(60):
            text = f"This is the first sentence of {name} {number}."
            (root / f"m{number}.py").write_text(f'"""{text}\n\n{text.replace("first", "last")}"""')
    seen = []
    for split, found in installed_docs.extract_prose(roots).items():
        for paragraph, package in found:
            name, number = paragraph.rstrip(".").split()[-2:]
            assert name == package
            assert split == split_of(f"{package}/m{number}.py")
            seen.append(paragraph)
    assert len(set(seen)) == len(seen) == 240


@pytest.mark.parametrize(
    "docstring",
    [
        "Returns it.",
        "x = the_value_of(that) if this is not in the list.",
        ".. code-block:: python\n\n    the code that is in this block is not prose.",
        "-----------------------------\n=============================",
        "one   two   three   four\nthe   end   of   it.",
        "tf.add tf.sub tf.mul tf.div tf.abs tf.neg tf.exp.",
    ],
)
def test_what_is_no_prose(docstring):
    assert list(installed_docs.prose(docstring)) == []


def test_the_result_is_cached(tmp_path, monkeypatch):
    roots = {name: make_package(tmp_path / name) for name in installed_docs.PACKAGES}

    def packages(version):
        modules = {
            package: types.SimpleNamespace(__file__=str(root / "__init__.py"), __version__=version)
            for package, root in roots.items()
        }
        monkeypatch.setattr(installed_docs.importlib, "import_module", modules.__getitem__)

    packages("1")
    cache_dir = tmp_path / "cache"
    first = installed_docs.load_labelled_docs(cache_dir)
    assert first == installed_docs.extract_prose(roots)

    monkeypatch.setattr(installed_docs, "extract_prose", None)  # would raise if called
    assert installed_docs.load_labelled_docs(cache_dir) == first
    packages("2")
    with pytest.raises(TypeError):
        installed_docs.load_labelled_docs(cache_dir)


def test_modules_that_several_processes_read(tmp_path, monkeypatch):
    for number in range(5):
        text = f"Tells in a sentence that the module has the number {number}."
        docstring = f"{text}\n\nAnd it is in a second one, too, é."
        (tmp_path / f"{number}.py").write_text(f'"""{docstring}"""')
    (tmp_path / "5.py").write_text("not a module of Python")
    paths = sorted(tmp_path.iterdir())
    alone = installed_docs.read_modules(paths)
    started = []
    run = installed_docs.subprocess.run

    def count(*words, **options):
        started.append(words)
        return run(*words, **options)

    monkeypatch.setattr(installed_docs.subprocess, "run", count)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr(installed_docs, "MODULES_PER_PROCESS", 2)
    assert installed_docs.read_modules(paths) == alone
    assert len(started) == 2
    assert [len(paragraphs) for paragraphs in alone] == [2, 2, 2, 2, 2, 0]
    assert alone[3][0] == "Tells in a sentence that the module has the number 3."
