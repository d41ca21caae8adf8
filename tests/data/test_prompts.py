import csv
import gzip
import json

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from data import prompts, templates
from data.errors import DataError
from data.next_tokens import Ends
from data.text import load_text
from tests.support.chat_presets import make_tokenizer
from tests.support.parquet_file import write_parquet

PAIRS = [("ab", "cd"), ("a", "b"), ("abcdefgh", "xyz"), ("q", "rs")]


class Letters:
    """A tokenizer of single bytes."""

    def __init__(self, ends):
        self.start_token_id, self.end_token_id = ends.start, ends.end

    def __call__(self, texts):
        return [list(text.encode()) for text in texts]


@pytest.mark.parametrize("ends", [Ends(0, 0), Ends(1, 0), Ends(None, 0)])
@pytest.mark.parametrize("together", [True, False])
def test_rows_hold_whole_examples_and_the_loss_is_on_responses(together, ends):
    rows = prompts.make_rows(
        PAIRS, Letters(ends), template="{prompt}>{response}!", length=12, together=together
    )
    inputs, labels, weights = rows.make_batch()(np.arange(len(rows)), 0)
    ids, documents = (np.asarray(inputs[name]) for name in ("token_ids", "padding_mask"))
    labels, weights = np.asarray(labels), np.asarray(weights)
    found = {}
    for row in range(len(rows)):
        for number in range(1, documents[row].max() + 1):
            mine = documents[row] == number
            assert np.all(np.diff(np.flatnonzero(mine)) == 1), "in one piece"
            text = bytes(ids[row][mine].tolist()).strip(b"\0\1").decode()
            found[text] = bytes(labels[row][mine & (weights[row] == 1)].tolist()).decode()
        assert not documents[row].max() > 1 or together
    assert found.pop("ab>cd!") == "cd!\0" and found.pop("a>b!") == "b!\0"
    assert found.pop("q>rs!") == "rs!\0"
    # The long one is cut: 12 predictions, those of its prompt not counted.
    ((text, predicted),) = found.items()
    assert rows.cut == 1 and text.startswith("abcdefgh>xy") and predicted.startswith("xyz")
    assert sum(map(len, rows.labels())) == weights.sum()
    assert (weights[documents == 0] == 0).all()
    if together:
        assert len(rows) < 4


def test_a_prompt_without_room_for_its_response_is_left_out():
    tokenizer = Letters(Ends(0, 0))
    pairs = [("a" * 9, "b"), ("a", "b")]
    rows = prompts.make_rows(
        pairs, tokenizer, template="{prompt}>{response}", length=8, together=True
    )
    assert rows.cut == 1 and [list(label) for label in rows.labels()] == [[ord("b"), 0]]
    with pytest.raises(DataError, match="no prompt is shorter than 8 tokens"):
        prompts.make_rows(
            pairs[:1], tokenizer, template="{prompt}>{response}", length=8, together=True
        )


def test_the_split_without_a_prompt_that_leaves_room_is_named(tmp_path):
    splits = {"train": PAIRS, "valid": PAIRS, "test": [("a" * 99, "b")]}
    settings = dict(template="{prompt}>{response}", length=9, together=True)
    with pytest.raises(DataError, match="^test split: no prompt is shorter than 9 tokens"):
        prompts.rows_once(splits, make_tokenizer("GPT2"), tmp_path, **settings)


def test_rows_come_from_the_cache_as_they_were_made(tmp_path):
    tokenizer = make_tokenizer("GPT2")
    splits = {"train": PAIRS * 9, "valid": PAIRS[1:], "test": PAIRS[::-1]}
    settings = dict(template="{prompt}>{response}", length=9, together=True)
    made = prompts.rows_once(splits, tokenizer, tmp_path, **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(prompts, "make_rows")
        # Another process gives layers other numbers, and special tokens another order.
        cached = prompts.rows_once(splits, make_tokenizer("GPT2"), tmp_path, **settings)
    for split, pairs in splits.items():
        rows = prompts.make_rows(pairs, tokenizer, **settings)
        assert rows.cut and cached[split].cut == made[split].cut == rows.cut
        for name, array in rows.arrays().items():
            np.testing.assert_array_equal(cached[split].arrays()[name], array)
            assert cached[split].arrays()[name].dtype == array.dtype

    def entries():
        return len(list((tmp_path / "sequences").glob("[!.]*")))

    assert entries() == 3
    # Another test split is tokenised alone, all of them with other settings.
    prompts.rows_once(splits | {"test": PAIRS}, tokenizer, tmp_path, **settings)
    assert entries() == 4
    for number, changed in enumerate(
        ({"template": "{prompt}:{response}"}, {"length": 8}, {"together": False}), start=1
    ):
        prompts.rows_once(splits, tokenizer, tmp_path, **settings | changed)
        assert entries() == 4 + 3 * number


def test_tokenising_shows_its_progress(monkeypatch):
    shown = []
    monkeypatch.setattr(prompts, "live_line", lambda pairs, what: shown.append(what) or pairs)
    template = "{prompt}>{response}"
    prompts.make_rows(PAIRS, Letters(Ends(0, 0)), template=template, length=12, together=True)
    assert shown == ["tokenising"]


def test_jsonl_and_csv_hold_the_same(tmp_path):
    pairs = [(f"What is {n}?\n", f'It is "{n}", the number') for n in range(200)]
    lines = [json.dumps({"prompt": p, "response": r, "id": 1}) for p, r in pairs]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n\n")
    with gzip.open(tmp_path / "b.csv.gz", "wt") as file:
        file.write("response,prompt\n")
        file.writelines(
            f'"{r.replace(chr(34), chr(34) * 2)}",What is {n}?\n' for n, (_, r) in enumerate(pairs)
        )
    first = prompts.load_prompts(str(tmp_path / "a.jsonl"))
    assert {s: len(p) for s, p in first.splits.items()}["train"] > 150
    assert sorted(pair for split in first.splits.values() for pair in split) == sorted(pairs)
    second = prompts.load_prompts(str(tmp_path / "b.csv.gz"))
    assert {p for pairs in second.splits.values() for p in pairs} == {
        (p.strip(), r) for p, r in pairs
    }
    assert first.sha256 != second.sha256
    (tmp_path / "a.json").write_text((tmp_path / "a.jsonl").read_text())
    assert prompts.load_prompts(str(tmp_path / "a.json")).splits == first.splits
    (tmp_path / "c.tsv").write_text(
        "prompt\tresponse\n" + "".join(f"{p.strip()}\t{r}\n" for p, r in pairs)
    )
    assert prompts.load_prompts(str(tmp_path / "c.tsv")).splits == second.splits
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("train.jsonl", "dev.jsonl", "test.json"):
        (folder / name).write_text("\n".join(lines[:3]))
    assert prompts.load_prompts(str(folder)).splits["valid"] == pairs[:3]


def test_the_fields_and_files_of_others_hold_the_same(tmp_path):
    """Those of TRL, Alpaca and Dolly, and the messages of a chat."""
    pairs = [(f"Add one.\n\n{n}", f"{n + 1}") for n in range(100)]
    rows = {
        "trl.jsonl": [{"prompt": p, "completion": r} for p, r in pairs],
        "chats.jsonl": [
            {"messages": [{"role": "user", "content": p}, {"role": "assistant", "content": r}]}
            for p, r in pairs
        ],
        "alpaca.json": [
            {"instruction": "Add one.", "input": p.split()[-1], "output": r} for p, r in pairs
        ],
        "dolly.jsonl": [
            {"instruction": "Add one.", "context": p.split()[-1], "response": r} for p, r in pairs
        ],
        "pairs.jsonl": [{"instruction": p, "input": "", "output": r} for p, r in pairs],
    }
    for name, values in rows.items():
        is_list = name.endswith(".json")
        lines = json.dumps(values, indent=1) if is_list else "\n".join(map(json.dumps, values))
        (tmp_path / name).write_text(lines)
    table = "".join(f"Add one.\t{p.split()[-1]}\t{r}\n" for p, r in pairs)
    (tmp_path / "alpaca.tsv").write_text("instruction\tinput\toutput\n" + table)
    (tmp_path / "dolly.tsv").write_text("instruction\tcontext\tresponse\n" + table)
    names = (*rows, "alpaca.tsv", "dolly.tsv")
    found = [prompts.load_prompts(str(tmp_path / name)).splits for name in names]
    assert sorted(pair for split in found[0].values() for pair in split) == sorted(pairs)
    assert all(each == found[0] for each in found)


def test_a_chat_of_several_turns_is_a_prompt_and_the_last_response(tmp_path):
    def message(role, content):
        return {"role": role, "content": content}

    chats = [
        [message("system", "Be brief."), message("user", f"{n}?"), message("assistant", f"{n}!")]
        + [message("user", "And?"), message("assistant", "No.")]
        for n in range(100)
    ]
    lines = [json.dumps({"messages": chat}) for chat in chats]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    splits = prompts.load_prompts(str(tmp_path / "chats.jsonl")).splits
    found = [pair for pairs in splits.values() for pair in pairs]
    turns = (("system", "Be brief."), ("user", "7?"), ("assistant", "7!"), ("user", "And?"))
    assert len(found) == 100 and (turns, "No.") in found
    assert prompts.texts_of((turns, "No.")) == ["Be brief.", "7?", "7!", "And?", "No."]
    # As an input of a query.
    assert prompts.of_input(prompts.as_input(turns)) == turns
    for text in ("And?", "[1, 2]", "[a", '[{"a": 1}]'):
        assert prompts.of_input(text) == text == prompts.as_input(text)
    with pytest.raises(DataError, match="ending with the user; found assistant; leave out the as"):
        prompts.of_input('[{"role": "assistant", "content": "a"}]')
    with pytest.raises(DataError, match="ending with the user; found user, user$"):
        prompts.of_input(json.dumps([{"role": "user", "content": "a"}] * 2))
    assert prompts.of_input('[{"from": "human", "value": "a"}]') == (("user", "a"),)


def write_objects(path, *rows):
    """JSON lines, or a CSV by its name."""
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def all_pairs(loaded):
    return sorted(pair for pairs in loaded.splits.values() for pair in pairs)


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
@pytest.mark.parametrize("names", [("context", "response"), ("input", "output")])
def test_a_passage_beside_a_prompt_follows_it(names, ending, tmp_path):
    about, answer = names
    rows = [{"prompt": "Add one.", about: f"{n}" * (n > 0), answer: "r"} for n in range(100)]
    loaded = prompts.load_prompts(write_objects(tmp_path / f"a.{ending}", *rows))
    expected = ["Add one.", *(f"Add one.\n\n{n}" for n in range(1, 100))]
    assert all_pairs(loaded) == sorted((prompt, "r") for prompt in expected)
    assert loaded.note is None


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_a_system_text_beside_a_prompt_is_the_system_message(ending, tmp_path):
    rows = [
        {"system": "Be brief." * (n % 2), "instruction": f"say {n}", "input": "it", "output": "r"}
        for n in range(100)
    ]
    loaded = prompts.load_prompts(write_objects(tmp_path / f"a.{ending}", *rows))
    found = [prompt for pairs in loaded.splits.values() for prompt, _ in pairs]
    assert "say 0\n\nit" in found
    assert (("system", "Be brief."), ("user", "say 1\n\nit")) in found
    assert len(found) == 100 and loaded.note is None


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_prompts_are_queried_with_the_fields_that_they_are_trained_with(ending, tmp_path):
    rows = [
        {
            "instruction": f"say {n}",
            "input": "it" * (n % 2),
            "context": "of that" * (n % 3 == 0),
            "system": "Be brief." * (n % 5 == 0),
            "output": "r",
        }
        for n in range(60)
    ]
    path = write_objects(tmp_path / f"a.{ending}", *rows)
    found = prompts.read_prompts(path, "instruction", "chatml")
    assert found[1] == "say 1\n\nit" and found[3] == "say 3\n\nit" and found[2] == "say 2"
    trained = [
        prompt for pairs in prompts.load_prompts(path).splits.values() for prompt, _ in pairs
    ]
    assert len(found) == 60 and {prompts.of_input(text) for text in found} == set(trained)
    # Elsewhere a system message is refused in training, and is another field here.
    assert prompts.read_prompts(path, "instruction", "{prompt} {response}")[0] == "say 0\n\nof that"


def test_a_chat_is_queried_as_it_is(tmp_path):
    turns = [{"role": "user", "content": "who?"}]
    rows = [{"prompt": turns, "input": "it"}, {"prompt": "", "input": ""}]
    path = write_objects(tmp_path / "a.jsonl", *rows)
    chat, empty = prompts.read_prompts(path, "prompt", "chatml")
    assert (prompts.of_input(chat), empty) == ((("user", "who?"),), "")
    with pytest.raises(DataError, match="no row with a prompt"):
        prompts.read_prompts(write_objects(tmp_path / "b.jsonl", rows[1]), "prompt", "chatml")


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_fields_that_are_not_read_are_named(ending, tmp_path):
    rows = [
        {"prompt": f"say {n}", "response": "r", "context": "c", "input": "i", "empty": ""}
        | {f"field{number}": f"{n}" for number in range(9)}
        for n in range(200)
    ]
    loaded = prompts.load_prompts(write_objects(tmp_path / f"a.{ending}", *rows))
    assert loaded.note == (
        "fields that are not read: 'context', 'field0', 'field1', 'field2', 'field3', ..."
    )
    assert ("say 7\n\ni", "r") in all_pairs(loaded)


def test_chats_of_other_forms_are_those_of_messages(tmp_path):
    """ShareGPT's turns, and TRL's two lists."""
    roles = {"system": "system", "user": "human", "assistant": "gpt"}
    rows: dict = {"messages": [], "conversations": [], "prompt": []}
    for n in range(40):
        chat = [("system", "Be brief."), ("user", f"say {n}"), ("assistant", str(n))]
        messages = [{"role": role, "content": text} for role, text in chat]
        rows["messages"].append({"messages": messages})
        turns = [{"from": roles[role], "value": text} for role, text in chat]
        rows["conversations"].append({"conversations": turns})
        rows["prompt"].append({"prompt": messages[:2], "completion": messages[2:]})
    found = []
    for name, objects in rows.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n".join(map(json.dumps, objects)))
        found.append(prompts.load_prompts(str(path)).splits)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "train.json"])
def test_columns_may_have_any_names(name, tmp_path):
    rows = [{"Frage": f"say {n}", "Antwort": str(n), "text": "x"} for n in range(60)]
    if name.endswith(".csv"):
        lines = [",".join(rows[0]), *(",".join(row.values()) for row in rows)]
        (tmp_path / name).write_text("\n".join(lines))
    else:
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
    dataset = str(tmp_path if name.startswith("train") else tmp_path / name)
    assert prompts.find_files(dataset) == {}, "a text"
    columns = prompts.Columns.of("Frage", "Antwort")
    splits = prompts.load_prompts(dataset, columns=columns).splits
    found = sorted(pair for pairs in splits.values() for pair in pairs)
    assert found == sorted((f"say {n}", str(n)) for n in range(60))


def test_one_column_is_not_prompt_and_response():
    with pytest.raises(DataError, match="--prompt-column and --response-column q: expected two"):
        prompts.Columns.of("q", "q")


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_a_named_column_is_not_the_other_one_by_its_usual_name(ending, tmp_path):
    rows = [{"prompt": f"say {n}", "answer": f"{n}"} for n in range(60)]
    path = write_objects(tmp_path / f"a.{ending}", *rows)
    for named, missing in ((("answer", None), "response"), ((None, "prompt"), "instruction")):
        with pytest.raises(DataError, match=f"(no column|, and|expected) {missing} or .*, answer'"):
            prompts.load_prompts(path, columns=prompts.Columns.of(*named))


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
@pytest.mark.parametrize(
    "named, expected",
    [
        (("input", "output"), ("of that 7\n\nhere", "seven")),
        (("instruction", "input"), ("say 7\n\nhere", "of that 7")),
        (("instruction", "context"), ("say 7\n\nof that 7", "here")),
        (("system", "output"), ("be brief\n\nof that 7", "seven")),
        (("instruction", "system"), ("say 7\n\nof that 7", "be brief")),
    ],
)
def test_a_named_column_is_no_input_or_system_message(ending, named, expected, tmp_path):
    rows = [
        {"instruction": f"say {n}", "input": f"of that {n}", "context": "here"}
        | {"system": "be brief", "output": "seven"}
        for n in range(300)
    ]
    path, columns = write_objects(tmp_path / f"a.{ending}", *rows), prompts.Columns.of(*named)
    prompt, response = expected
    if "system" not in named:
        prompt = (("system", "be brief"), ("user", prompt))
    assert (prompt, response) in all_pairs(prompts.load_prompts(path, columns=columns))
    # Whoever asks reads the same, and never the response.
    asked = prompts.read_prompts(path, named[0], "chatml", columns)
    assert prompts.of_input(asked[7]) == prompt


def test_named_columns_are_read_beside_messages(tmp_path):
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    rows = [{"messages": turns, "q": f"say {n}", "a": "b"} for n in range(60)]
    path = write_objects(tmp_path / "a.jsonl", *rows)
    loaded = prompts.load_prompts(path, columns=prompts.Columns.of("q", "a"))
    assert ("say 7", "b") in all_pairs(loaded) and "not read: 'messages'" in loaded.note
    with pytest.raises(DataError, match="expected z, and response or .*; found 'messages, q, a'"):
        prompts.load_prompts(path, columns=prompts.Columns.of("z", None))


def test_an_empty_column_does_not_hide_the_one_with_the_prompts(tmp_path):
    rows = [{"prompt": f"say {n}", "question": "", "output": "", "answer": "b"} for n in range(60)]
    loaded = prompts.load_prompts(write_objects(tmp_path / "a.jsonl", *rows))
    assert ("say 7", "b") in all_pairs(loaded) and loaded.note is None


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_a_split_whose_responses_are_empty_is_named(ending, tmp_path):
    rows = [{"prompt": f"say {n}", "response": "b"} for n in range(60)]
    write_objects(tmp_path / f"train.{ending}", *rows)
    write_objects(tmp_path / f"test.{ending}", *(row | {"response": ""} for row in rows))
    message = "no prompts with a response for the test split; 60 prompts have an empty one"
    with pytest.raises(DataError, match=message):
        prompts.load_prompts(str(tmp_path))


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_a_split_without_the_column_is_named(ending, tmp_path):
    rows = [{"prompt": f"say {n}", "response": "b"} for n in range(60)]
    write_objects(tmp_path / f"train.{ending}", *rows)
    write_objects(tmp_path / f"test.{ending}", *({"prompt": row["prompt"]} for row in rows))
    with pytest.raises(DataError, match=rf"test.{ending}, line 1: .*response or .*found 'prompt'"):
        prompts.load_prompts(str(tmp_path))


def parts_of(*texts):
    return [{"type": "text", "text": text} for text in texts]


def test_a_content_of_parts_is_their_texts(tmp_path):
    """In messages, in ShareGPT's form, and of who asks."""
    chats = [
        chat_of(
            ("system", []), ("user", parts_of(f"say {n}", "twice")), ("assistant", parts_of("b"))
        )
        for n in range(60)
    ]
    turns = [
        {"conversations": [{"from": "human", "value": parts_of(f"say {n}", "twice")}]}
        for n in range(60)
    ]
    for each in turns:
        each["conversations"].append({"from": "gpt", "value": "b"})
    for rows in (chats, turns):
        loaded = prompts.load_prompts(write_objects(tmp_path / "a.jsonl", *rows))
        assert ("say 7\ntwice", "b") in all_pairs(loaded) and loaded.note is None
    asked = json.dumps([{"role": "user", "content": parts_of("say 7", "twice")}])
    assert prompts.of_input(asked) == (("user", "say 7\ntwice"),)


@pytest.mark.parametrize(
    "part, about",
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, "a part of the type image_url, exp"),
        ({"type": "text"}, "a part of the type text, expected parts of the type text"),
        ({"text": "a"}, "a part of the type None, expected"),
        ("a", "a part 'a', expected parts of the type text"),
    ],
)
def test_parts_that_are_not_text_are_named(part, about, tmp_path):
    rows = [chat_of(("user", [*parts_of("a"), part]), ("assistant", "b"))]
    with pytest.raises(DataError, match=f"line 1: the content of the user has {about}"):
        prompts.load_prompts(write_objects(tmp_path / "a.jsonl", *rows))


def test_fields_of_parts_that_are_not_read_are_named(tmp_path):
    part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}, "image": None}
    rows = [chat_of(("user", [*parts_of(f"{n}"), part]), ("assistant", "b")) for n in range(60)]
    loaded = prompts.load_prompts(write_objects(tmp_path / "a.jsonl", *rows))
    assert loaded.note == "fields that are not read: 'cache_control of a part of the user'"


def test_names_in_capitals_are_hinted_at(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"Question": "a", "Answer": "b"}\n')
    with pytest.raises(DataError, match="found 'Question, Answer'; names have small letters"):
        prompts.load_prompts(str(tmp_path / "a.jsonl"))


def chat_of(*messages):
    """The row of a chat; a message is a role, what it says, and more fields."""
    return {
        "messages": [
            {"role": role, "content": content} | (more[0] if more else {})
            for role, content, *more in messages
        ]
    }


def read_chats(folder, *chats):
    """Returns the pairs and the note of chats, with others beside them to fill the splits."""
    others = [chat_of(("user", f"{n}?"), ("assistant", f"{n}!")) for n in range(200)]
    loaded = prompts.load_prompts(write_objects(folder / "chats.jsonl", *chats, *others))
    known = {(f"{n}?", f"{n}!") for n in range(200)}
    found = [pair for pairs in loaded.splits.values() for pair in pairs]
    return [pair for pair in found if pair not in known], loaded.note


def test_messages_of_weight_zero_are_not_trained_on(tmp_path):
    """As of OpenAI's files; what follows the last one that is trained on is left out."""
    no = dict(weight=0)
    first = ("user", "say one"), ("assistant", "six", no)
    second = ("user", "no, one"), ("assistant", "one", dict(weight=1))
    third = ("user", "say two"), ("assistant", "nine", no)
    (pair,), note = read_chats(tmp_path, chat_of(*first, *second, *third))
    (asked, wrong), (again, right) = [[text for _, text, *_ in turns] for turns in (first, second)]
    turns = (("user", asked), (templates.NOT_PREDICTED, wrong), ("user", again))
    assert (pair, note) == ((turns, right), None)
    assert prompts.texts_of(pair) == [asked, wrong, again, right]
    assert prompts.of_input(prompts.as_input(turns)) == turns
    # In ShareGPT's form, and null as in Parquet.
    (row,) = [chat_of(*first, *second)["messages"]]
    names = {"user": "human", "assistant": "gpt"}
    shared = [
        {"from": names[each["role"]], "value": each["content"], "weight": each.get("weight")}
        for each in row
    ]
    assert read_chats(tmp_path, {"conversations": shared}) == ([(turns, right)], None)


def test_a_chat_without_a_message_to_train_on_has_no_response(tmp_path):
    turns = (("system", "x"), ("user", "say one"), ("assistant", "six", dict(weight=0)))
    found, note = read_chats(tmp_path, chat_of(*turns))
    assert (found, note) == ([], "1 prompts without a response are left out")


def test_fields_of_messages_that_are_not_read_are_named(tmp_path):
    turns = (
        ("user", "say one", dict(name="Ann", weight=1)),
        ("assistant", "one", dict(reasoning_content="x", tool_calls=[], refusal=None, weight=1)),
    )
    (pair,), note = read_chats(tmp_path, chat_of(*turns))
    assert pair == ("say one", "one")
    assert note == (
        "fields that are not read: 'name of the user', 'weight of the user', "
        "'reasoning_content of the assistant'"
    )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (dict(weight=0.5), "the weight of the assistant is 0.5, expected 0 or 1"),
        (dict(weight="0"), "the weight of the assistant is '0', expected 0 or 1"),
        (dict(weight=[0]), r"the weight of the assistant is \[0\], expected 0 or 1"),
        (
            dict(tool_calls=[{"id": "a"}]),
            "the assistant has tool_calls, which the templates cannot write",
        ),
        (dict(function_call={"name": "a"}), "the assistant has function_call, which the templates"),
    ],
)
def test_messages_that_cannot_be_trained_on_are_refused(more, message, tmp_path):
    turns = (("user", "say one"), ("assistant", "one", more))
    with pytest.raises(DataError, match=f"chats.jsonl, line 1: {message}"):
        read_chats(tmp_path, chat_of(*turns))


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_the_way_to_train_on_one_answer_of_preference_pairs_is_named(ending, tmp_path):
    rows = [{"prompt": f"say {n}", "chosen": f"{n}", "rejected": "no"} for n in range(200)]
    path = tmp_path / f"a.{ending}"
    path = str(write_parquet(path, rows) if ending == "parquet" else write_objects(path, *rows))
    hint = "preference pairs are not trained on; --response-column chosen trains on the chosen"
    with pytest.raises(DataError, match=hint):
        prompts.load_prompts(path)
    loaded = prompts.load_prompts(path, columns=prompts.Columns.of(None, "chosen"))
    assert ("say 7", "7") in all_pairs(loaded)
    assert loaded.note == "fields that are not read: 'rejected'"


def test_fields_beside_messages_are_named(tmp_path):
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [
        {"messages": [{"role": "user", "content": f"say {n}"}, chat[1]], "system": "x", "id": None}
        for n in range(200)
    ]
    loaded = prompts.load_prompts(write_objects(tmp_path / "a.jsonl", *rows))
    assert loaded.note == "fields that are not read: 'system'"


def test_a_passage_that_stands_in_two_columns_is_refused(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("prompt,input,input,response\na,b,c,d\n")
    with pytest.raises(DataError, match="2 columns input, expected one"):
        prompts.load_prompts(str(path))


def test_a_folder_may_lack_splits(tmp_path):
    def lines(numbers):
        return "\n".join(json.dumps({"prompt": f"{n}", "response": "r"}) for n in numbers)

    (tmp_path / "train.jsonl").write_text(lines(range(200)))
    whole = prompts.load_prompts(str(tmp_path))
    assert whole.note == "no file for valid and test: a twentieth of the training prompts each"
    (tmp_path / "elsewhere").mkdir()
    one_file = tmp_path / "elsewhere" / "one.jsonl"
    one_file.write_text(lines(range(200)))
    assert whole.splits == prompts.load_prompts(str(one_file)).splits
    (tmp_path / "valid.jsonl").write_text(lines(range(200, 210)))
    found = prompts.load_prompts(str(tmp_path))
    assert found.splits["test"] == whole.splits["test"] and len(found.splits["valid"]) == 10
    assert len(found.splits["train"]) + len(found.splits["test"]) == 200
    assert found.note == "no file for test: a twentieth of the training prompts each"


@pytest.mark.parametrize("files", [("a",), ("train",), ("train", "valid"), ("train", "test")])
def test_few_prompts_are_in_every_split(files, tmp_path):
    """A hash alone leaves a split of a small file empty."""
    write_prompts(tmp_path / f"{files[0]}.jsonl", range(3))
    for number, name in enumerate(files[1:], start=3):
        write_prompts(tmp_path / f"{name}.jsonl", [number])
    dataset = tmp_path / "a.jsonl" if files == ("a",) else tmp_path
    found = prompts.load_prompts(str(dataset)).splits
    sizes = {split: len(pairs) for split, pairs in found.items()}
    assert sizes == {"train": 2 if len(files) == 2 else 1, "valid": 1, "test": 1}
    assert found == prompts.load_prompts(str(dataset)).splits


@pytest.mark.parametrize(
    "names", [("Train.jsonl", "VAL.jsonl"), ("my_train.jsonl", "devset.jsonl")]
)
def test_files_of_splits_have_the_names_of_other_recipes(names, tmp_path):
    for file, numbers in zip(names, (range(100), [100]), strict=True):
        write_prompts(tmp_path / file, numbers)
    assert prompts.load_prompts(str(tmp_path)).splits["valid"] == [("say 100", "it")]


def test_prompts_without_a_response_are_left_out_and_counted(tmp_path):
    """As some of Alpaca's."""
    rows = [{"instruction": f"say {n}", "output": "" if n % 10 == 0 else "it"} for n in range(200)]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    found = prompts.load_prompts(str(tmp_path / "a.json"))
    assert sum(map(len, found.splits.values())) == 180
    assert found.note == "20 prompts without a response are left out"


def test_other_datasets_are_not_prompts(tmp_path):
    (tmp_path / "train.txt").write_text("x")
    for dataset in ("wikitext-2", "installed-docs", str(tmp_path), str(tmp_path / "train.txt")):
        assert prompts.find_files(dataset) == {}


def write_prompts(path, numbers):
    rows = [{"prompt": f"say {n}", "response": "it"} for n in numbers]
    if path.suffix == ".parquet":
        write_parquet(path, rows)
    else:
        path.write_text("\n".join(map(json.dumps, rows)))


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_all_shards_of_a_split_are_read(tmp_path, ending):
    for number in range(3):
        name = f"train-{number:05}-of-00003.{ending}"
        write_prompts(tmp_path / name, range(10 * number, 10 * number + 10))
    write_prompts(tmp_path / f"validation-00000-of-00001.{ending}", range(30, 35))
    write_prompts(tmp_path / "test.jsonl", range(35, 40))
    splits = prompts.load_prompts(str(tmp_path)).splits
    assert splits["train"] == [(f"say {n}", "it") for n in range(30)]
    assert [len(pairs) for pairs in splits.values()] == [30, 5, 5]
    (tmp_path / f"train-00002-of-00003.{ending}").unlink()
    with pytest.raises(DataError, match=f"lacks the shard train-00002-of-00003.{ending}"):
        prompts.load_prompts(str(tmp_path))


def test_all_of_a_file_is_the_test_split(tmp_path):
    write_prompts(tmp_path / "a.jsonl", range(200))
    write_prompts(tmp_path / "new.jsonl", range(200, 203))
    splits = prompts.load_prompts(str(tmp_path / "a.jsonl")).splits
    changed = prompts.load_prompts(
        str(tmp_path / "a.jsonl"), test_file=tmp_path / "new.jsonl"
    ).splits
    assert changed["test"] == [(f"say {n}", "it") for n in range(200, 203)]
    assert [changed[name] for name in ("train", "valid")] == [splits["train"], splits["valid"]]


def test_a_chat_in_parquet(tmp_path):
    chats = [
        [{"role": "user", "content": f"hello {n}"}, {"role": "assistant", "content": "good day"}]
        for n in range(200)
    ]
    rows = [{"messages": chat, "prompt": None} for chat in chats]
    path = write_parquet(tmp_path / "chats.parquet", rows)
    pairs = [pair for found in prompts.load_prompts(str(path)).splits.values() for pair in found]
    assert sorted(pairs) == sorted((f"hello {n}", "good day") for n in range(200))


@pytest.mark.parametrize("name", ["val.jsonl", "val_2024.jsonl", "dev.jsonl", "validation.jsonl"])
def test_other_names_of_the_validation_file(name, tmp_path):
    for number, file in enumerate(("train.jsonl", name, "test.jsonl")):
        write_prompts(tmp_path / file, [number])
    assert prompts.load_prompts(str(tmp_path)).splits["valid"] == [("say 1", "it")]
    write_prompts(tmp_path / "valid.jsonl", [3])
    if name == "val_2024.jsonl":  # is not what a file of a longer name is
        loaded = prompts.load_prompts(str(tmp_path))
        assert loaded.splits["valid"] == [("say 3", "it")]
        assert loaded.note == f"files that are not read: {name}"
        return
    with pytest.raises(DataError, match="several valid files, .*; expected one"):
        prompts.load_prompts(str(tmp_path))


def test_files_of_a_folder_that_are_not_read_are_named(tmp_path):
    names = ("train.jsonl", "valid.jsonl", "test.jsonl", "eval.json", "values.jsonl", "2024.csv")
    for name in names:
        write_prompts(tmp_path / name, [1])
    (tmp_path / "train_args.json").write_text('{"rate": 0.1}')
    loaded = prompts.load_prompts(str(tmp_path))
    assert loaded.note == "files that are not read: 2024.csv, eval.json, values.jsonl"


@pytest.mark.parametrize(
    "names",
    [
        ("train-large.jsonl", "train-small.jsonl"),
        ("train-00000-of-00002.jsonl", "train.jsonl"),
        ("train-a-00000-of-00002.jsonl", "train-b-00001-of-00002.jsonl"),
    ],
)
def test_several_files_of_a_split_are_refused(names, tmp_path):
    for name in names:
        write_prompts(tmp_path / name, range(9))
    with pytest.raises(DataError, match=f"several train files, {', '.join(names)}; expected one"):
        prompts.load_prompts(str(tmp_path))


def test_a_stray_file_beside_text_or_prompts_is_no_split(tmp_path):
    (tmp_path / "train_args.json").write_text('{\n  "learning_rate": 0.1\n}')
    (tmp_path / "test_results.json").write_text('{"accuracy": 0.1}')
    for name in ("train.txt", "valid.txt", "test.txt"):
        (tmp_path / name).write_text("one line\nanother line")
    assert prompts.find_files(str(tmp_path)) == {}
    assert list(load_text(str(tmp_path), tmp_path).splits["train"]) == ["one line", "another line"]
    for name in ("train_prompts.jsonl", "valid.jsonl", "test.jsonl"):
        write_prompts(tmp_path / name, range(9))
    assert len(prompts.load_prompts(str(tmp_path)).splits["train"]) == 9


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON, one object per line"),
        ('{"messages": []}', "expected alternating user and assistant messages, .* found none"),
        ('{"messages": [{"role": "system"}, 1]}', "expected alternating .* found system, None"),
        (
            '{"messages": [{"role": "user", "content": "a"}]}',
            "expected alternating .* ending with the assistant; found user",
        ),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant"}]}',
            "the content of the assistant is None, expected text",
        ),
        ('["a"]', "expected an object with prompt and response"),
        ('{"prompt": "a"}', "expected prompt or instruction or question, and .*; found 'prompt'"),
        ("[" * 100_000, "not JSON, one object per line"),
        (
            '{"instruction": "a", "context": ["b"], "response": "c"}',
            r"the context is \['b'\], expected text",
        ),
        ('{"prompt": "a", "system": ["b"], "response": "c"}', r"the system is \['b'\], expected"),
        ('{"prompt": "a", "response": 1}', "the response is 1, expected text"),
        ('{"messages": null}', "expected prompt or instruction .* or messages; found 'messages'"),
        ('{"prompt": " ", "response": "a"}', "the prompt is ' ', expected text"),
        ('{"prompt": "a\\ud800", "response": "a"}', "the prompt is not UTF-8"),
    ],
)
def test_a_wrong_line_is_named(line, message, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a", "response": "b"}\n' + line + "\n")
    with pytest.raises(DataError, match=f"a.jsonl, line 2: {message}"):
        prompts.load_prompts(str(path))


def test_a_wrong_list_is_named(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[{"prompt": "a", "response": "b"},\n{"prompt": "a"}]')
    with pytest.raises(DataError, match="a.json, value 2: expected prompt or instruction"):
        prompts.load_prompts(str(path))
    path.write_text('[{"prompt": "a", "response": "b"},\n')
    with pytest.raises(DataError, match="a.json: not JSON"):
        prompts.load_prompts(str(path))


def test_too_few_prompts_and_wrong_columns(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a", "response": "b"}\n')
    with pytest.raises(DataError, match="no prompts for the .* split; expected more of them"):
        prompts.load_prompts(str(path))
    path = tmp_path / "a.csv"
    path.write_text("query,response\na,b\n")
    with pytest.raises(DataError, match="line 1: no column prompt"):
        prompts.load_prompts(str(path))


def test_the_answers_of_a_chat_have_one_split(tmp_path):
    """Chats are often written down once for each of their answers."""
    rows = []
    for talk in range(60):
        turns = []
        for turn in range(3):
            turns.append({"role": "user", "content": f"{talk} {turn}?"})
            turns.append({"role": "assistant", "content": f"{talk} {turn}."})
            rows.append({"messages": turns.copy()})
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    splits = prompts.load_prompts(str(path)).splits
    talks = [{pair[1].split()[0] for pair in pairs} for pairs in splits.values()]
    assert len(set.union(*talks)) == sum(map(len, talks)) == 60
    assert sum(map(len, splits.values())) == 180


def test_prompts_of_a_test_file_without_a_response_are_counted(tmp_path):
    rows = [{"prompt": f"{n}", "response": "yes"} for n in range(90)]
    (tmp_path / "all.jsonl").write_text("\n".join(map(json.dumps, rows)))
    rows[1]["response"] = " "
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows[:3])))
    found = prompts.load_prompts(str(tmp_path / "all.jsonl"), test_file=tmp_path / "test.jsonl")
    assert len(found.splits["test"]) == 2
    assert found.note == "1 prompts without a response are left out"


@pytest.mark.parametrize("name", ["chats.jsonl", "chats.json"])
def test_an_export_with_several_unusual_rows_says_how_many(name, tmp_path):
    def chat(n, *roles):
        return {"messages": [{"role": role, "content": f"{n}"} for role in roles]}

    rows = [chat(n, "user", "assistant") for n in range(40)]
    rows[3] = chat(3, "user", "assistant", "tool", "assistant")
    rows[5] = {"messages": [{"role": "user", "content": None}, *rows[5]["messages"][1:]]}
    rows[9] = {"text": "a"}
    lines = json.dumps(rows) if name.endswith(".json") else "\n".join(map(json.dumps, rows))
    (tmp_path / name).write_text(lines)
    with pytest.raises(DataError) as caught:
        prompts.load_prompts(str(tmp_path / name))
    where = "value" if name.endswith(".json") else "line"
    assert f"{name}, {where} 4: expected alternating" in str(caught.value)
    assert str(caught.value).endswith(
        f"found user, assistant, tool, assistant; likewise 2 more ({where} 6, {where} 10)"
    )


def test_a_prompt_in_other_spacing_or_case_is_in_one_split(tmp_path):
    forms = ("say {}", "say {} ", "say {}\n", " Say  {}")
    rows = [{"prompt": form.format(n), "response": "r"} for form in forms for n in range(90)]
    path = write_objects(tmp_path / "a.jsonl", *rows)
    first = prompts.load_prompts(write_objects(tmp_path / "b.jsonl", *rows[:90])).splits
    splits = prompts.load_prompts(path).splits
    for split, pairs in splits.items():
        assert {pair for pair in pairs if pair in first["train"]} <= set(splits["train"])
        said = [" ".join(prompt.lower().split()) for prompt, _ in pairs]
        assert set(said) == {prompt for prompt, _ in first[split]} and len(pairs) % 4 == 0
    assert prompts.load_prompts(path).repeated_notes() == []


def test_prompts_with_their_response_in_training_are_noted(tmp_path):
    rows = [{"prompt": f"say {n}", "response": "it"} for n in range(10)]
    rows.append({"system": "Be brief.", "prompt": "say it", "response": "it"})
    for split in ("train", "valid"):
        write_objects(tmp_path / f"{split}.jsonl", *rows)
    rows = [rows[0] | {"response": " IT"}, rows[1] | {"response": "other"}, rows[-1]]
    write_objects(tmp_path / "test.jsonl", *rows, {"prompt": "say 11", "response": "it"})
    end = "prompts are in training too, with the same response (case and spaces ignored)"
    assert prompts.load_prompts(str(tmp_path)).repeated_notes() == [
        f"11 of 11 validation {end}",
        f"2 of 4 test {end}",
    ]


def test_null_is_what_is_missing(tmp_path):
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    silent = {"role": "system", "content": None}
    rows = [
        *({"prompt": f"say {n}", "response": "it", "messages": None} for n in range(90)),
        {"prompt": "a", "response": None},
        {"prompt": "a", "response": "b", "question": None, "system": None, "input": None},
        {"prompt": None, "response": None, "messages": [silent, *chat]},
    ]
    loaded = prompts.load_prompts(write_objects(tmp_path / "a.jsonl", *rows))
    expected = [(f"say {n}", "it") for n in range(90)] + [("a", "b")] * 2
    assert all_pairs(loaded) == sorted(expected)
    assert loaded.note == "1 prompts without a response are left out"


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_two_prompts_in_a_row_are_refused(tmp_path, ending):
    row = {"question": "a", "prompt": "b", "answer": "c"}
    path = write_objects(tmp_path / f"a.{ending}", row)
    with pytest.raises(DataError, match="2 columns prompt .*question.*--prompt-column and"):
        prompts.load_prompts(path)


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_a_test_file_has_the_columns_of_the_dataset(tmp_path, ending):
    rows = [{"prompt": f"{n}?", "response": "yes"} for n in range(90)]
    data = write_objects(tmp_path / "a.jsonl", *rows)
    other = write_objects(tmp_path / f"b.{ending}", {"q": "a", "a": "b"})
    said = "b.*; name the columns of a test or validation file as those of the training data$"
    with pytest.raises(DataError, match=said):
        prompts.load_prompts(str(data), test_file=other)
    with pytest.raises(DataError, match=said):
        prompts.read_pairs(other)
    named = prompts.Columns.of("q", "a")
    assert prompts.read_pairs(other, named) == [("a", "b")] and named.of_held_out() == named


def test_a_table_of_text_is_told_its_option(tmp_path):
    for ending in ("jsonl", "csv"):
        path = write_objects(tmp_path / f"a.{ending}", {"id": "1", "body": "a text"})
        with pytest.raises(DataError, match="--text-column the column of plain text$"):
            prompts.load_prompts(path)
    write_parquet(tmp_path / "a.parquet", [{"id": 1, "body": "a text"}])
    with pytest.raises(DataError, match="found 'id, body'; --prompt-column .* plain text$"):
        prompts.load_prompts(str(tmp_path / "a.parquet"))


def test_other_columns_of_parquet_are_named_and_not_read(tmp_path):
    """Python lacks some of their values."""
    said = [f"say {n}" for n in range(90)]
    when = pyarrow.array([1] * 90, pyarrow.timestamp("ns"))
    table = pyarrow.table({"when": when, "prompt": said, "response": said})
    parquet.write_table(table, tmp_path / "a.parquet")
    loaded = prompts.load_prompts(str(tmp_path / "a.parquet"))
    assert all_pairs(loaded) == sorted(zip(said, said, strict=True))
    assert loaded.note == "fields that are not read: 'when'"
    table = pyarrow.Table.from_arrays([table["prompt"]] * 3, names=["prompt", "prompt", "response"])
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match="2 columns prompt, expected one"):
        prompts.load_prompts(str(tmp_path / "a.parquet"))


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_named_columns_may_be_in_an_object(ending, tmp_path):
    """As in the datasets of run_translation.py."""
    rows = [
        {"id": n, "translation": {"en": f"day {n}", "de": f"Tag {n}", "fr": "x"}} for n in range(99)
    ]
    path = tmp_path / f"train.{ending}"
    if ending == "parquet":
        write_parquet(path, rows)
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    for dataset in (path, tmp_path):
        loaded = prompts.load_prompts(str(dataset), columns=prompts.Columns.of("en", "de"))
        pairs = [pair for found in loaded.splits.values() for pair in found]
        assert sorted(pairs) == sorted((f"day {n}", f"Tag {n}") for n in range(99))
        assert "fields that are not read: 'id', 'fr'" in loaded.note or (
            "fields that are not read: 'fr', 'id'" in loaded.note
        )
    with pytest.raises(DataError, match="expected prompt or .*; found 'id, translation"):
        prompts.load_prompts(str(path))
    with pytest.raises(DataError, match="expected en, and it; found '(en|id, tr)"):
        prompts.load_prompts(str(path), columns=prompts.Columns.of("en", "it"))
