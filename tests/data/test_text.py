import csv
import gzip
import itertools
import json
import os
import re
import shutil
import tracemalloc
import zipfile

import pytest

from data import installed_docs, prompts, text
from data.errors import DataError
from tests.support.parquet_file import write_parquet

SPLITS = {
    "train": [" = Robert Boulter = ", " Robert <unk> is an English actor . ", " He had a role . "],
    "valid": [" = Homarus gammarus = "],
    "test": [" Du Fu was a prominent poet . ", " née "],
}


def content(lines):
    return ("\n".join(["", *lines[:1], "  ", *lines[1:]]) + "\n").encode()


def make_wikitext_zip(path, folder="wikitext-2/", kind="tokens"):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for split, lines in SPLITS.items():
            archive.writestr(f"{folder}wiki.{split}.{kind}", content(lines))


@pytest.fixture
def fake_docs(monkeypatch):
    splits = {split: [(f"{split} docs", "numpy")] for split in text.SPLITS}
    monkeypatch.setattr(installed_docs, "load_labelled_docs", lambda cache_dir: splits)
    return {split: [f"{split} docs"] for split in text.SPLITS}


def lines_of(loaded):
    """The lines of each split, read twice."""
    found = {split: list(lines) for split, lines in loaded.splits.items()}
    assert found == {split: list(lines) for split, lines in loaded.splits.items()}
    return found


def error_of(dataset, tmp_path):
    with pytest.raises(DataError) as error:
        lines_of(text.load_text(str(dataset), tmp_path / "cache"))
    assert "\n" not in str(error.value)
    return str(error.value)


# Downloads.


@pytest.fixture
def fetched(monkeypatch, tmp_path):
    """The requested files; the only mirror has `a.zip`, if it exists."""
    calls = []

    def fetch(urls, sha256, target, what):
        calls.append((urls, sha256))
        if not (tmp_path / "a.zip").exists():
            raise DataError(f"{what}: no network")
        target.parent.mkdir(exist_ok=True)
        shutil.copy(tmp_path / "a.zip", target)

    monkeypatch.setattr(text.download, "fetch", fetch)
    return calls


@pytest.mark.parametrize("name", text.WIKITEXT)
def test_wikitext_by_name_is_used_or_refused(name, fetched, tmp_path, fake_docs):
    with pytest.raises(DataError, match=f"{name}: no network"):
        text.load_text(name, tmp_path / "cache")
    make_wikitext_zip(tmp_path / "a.zip", kind="raw" if "raw" in name else "tokens")
    loaded = text.load_text(name, tmp_path / "cache")
    assert lines_of(loaded) == SPLITS
    assert loaded.name == name and loaded.english_wikitext and loaded.note is None
    mirrors, sha256 = text.WIKITEXT[name]
    urls = [f"{mirror}{name}-v1.zip" for mirror in mirrors]
    assert fetched == [(urls, sha256)] * 2 and len(urls) > 1 and len(sha256) == 64


def test_auto_takes_wikitext_where_a_mirror_answers(fetched, tmp_path, fake_docs):
    loaded = text.load_text("auto", tmp_path / "cache")
    assert loaded.name == "installed-docs" and loaded.splits == fake_docs
    assert not loaded.english_wikitext
    expected = "wikitext-2: no network; the installed packages' docstrings are used instead"
    assert loaded.note == expected
    make_wikitext_zip(tmp_path / "a.zip")
    loaded = text.load_text("auto", tmp_path / "cache")
    assert loaded.name == "wikitext-2" and loaded.note is None and loaded.english_wikitext


# Paths.


@pytest.mark.parametrize(
    "names",
    [
        ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"),
        ("wiki.train.raw", "wiki.valid.raw.gz", "wiki.test.raw"),
        ("train.txt", "valid.txt", "test.txt"),
        ("contest-train.txt", "contest-validation.txt", "contest-test.txt"),
        ("train.txt", "val.txt", "test.txt"),
        ("a.train.txt", "a.dev.txt", "a.test.txt"),
    ],
)
def test_a_folder(tmp_path, names):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "README").write_text("not text for training")
    (folder / "notes.txt").write_text("neither is this")
    for name, lines in zip(names, SPLITS.values(), strict=True):
        data = content(lines)
        (folder / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    loaded = text.load_text(str(folder), tmp_path / "cache")
    assert lines_of(loaded) == SPLITS and loaded.name == str(folder)
    assert loaded.english_wikitext == ("wiki" in names[0])
    assert loaded.note == "files that are not read: notes.txt"
    assert not (tmp_path / "cache").exists()


def test_archives_and_folders_of_a_mac(tmp_path):
    """Finder adds `._` files, and the folder's name may contain that of a split."""
    path = tmp_path / "wiki-test.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for split, lines in SPLITS.items():
            archive.writestr(f"wiki-test/{split}.txt", content(lines))
            archive.writestr(f"__MACOSX/wiki-test/._{split}.txt", b"\0\5\x16\7")
    assert lines_of(text.load_text(str(path), tmp_path / "cache")) == SPLITS
    folder = tmp_path / "folder"
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder)
    for split in SPLITS:
        shutil.move(folder / f"wiki-test/{split}.txt", folder)
        shutil.move(folder / f"__MACOSX/wiki-test/._{split}.txt", folder)
    assert lines_of(text.load_text(str(folder), tmp_path / "cache")) == SPLITS


@pytest.mark.parametrize("count", [2, 41])
def test_without_a_test_file_the_end_of_training_is_the_test_split(count, tmp_path):
    (tmp_path / "train.txt").write_text("\n\n".join(LINES[:count]))
    (tmp_path / "valid.txt").write_text("\n".join(SPLITS["valid"]))
    loaded = text.load_text(str(tmp_path), tmp_path / "cache")
    cut = {2: 1, 41: 3}[count]
    assert lines_of(loaded) == {
        "train": LINES[: count - cut],
        "valid": SPLITS["valid"],
        "test": LINES[count - cut : count],
    }
    assert loaded.note == (
        f"no test file: the last {cut} of {count} training lines are the test split"
    )
    (tmp_path / "test.txt").write_text("one line")
    loaded = text.load_text(str(tmp_path), tmp_path / "cache")
    assert lines_of(loaded)["train"] == LINES[:count] and loaded.note is None


def test_a_single_training_line_cannot_be_cut(tmp_path):
    for name in ("train.txt", "valid.txt"):
        (tmp_path / name).write_text("one line")
    assert "no line of text for the train split" in error_of(tmp_path, tmp_path)


def test_a_wikitext_zip(tmp_path):
    path = tmp_path / "some.zip"
    make_wikitext_zip(path, "wikitext-2-raw/", "raw")
    loaded = text.load_text(str(path), tmp_path / "cache")
    assert lines_of(loaded) == SPLITS and loaded.english_wikitext
    content = bytearray(path.read_bytes())
    content[70] ^= 255
    path.write_bytes(content)
    assert "damaged archive" in error_of(path, tmp_path)


LINES = [f"Line number {number} of the text." for number in range(2000)]


@pytest.mark.parametrize("name", ["my.txt", "my.txt.gz", "MY.TXT.GZ"])
def test_one_file_is_split_by_a_stable_hash(tmp_path, name):
    data = ("\ufeff" + "\r\n\r\n".join(LINES)).encode()
    is_packed = name.lower().endswith(".gz")
    (tmp_path / name).write_bytes(gzip.compress(data) if is_packed else data)
    loaded = text.load_text(str(tmp_path / name), tmp_path / "cache")
    found = lines_of(loaded)
    assert sorted(itertools.chain(*found.values())) == sorted(LINES)
    assert [len(lines) for lines in found.values()] == [1780, 130, 90]
    assert found["valid"][0] == "Line number 4 of the text."
    assert not loaded.english_wikitext


def test_lines_that_follow_one_another_are_split_in_parts(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(LINES))
    loaded = text.load_text(str(tmp_path / "a.txt"), tmp_path / "cache", contiguous=True)
    found = lines_of(loaded)
    assert list(itertools.chain(*found.values())) == LINES
    assert [len(lines) for lines in found.values()] == [1800, 100, 100]


@pytest.mark.parametrize("count", [1, 2])
def test_one_or_two_lines_cannot_be_split_in_parts(count, tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(LINES[:count]))
    with pytest.raises(DataError, match="no line of text for the train split"):
        text.load_text(str(tmp_path / "a.txt"), tmp_path / "cache", contiguous=True)


def test_tables_and_json_in_an_archive_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for split in ("train", "valid", "test"):
            archive.writestr(f"{split}.jsonl", '{"text": "a"}\n')
    with pytest.raises(DataError, match="a zip archive may contain text only; unpack other files"):
        text.load_text(str(tmp_path / "a.zip"), tmp_path / "cache")


def test_a_glob_has_the_split_of_one_file(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(LINES))
    (tmp_path / "part-1.txt").write_text("\n".join(LINES[:1000]))
    (tmp_path / "part-2.txt").write_text("\n".join(LINES[1000:]))
    names = ("a.txt", "part-*.txt")
    one, several = (text.load_text(str(tmp_path / name), tmp_path / "cache") for name in names)
    assert lines_of(several) == lines_of(one) and several.sha256 == one.sha256


def test_the_texts_of_json_and_tables_are_lines(tmp_path):
    texts = ["One line.", "Two lines,\nof one text.", 'With "quotes", and tabs\tand é'] + [
        f"Line {n}" for n in range(100)
    ]
    (tmp_path / "plain.txt").write_text("\n".join(texts))
    rows = [{"text": each, "meta": 1} for each in texts]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    with gzip.open(tmp_path / "a.csv.gz", "wt", newline="") as file:
        writer = csv.DictWriter(file, ["meta", "text"])
        writer.writeheader()
        writer.writerows(rows)
    write_parquet(tmp_path / "a.parquet", rows)
    plain = text.load_text(str(tmp_path / "plain.txt"), tmp_path)
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("a.jsonl", "a.json", "a.csv.gz", "a.parquet"):
        assert prompts.find_files(str(tmp_path / name)) == {}
        found = text.load_text(str(tmp_path / name), tmp_path)
        assert found.sha256 == plain.sha256
        for split in ("train", "valid"):
            (folder / name.replace("a", split, 1)).write_bytes((tmp_path / name).read_bytes())
        assert prompts.find_files(str(folder)) == {}
        assert list(text.load_text(str(folder), tmp_path).splits["valid"]) == "\n".join(
            texts
        ).split("\n")
        for path in folder.iterdir():
            path.unlink()
    parts = str(tmp_path / "a.json*")
    assert (
        prompts.find_files(parts) == {}
        and len(list(text.load_text(parts, tmp_path).splits["train"])) > 150
    )


@pytest.mark.parametrize("ending", ["txt", "jsonl", "parquet"])
def test_the_shards_of_a_split_are_one_file(tmp_path, ending):
    def write(name, *numbers):
        lines = [f"line {n}" for n in numbers]
        if ending == "parquet":
            write_parquet(tmp_path / name, [{"text": line} for line in lines])
        elif ending == "jsonl":
            (tmp_path / name).write_text("".join(f'{{"text": "{line}"}}\n' for line in lines))
        else:
            (tmp_path / name).write_text("\n".join(lines))

    names = [f"train-{n:05}-of-00003.{ending}" for n in range(3)]
    for number, name in enumerate(names):
        write(name, 2 * number, 2 * number + 1)
    write(f"validation-00000-of-00001-a09b74b3ef9c3b56.{ending}", 6)
    write(f"test.{ending}", 7)
    loaded = text.load_text(str(tmp_path), tmp_path / "cache")
    assert [list(lines) for lines in loaded.splits.values()] == [
        [f"line {n}" for n in range(6)],
        ["line 6"],
        ["line 7"],
    ]
    (tmp_path / names[1]).unlink()
    assert error_of(str(tmp_path), tmp_path) == f"{tmp_path}: lacks the shard {names[1]}"


@pytest.mark.parametrize("contiguous", [False, True])
def test_a_column_of_another_name(tmp_path, contiguous):
    """In one file and in a folder whose test split is cut; other columns are not read."""
    texts = [f"Line {n}" for n in range(100)]
    (tmp_path / "a.txt").write_text("\n".join(texts))
    plain = text.load_text(str(tmp_path / "a.txt"), tmp_path, contiguous=contiguous)
    folder = tmp_path / "folder"
    folder.mkdir()
    named = dict(text_column="review", contiguous=contiguous)
    for ending in ("csv", "jsonl"):
        rows = [{"text": "other", "review": each} for each in texts]
        lines = [json.dumps(row) for row in rows]
        if ending == "csv":
            lines = ["text,review", *(f"other,{each}" for each in texts)]
        for path in (tmp_path / "a", folder / "train", folder / "valid"):
            path.with_suffix(f".{ending}").write_text("\n".join(lines))
        found = text.load_text(str(tmp_path / f"a.{ending}"), tmp_path, **named)
        assert found.sha256 == plain.sha256 and found.note is None
        splits = text.load_text(str(folder), tmp_path, **named).splits
        assert list(splits["train"]) + list(splits["test"]) == texts == list(splits["valid"])
        for path in folder.iterdir():
            path.unlink()
    # Where there are no columns the name is not silently ignored.
    found = text.load_text(str(tmp_path / "a.txt"), tmp_path, **named)
    assert found.sha256 == plain.sha256 and "--text-column review" in found.note


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            '{"text": "a"}\n{"body": "b"}',
            "line 2: expected a text in .* text; found body",
        ),
        ("a.jsonl", '{"text": "a"}\n7', "line 2: expected a text in the field text; found int"),
        ("a.jsonl", '{"text": ["a"]}', r'line 1: expected a .*; its value is \["a"\]'),
        ("a.jsonl", '{"text": "a"}\n{', "line 2: not JSON, one object per line"),
        ("a.jsonl", '{"text": "a\\ud800"}', "line 1: not UTF-8 text"),
        (
            "reviews.csv",
            "sentence,label\na,1",
            "line 1: no column text.*; --text-column names another",
        ),
    ],
)
def test_what_lacks_a_text_is_named(name, content, message, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=f"{name}, {message}"):
        list(text.load_text(str(tmp_path / name), tmp_path).splits["train"])


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "csv"])
def test_rows_without_a_text_are_skipped(ending, tmp_path):
    texts = [*LINES[:40], None, *LINES[40:80], None]
    path = tmp_path / f"a.{ending}"
    if ending == "parquet":
        write_parquet(path, [{"text": each} for each in texts])
    elif ending == "jsonl":
        path.write_text("\n".join(json.dumps({"text": each}) for each in texts))
    else:
        path.write_text("\n".join(["text,n", *(f"{each or ''},1" for each in texts)]))
    found = lines_of(text.load_text(str(path), tmp_path))
    assert sorted(itertools.chain(*found.values())) == sorted(LINES[:80])


@pytest.mark.parametrize("raw", [b"PK\3\4\x14\0ab", b"PK\3\4\n\xff", b"PK\3\4\nabc\0"])
def test_a_packed_file_is_told_what_it_is(raw, tmp_path):
    (tmp_path / "a.txt").write_bytes(raw)
    message = error_of(tmp_path / "a.txt", tmp_path)
    assert "not UTF-8 text; it is a zip archive, or a file of Excel: unpack it" in message


def test_a_workbook_is_told_what_it_is(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.xlsx", "w") as archive:
        archive.writestr("[Content_Types].xml", "")
    assert "a file of Excel or Word: save it as CSV" in error_of(tmp_path / "a.xlsx", tmp_path)


def test_a_clone_of_a_dataset_is_told_its_folder(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.txt").touch()
    assert f"; pass {tmp_path / 'data'}, which has" in error_of(tmp_path, tmp_path)


def test_a_fingerprint_shows_its_progress(monkeypatch):
    shown = []
    monkeypatch.setattr(text, "live_line", lambda lines, what: shown.append(what) or lines)
    assert len(text.Text("any", SPLITS).sha256) == 64
    assert shown == ["reading train", "reading valid", "reading test"]


def test_text_sha256_sees_every_change():
    def sha256(**changed):
        return text.Text("any", {**SPLITS, **changed}, False).sha256

    digests = {
        sha256(),
        sha256(train=SPLITS["train"] + ["more"]),
        sha256(train=SPLITS["train"][::-1]),
        sha256(valid=SPLITS["test"], test=SPLITS["valid"]),
        sha256(valid=[], test=SPLITS["valid"] + SPLITS["test"]),
    }
    assert len(digests) == 5
    assert sha256() == sha256(), "and nothing else"


# Errors.


def test_an_unknown_name_or_missing_path(tmp_path):
    for dataset in ("wikitext-3", str(tmp_path / "missing"), str(tmp_path / "*.txt")):
        message = error_of(dataset, tmp_path)
        assert repr(dataset) in message
        assert "wikitext-103-raw" in message and "installed-docs" in message


def test_too_little_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one line\n \n\t\n")
    expected = f"{tmp_path / 'a.txt'}: no line of text for the "
    assert expected in error_of(tmp_path / "a.txt", tmp_path)


@pytest.mark.parametrize("bad", [b"na\xefve", b"a\0b"])
def test_what_is_not_text_names_its_file_and_line(tmp_path, bad):
    (tmp_path / "a.txt").write_bytes(b"good\n\n" + bad)
    assert f"{tmp_path / 'a.txt'}, line 3: not UTF-8 text" in error_of(tmp_path / "a.txt", tmp_path)


def test_a_damaged_gzip_file(tmp_path):
    compressed = gzip.compress(os.urandom(5000).hex().encode())
    (tmp_path / "a.txt.gz").write_bytes(compressed[:2000])
    assert "a.txt.gz: damaged archive" in error_of(tmp_path / "a.txt.gz", tmp_path)


@pytest.mark.parametrize(
    ("names", "several"),
    [
        (("a-train.txt", "b-train.txt", "valid.txt", "test.txt"), "train"),
        (("train.txt", "valid.txt", "a-test.txt", "b-test.txt"), "test"),
        (("train.txt", "val.txt", "valid.txt", "test.txt"), "valid"),
        (("train.txt", "dev.txt", "val.txt", "test.txt"), "valid"),
    ],
)
def test_a_folder_with_several_files_of_a_split(names, several, tmp_path):
    for name in names:
        (tmp_path / name).write_text("text")
    message = error_of(tmp_path, tmp_path)
    assert f"{tmp_path}: several {several} files, " in message and "expected one" in message


def test_a_folder_without_training_text(tmp_path):
    for name in ("valid.txt", "test.txt", "notes.txt"):
        (tmp_path / name).write_text("text")
    message = error_of(tmp_path, tmp_path)
    assert "found notes.txt, test.txt, valid.txt; expected one train, and perhaps" in message


@pytest.mark.parametrize("names", [(), ("test.txt",), ("test.txt", "values.txt", "device.txt")])
def test_without_a_validation_file_the_end_of_training_validates(names, tmp_path):
    (tmp_path / "train.txt").write_text("\n".join(LINES[:100]))
    for name in names:
        (tmp_path / name).write_text("one line")
    loaded = text.load_text(str(tmp_path), tmp_path / "cache")
    found = lines_of(loaded)
    if names:
        assert found == {"train": LINES[:95], "valid": LINES[95:100], "test": ["one line"]}
        assert loaded.note.startswith(
            "no validation file: the last 5 of 100 training lines are the validation split"
        )
    else:
        assert found == {"train": LINES[:90], "valid": LINES[90:95], "test": LINES[95:100]}
        assert loaded.note == (
            "no test file: the last 5 of 100 training lines are the test split; no validation "
            "file: the 5 lines before them are the validation split"
        )


def test_a_name_with_the_words_of_two_splits_is_that_of_the_first(tmp_path):
    (tmp_path / "test_train.txt").write_text("one line")
    (tmp_path / "train.txt").write_text("\n".join(LINES[:100]))
    found = lines_of(text.load_text(str(tmp_path), tmp_path / "cache"))
    assert found["test"] == ["one line"] and len(found["train"]) == 95


@pytest.mark.parametrize("count", [3, 20])
def test_few_lines_are_in_every_split(count, tmp_path):
    """A hash alone leaves a split of a small file empty."""
    (tmp_path / "a.txt").write_text("\n".join([*LINES[:count], f"  {LINES[0]}"]))
    found = lines_of(text.load_text(str(tmp_path / "a.txt"), tmp_path / "cache"))
    assert {len(found["valid"]), len(found["test"])} <= {1, 2, 3}
    assert sorted(itertools.chain(*found.values())) == sorted([*LINES[:count], f"  {LINES[0]}"])
    assert sum({LINES[0], f"  {LINES[0]}"} <= set(lines) for lines in found.values()) == 1


@pytest.mark.long
def test_lines_are_not_held_in_memory(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(LINES[:100] * 250))  # 0.7 MB
    loaded = text.load_text(str(tmp_path / "a.txt"), tmp_path / "cache")
    tracemalloc.start()
    count = sum(1 for lines in loaded.splits.values() for _ in lines)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 25_000 and peak < 300_000


def test_a_line_and_its_indented_copy_are_in_one_split(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n".join(f"line {n}\n  line  {n}" for n in range(300)))
    splits = text.load_text(str(path), tmp_path).splits
    seen = [{" ".join(line.split()) for line in lines} for lines in splits.values()]
    assert len(set.union(*seen)) == sum(map(len, seen)) == 300


LONG = "A line of text of more than eight words, number {}."


def write_splits(folder, **lines):
    for split, texts in lines.items():
        (folder / f"{split}.txt").write_text("\n".join(texts))
    return str(folder)


def test_lines_that_are_in_training_are_noted(tmp_path):
    train = [LONG.format(n) for n in range(300)]
    other = [LONG.format(n) for n in range(300, 600)]
    same = [f"  {line.replace('of text', 'of  text')}" for line in train[:5]]
    # Short lines, as headings are, do not count.
    folder = write_splits(
        tmp_path, train=["A heading", *train], valid=train[:7], test=[*other, *same]
    )
    end = "lines of more than 8 words are training lines too (spaces ignored)"
    assert text.load_text(folder, tmp_path).repeated_notes() == [
        f"7 of 7 validation {end}",
        f"5 of 305 test {end}",
    ]
    few = ["A heading"] * 300 + other + same[:2]
    write_splits(tmp_path, valid=few, test=few)
    assert text.load_text(folder, tmp_path).repeated_notes() == []
    (tmp_path / "one.txt").write_text("\n".join(train * 2))
    assert text.load_text(str(tmp_path / "one.txt"), tmp_path).repeated_notes() == []


def test_a_fingerprint_and_the_repeated_lines_take_one_reading(tmp_path):
    class Counted(list):
        readings = 0

        def __iter__(self):
            Counted.readings += 1
            return super().__iter__()

    splits = {"train": Counted([LONG]), "valid": [LONG], "test": [LONG]}
    loaded = text.Text("a text", splits)
    assert len(loaded.sha256) == 64 and "1 of 1 test lines" in loaded.repeated_notes()[-1]
    assert Counted.readings == 1


@pytest.mark.parametrize(
    ("encoding", "said"),
    [
        ("utf-16", "line 1: not UTF-8 text; it is UTF-16: .*iconv -f UTF-16 -t UTF-8"),
        ("utf-16-be", "line 1: not UTF-8 text; it is UTF-16: .*iconv -f UTF-16 -t UTF-8"),
        ("latin1", "line 2: not UTF-8 text; convert it, .*iconv -f LATIN1 -t UTF-8"),
    ],
)
def test_another_encoding_is_named(tmp_path, encoding, said):
    content = "\ufeff" if encoding == "utf-16-be" else ""
    (tmp_path / "a.txt").write_bytes((content + "a line\na caf\xe9\n").encode(encoding))
    assert re.search(said, error_of(tmp_path / "a.txt", tmp_path))


def test_packed_text_in_an_archive(tmp_path):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for split, lines in SPLITS.items():
            archive.writestr(f"{split}.txt.gz", gzip.compress(content(lines)))
    assert lines_of(text.load_text(str(path), tmp_path / "cache")) == SPLITS
    with zipfile.ZipFile(path, "w") as archive:
        for split, lines in SPLITS.items():
            archive.writestr(f"{split}.txt.gz", content(lines))
    assert "damaged archive (Not a gzipped file" in error_of(path, tmp_path)


def test_parquet_without_the_column_names_those_that_it_has(tmp_path):
    write_parquet(tmp_path / "a.parquet", [{"id": 1, "body": "a text"}])
    assert "expected a text in the field text; found id, body;" in error_of(
        tmp_path / "a.parquet", tmp_path
    )


def test_each_line_is_hashed_once(tmp_path, monkeypatch):
    """A text is read a dozen times before training begins."""
    (tmp_path / "a.txt").write_text("\n".join([*LINES, "", "  "]))
    hashed, stock = [], text.split_of
    monkeypatch.setattr(text, "split_of", lambda line: hashed.append(line) or stock(line))
    loaded = text.load_text(str(tmp_path / "a.txt"), tmp_path / "cache")
    hashed.clear()  # those of the first lines, to see that no split is empty
    found = lines_of(loaded)
    loaded.repeated_notes()
    assert hashed == LINES
    assert found == {split: [line for line in LINES if stock(line) == split] for split in SPLITS}


def test_a_pass_that_ends_early_draws_no_splits(tmp_path):
    draw = text.Draw(lambda line: "train" if line < "c" else "test")
    assert next(draw.of_split("abcd", "train")) == "a"
    assert list(draw.of_split("abcd", "test")) == ["c", "d"]
    assert list(draw.of_split("abcd", "train")) == ["a", "b"]
    assert not list(draw.of_split("abcd", "valid"))
