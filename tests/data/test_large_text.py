import contextlib
import errno
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from data import large_text, pieces, text, word_parts, word_pieces, workers
from data.errors import DataError
from tests.data.test_word_pieces import LINES, make_tokenizer

ROOT = Path(__file__).resolve().parents[2]
NASTY = [
    *LINES,
    "the," * 250_000,  # a megabyte of short words without white space
    "abcdefgh" * 300 + " " + "x" * 101,
    "\u200b \u00ad\t<unk>\u3000of\x1fthe\x85<unk><unk>",
    "東京" * 700 + " カタカナ",
    "e\u0301 \u0301 \u202e the\u2028of \U0001d11e",
    "<unk>",
    "\x01\x02",
    "[MASK] ##the",
] * 2

# Tokenises a file, with a tokenizer that needs no TensorFlow, and ends as it is told.
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
from data import large_text, text, workers
from data.words import Pieces

large_text.BLOCK_BYTES = 200
path, folder, what = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
lines = text._read_files([Path(path)], lambda line: "train")["train"]
run_jobs, made = workers.run_jobs, []

def counted(module, jobs, done, at_most):
    def note(answer):
        done(answer)
        made.append(answer)
        if len(made) == 4 and what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if len(made) == 4 and what == "asked":
            print("asked", flush=True)
            time.sleep(60)
    run_jobs(module, jobs, note, at_most)

def stop(number, frame):
    raise KeyboardInterrupt

def pieces_of(words):
    return Pieces(np.array([len(w) for w in words], np.int32), np.ones(len(words), np.int32))

signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)  # also where the shell lets it be ignored
workers.run_jobs = counted
files = folder / "ids.npy", folder / "offsets.npy"
large_text.tokenize_to_files(lines, True, pieces_of, folder / "parts", *files, "x")
print(len(made))
"""


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(word_pieces.learn_vocabulary(LINES, 150))


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(large_text, "LARGE_BYTES", 0)
    monkeypatch.setattr(large_text, "BLOCK_BYTES", 200)
    monkeypatch.setattr(pieces, "MANY_WORDS", 0)


@pytest.fixture
def made(monkeypatch):
    """The parts that processes made, of all calls."""
    found = []
    run_jobs = workers.run_jobs

    def counted(module, jobs, done, at_most):
        jobs = list(jobs)
        found.extend(f"{path.parent.name}/{path.name}" for *_, path in jobs)
        run_jobs(module, jobs, done, at_most)

    monkeypatch.setattr(workers, "run_jobs", counted)
    return found


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text("\n".join(f"{word} and a word {word} " * 3 for word in range(60)))
    return path


def script(corpus, folder, what=""):
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(corpus), str(folder), what],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(corpus, folder):
    """How many parts a call makes that is left alone."""
    process = script(corpus, folder)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return int(out)


def parts_in(folder):
    return sorted(folder.glob("parts/[0-9]*.npz"))


@pytest.fixture
def alive(tmp_path, monkeypatch):
    """Gives the processes that this test has started and that make parts."""
    monkeypatch.setenv("STARTED_BY", str(tmp_path))

    def ask():
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if b"data.word_parts" in (path / "cmdline").read_bytes():
                    started_by = f"STARTED_BY={tmp_path}".encode()
                    found += [path.name] * (started_by in (path / "environ").read_bytes())
        return found

    return ask


def soon(condition, seconds=20):
    """Whether it becomes true."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def from_files(folder, content):
    folder.mkdir()
    for split, some in content.items():
        (folder / f"{split}.txt").write_text("\n".join(some), newline="")
    return text.load_text(str(folder), folder)


class TestTheSameTokens:
    @pytest.mark.parametrize("drop_short", [False, True])
    @pytest.mark.parametrize("kind", ["files", "lists"])
    def test_as_in_one_piece(self, tokenizer, tmp_path, monkeypatch, made, kind, drop_short):
        content = {"train": NASTY, "valid": LINES, "test": ["the"]}
        content = {
            split: [line for line in some if line.strip()] for split, some in content.items()
        }
        source = text.Text("x", content, False)
        if kind == "files":
            source = from_files(tmp_path / "folder", content)
            assert source.splits == content
        whole = word_pieces.tokenize_once(source, tokenizer, tmp_path / "a", drop_short)
        assert not made
        monkeypatch.setattr(large_text, "LARGE_BYTES", 0)
        monkeypatch.setattr(large_text, "BLOCK_BYTES", 1000)
        monkeypatch.setattr(large_text, "WORDS_AT_ONCE", 7)
        monkeypatch.setattr(pieces, "MANY_WORDS", 0)
        found = word_pieces.tokenize_once(source, tokenizer, tmp_path / "b", drop_short)
        assert len(made) > 5
        for split, arrays in whole.items():
            for name, expected, array in zip(("ids", "offsets"), arrays, found[split], strict=True):
                np.testing.assert_array_equal(array, expected)
                (one,), (other,) = (tmp_path.glob(f"{c}/tokens/*/{split}-{name}.npy") for c in "ab")
                assert one.read_bytes() == other.read_bytes()
        assert [path.name[0] for path in (tmp_path / "b" / "tokens").iterdir()] != ["."]
        assert len(list((tmp_path / "b" / "tokens").iterdir())) == 1, "no parts are left"

    def test_empty_lines_and_none(self, tokenizer, tmp_path, small_parts):
        for number, some in enumerate(([], ["", "  ", "the", ""], [" "])):
            files = tmp_path / "ids.npy", tmp_path / "offsets.npy"
            large_text.tokenize_to_files(
                some,
                True,
                pieces.pieces_by(tokenizer),
                tmp_path / str(number),
                *files,
                "x",
            )
            for file, expected in zip(files, word_pieces.tokenize(some, tokenizer), strict=True):
                np.testing.assert_array_equal(np.load(file), expected)
                assert np.load(file).dtype == expected.dtype

    def test_blocks_hold_all_lines_and_little_more_than_they_may(self, monkeypatch):
        monkeypatch.setattr(large_text, "BLOCK_BYTES", 100)
        for sizes in ([], [1], [99, 99, 99], [1000, 1, 1, 1000], [10] * 95):
            blocks = large_text._blocks(["x" * size for size in sizes])
            assert [n for first, last in blocks for n in range(first, last)] == [*range(len(sizes))]
            assert all(sum(sizes[first + 1 : last]) <= 100 for first, last in blocks)


class TestResumed:
    def test_after_sigkill_the_missing_parts_are_made(self, corpus, tmp_path, alive):
        whole, broken = tmp_path / "whole", tmp_path / "broken"
        whole.mkdir()
        broken.mkdir()
        count = finished(corpus, whole)
        assert count > 12
        process = script(corpus, broken, "killed")
        process.communicate(timeout=120)
        assert process.returncode == -signal.SIGKILL
        assert soon(lambda: not alive()), "they end when their parent has died"
        there = {path: path.stat().st_mtime_ns for path in parts_in(broken)}
        assert 4 <= len(there) < count
        assert finished(corpus, broken) == count - len(there)
        assert all(path.stat().st_mtime_ns == before for path, before in there.items())
        for name in ("ids.npy", "offsets.npy"):
            assert (whole / name).read_bytes() == (broken / name).read_bytes()
        assert finished(corpus, broken) == 0

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_a_signal_ends_all_processes_and_leaves_parts(self, corpus, tmp_path, alive, number):
        process = script(corpus, tmp_path, "asked")
        assert process.stdout.readline() == "asked\n"
        assert alive()
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        assert "KeyboardInterrupt" in err and process.returncode
        assert not alive() and len(parts_in(tmp_path)) >= 4

    @pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "gone"])
    def test_a_damaged_part_is_made_again(self, corpus, tmp_path, damage):
        finished(corpus, tmp_path)
        before = (tmp_path / "ids.npy").read_bytes()
        for path in (parts_in(tmp_path)[5], tmp_path / "parts" / "pieces-000000.npz"):
            content = bytearray(path.read_bytes())
            content[len(content) // 3] ^= 1
            if damage == "gone":
                path.unlink()
            else:
                path.write_bytes({"flipped": content, "cut": content[:-20], "empty": b""}[damage])
        assert finished(corpus, tmp_path) == 1
        assert (tmp_path / "ids.npy").read_bytes() == before

    def test_every_flipped_bit_is_seen(self, tmp_path):
        path = tmp_path / "part.npz"
        word_parts.make_part((["a line of a part"], True, path))
        content = path.read_bytes()
        for place in range(len(content)):
            flipped = bytearray(content)
            flipped[place] ^= 1 << place % 8
            path.write_bytes(flipped)
            assert word_parts.load_part(path) is None, place

    def test_parts_of_another_size_are_not_taken(self, corpus, tmp_path):
        count = finished(corpus, tmp_path)
        note = tmp_path / "parts" / "made-from.json"
        note.write_text(json.dumps(json.loads(note.read_text()) | {"block_bytes": 100}))
        assert finished(corpus, tmp_path) == count

    def test_tokenize_once_takes_what_is_there(
        self, tokenizer, tmp_path, small_parts, made, monkeypatch
    ):
        content = {split: [f"{split} {n} the of" * 5 for n in range(40)] for split in text.SPLITS}
        source = from_files(tmp_path / "folder", content)

        def stop(*args):
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(large_text, "_make_pieces", stop)
            with pytest.raises(KeyboardInterrupt):
                word_pieces.tokenize_once(source, tokenizer, tmp_path)
        assert len(made) > 10
        found = word_pieces.tokenize_once(source, tokenizer, tmp_path)
        assert len(made) == len(set(made)), "no part twice"
        assert {path.split("/")[0] for path in made} == set(text.SPLITS)
        np.testing.assert_array_equal(
            found["train"][0], word_pieces.tokenize(content["train"], tokenizer)[0]
        )


class TestErrors:
    def call(self, some, folder):
        large_text.tokenize_to_files(
            some, True, None, folder / "parts", folder / "ids.npy", folder / "offsets.npy", "x"
        )

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
    def test_a_process_that_ends_is_named(
        self, corpus, tmp_path, alive, small_parts, monkeypatch, number
    ):
        start = workers._Worker.__init__

        def doomed(worker, module):
            start(worker, module)
            threading.Timer(0.01, worker.process.send_signal, [number]).start()

        monkeypatch.setattr(workers._Worker, "__init__", doomed)
        found = text._read_files([corpus], lambda line: "train")["train"]
        with pytest.raises(RuntimeError, match=f"data.word_parts ended with status -{number:d}"):
            self.call(found, tmp_path)
        assert not alive()

    def test_what_it_says_before_its_end_is_shown(self, tmp_path):
        jobs = [([1, 2], True, tmp_path / "x")]  # no lines
        with pytest.raises(RuntimeError, match="status 1: (?s:.*)AttributeError.*no attribute"):
            workers.run_jobs("data.word_parts", jobs, print, at_most=1)

    def test_a_file_that_is_cut_meanwhile(self, corpus, tmp_path, alive, small_parts):
        found = text._read_files([corpus], lambda line: "train")["train"]
        os.truncate(corpus, 1000)
        with pytest.raises(DataError, match="corpus.txt: was changed while it was in use"):
            self.call(found, tmp_path)
        assert not alive()

    def test_what_the_system_refuses_keeps_its_number(self, tmp_path):
        """`cache.build_once` tells by it what a person can repair, such as a full disk."""
        jobs = [(["a line"], True, tmp_path / "no folder" / "x")]
        with pytest.raises(FileNotFoundError) as caught:
            workers.run_jobs("data.word_parts", jobs, print, at_most=1)
        assert caught.value.errno == errno.ENOENT


class TestWorkers:
    def test_import_next_to_nothing(self, corpus, tmp_path):
        found = text._read_files([corpus], lambda line: "train")["train"]
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-m", "data.word_parts"],
            input=pickle.dumps((found, True, tmp_path / "part")),
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            timeout=60,
        )
        assert pickle.loads(done.stdout) == len(found)
        names = {line.split("|")[-1].strip() for line in done.stderr.decode().splitlines()}
        ours = {name for name in names if name.startswith("data.")}
        assert ours == {f"data.{name}" for name in ("errors", "lines", "words", "workers")}
        heavy = ("tensorflow", "keras", "keras_nlp", "tokenizers", "tqdm", "requests", "recipes")
        assert "numpy" in names and not names & set(heavy)

    def test_there_are_as_many_as_cores_and_no_more_than_jobs(self, tmp_path, monkeypatch):
        started = []
        start = workers._Worker.__init__

        def counted(worker, module):
            started.append(worker)
            start(worker, module)

        monkeypatch.setattr(workers._Worker, "__init__", counted)
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2})
        for count, expected in ((0, 0), (1, 1), (9, 3)):
            jobs = [(["a line"], True, tmp_path / str(number)) for number in range(count)]
            answers = []
            workers.run_jobs("data.word_parts", jobs, answers.append, at_most=count)
            assert answers == [1] * count and len(started) == expected
            assert all(worker.process.returncode is not None for worker in started)
            started.clear()

    def test_what_lies_in_the_current_folder_is_not_imported(self, tmp_path, monkeypatch):
        (tmp_path / "data").mkdir()
        for name in ("data/__init__.py", "queue.py"):
            (tmp_path / name).write_text("raise SystemExit('not this one')")
        monkeypatch.chdir(tmp_path)
        workers.run_jobs("data.word_parts", [(["a"], True, tmp_path / "x")], print, at_most=1)
