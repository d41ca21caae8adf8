"""Tests the pairs of signatures and summaries."""

import textwrap

import pytest

from data import summaries


@pytest.mark.parametrize(
    "docstring, sentence",
    [
        ("Returns the mean of x. It is fast.", "Returns the mean of x."),
        ("Returns the `mean`\n    of x.\n\nMore.", "Returns the mean of x."),
        ("Computes i.e. 3.5 values of x.", "Computes i.e. 3.5 values of x."),
        ("Returns the mean of x", None),  # no end
        ("See below.", None),  # two words
        ("Returns " + "a " * 30 + "list.", None),
        ("", None),
    ],
)
def test_the_first_sentence(docstring, sentence):
    assert summaries.first_sentence(docstring) == sentence


MODULE = '''
    class Layer(base.Thing):
        """Holds the weights of a layer."""

        def call(self, x: Tensor, *, training: bool = False) -> Tensor:
            """Applies the layer to x."""

            def inner():
                """Is not a function of the module."""

        @classmethod
        def load(cls, path="a" * 30):
            """Loads a layer from a file."""

    async def fetch(a, /, b=(1, 2), *rest, **more):
        """Fetches the next batch of data."""

    def undocumented(x):
        return x
'''


@pytest.fixture
def package(tmp_path):
    def write(name, text):
        path = tmp_path / "package" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    return write


def test_signatures_have_no_annotations_and_short_defaults(package):
    assert list(summaries.summaries(package("a.py", MODULE))) == [
        ("class Layer(base.Thing)", "Holds the weights of a layer."),
        ("Layer.call(x, *, training=False)", "Applies the layer to x."),
        ("Layer.load(path='a' * 30)", "Loads a layer from a file."),
        ("fetch(a, /, b=(1, 2), *rest, **more)", "Fetches the next batch of data."),
    ]


def test_a_long_default_is_left_out(package):
    text = 'def f(a="0123456789 0123456789"):\n    """Returns what a text says."""\n'
    assert list(summaries.summaries(package("a.py", text))) == [
        ("f(a=...)", "Returns what a text says.")
    ]


def test_generated_and_broken_modules_have_none(package):
    generated = '"""This file is MACHINE GENERATED!"""\n' + textwrap.dedent(MODULE)
    assert not list(summaries.summaries(package("a.py", generated)))
    assert not list(summaries.summaries(package("b.py", "def f(:\n")))


def test_no_signature_and_no_sentence_appears_twice_and_a_module_has_one_split(package):
    function = 'def {}(x):\n    """{}"""\n'
    folder = package("a.py", function.format("f", "Returns the mean of x.")).parent
    package("b.py", function.format("g", "Returns  the MEAN of x."))
    package("c.py", function.format("f", "Returns the sum of x."))
    for number in range(60):
        two = (function.format(f"{n}{number}", f"Returns {n} of {number}.") for n in ("h", "k"))
        package(f"m{number}.py", "".join(two))
    splits = summaries.extract_summaries({"package": folder})
    every = [pair for pairs in splits.values() for pair in pairs]
    assert all(splits.values()) and len(every) == 2 * 60 + 1
    for number in range(60):
        holds = [any(f"of {number}." in text for _, text in pairs) for pairs in splits.values()]
        assert sum(holds) == 1
