"""Prompts and their responses, from JSONL or tables; rows of tokens with the loss on responses."""

import array
import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from data import arrays, files, sequences, tables, word_pieces
from data.errors import DataError, listed, require_some
from data.live_line import live_line
from data.next_tokens import Ends
from data.splits import (
    NO_FILES,
    SPLITS,
    TITLES,
    files_by_split,
    fold,
    held_out_files,
    layout_hint,
    missing_from,
    of_each,
    split_of,
    with_notes,
)
from data.templates import CHATS, NOT_PREDICTED, Prompt, Template, Turn
from data.text import TEXT, Text

Pair = tuple[Prompt, str]
# The names of the fields; the others are those of Alpaca, Dolly and TRL, and usual ones.
PROMPT = ("prompt", "instruction", "question")
RESPONSE = ("response", "completion", "output", "answer")
INPUT = ("input", "context")  # the passage that a prompt is about; may be empty
SYSTEM = "system"  # the system message; may be empty
MESSAGES = "messages"  # of a chat
CONVERSATIONS = "conversations"  # of a chat, in ShareGPT's form
COLUMNS_HINT = "; --prompt-column and --response-column name others"
HINT = f"{COLUMNS_HINT}, --text-column the column of plain text"
HELD_OUT_HINT = "; name the columns of a test or validation file as those of the training data"
PREFERENCES = {"chosen", "rejected"}  # the fields of two answers to a prompt
CHOSEN_HINT = (
    "; preference pairs are not trained on; --response-column chosen trains on the chosen answers"
)
CUT = 0.05  # of the prompts of a file without splits, for validation and again for test
ROLES = {"human": "user", "gpt": "assistant"}  # there; others are named as in messages
CALLS = ("tool_calls", "function_call")  # of tools, in the assistant's messages


@dataclasses.dataclass(frozen=True)
class Columns:
    """The names of the fields of prompts and responses.

    Attributes:
        prompt: Possible names of the prompt.
        response: Possible names of the response.
        hint: What the message about a missing or repeated one ends with.
    """

    prompt: tuple[str, ...] = PROMPT
    response: tuple[str, ...] = RESPONSE
    hint: str = dataclasses.field(default=HINT, compare=False)

    @classmethod
    def of(cls, prompt: str | None, response: str | None) -> "Columns":
        """Returns the usual names, or those of `--prompt-column` and `--response-column`.

        Raises:
            DataError: Both are the same.
        """
        if prompt is not None and prompt == response:
            raise DataError(f"--prompt-column and --response-column {prompt}: expected two columns")
        # A column that is named as one of them is not the other one by its usual name.
        return cls(
            (prompt,) if prompt else tuple(name for name in PROMPT if name != response),
            (response,) if response else tuple(name for name in RESPONSE if name != prompt),
        )

    def of_held_out(self) -> "Columns":
        """Returns the same names, for a file of `--test-file` or `--validation-file`."""
        return dataclasses.replace(self, hint=HELD_OUT_HINT)

    def hint_for(self, names: Iterable[str]) -> str:
        """Returns what the message about a missing one ends with, in a file with these names."""
        is_preference = {*names} >= PREFERENCES and not {*names}.isdisjoint(self.prompt)
        return CHOSEN_HINT if is_preference and self.hint != HELD_OUT_HINT else self.hint

    @property
    def others(self) -> tuple[str, ...]:
        """Returns the fields that are read beside the prompt, unless the user named one of them."""
        return tuple(n for n in (*INPUT, SYSTEM) if n not in (*self.prompt, *self.response))

    @property
    def were_named(self) -> bool:
        """Tells whether they are others than the usual ones."""
        return self != USUAL


USUAL = Columns()


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Prompts with their responses.

    Attributes:
        name: The path that was given.
        splits: Pairs (prompt, response) by "train", "valid" and "test".
        note: One line about splits that a folder lacks, examples that are left out, and fields and
            files that are not read; or None.
    """

    name: str
    splits: dict[str, list[Pair]]
    note: str | None = None

    @functools.cached_property
    def sha256(self) -> str:
        """Returns a checksum of the pairs and of the splits that they are in (hex)."""
        return sequences.sha256_of([self.splits[split] for split in SPLITS], depth=2)

    def repeated_notes(self) -> list[str]:
        """Returns a line for validation and test if training has prompts with the same response."""
        known = {hash(_folded(pair)) for pair in self.splits["train"]}
        notes = []
        for split in with_notes(self.splits):
            pairs = self.splits[split]
            repeated = sum(hash(_folded(pair)) in known for pair in pairs)
            if repeated:
                notes.append(
                    f"{repeated:,} of {len(pairs):,} {TITLES[split]} prompts are in training too, "
                    "with the same response (case and spaces ignored)"
                )
        return notes

    def as_text(self) -> Text:
        """Returns prompts and responses as lines, to learn a vocabulary from."""
        lines = {
            split: [text for pair in pairs for text in texts_of(pair)]
            for split, pairs in self.splits.items()
        }
        return Text(self.name, lines)


def texts_of(pair: Pair) -> list[str]:
    """Returns what each turn of a prompt says, and the response."""
    prompt, response = pair
    said = [prompt] if isinstance(prompt, str) else [text for _, text in prompt]
    return [*said, response]


def _folded(pair: Pair) -> tuple[str, ...]:
    return tuple(map(fold, texts_of(pair)))


def find_files(
    dataset: str, columns: Columns = USUAL, held_out: Mapping[str, Path] = NO_FILES
) -> dict[str, list[Path]]:
    """Returns the files of prompts that a dataset names, by split; "" for one file of all.

    Without the splits that have other files, `held_out`.

    Empty where the dataset is something else, for instance text, also in the fields `text` of a
    table or of JSON, unless the user named columns.

    Raises:
        DataError: A folder has several files for a split that are not the shards of one, or lacks
            a shard.
    """
    path = files.expand(dataset)
    if path.is_file():
        is_asked = _has_fields(path) and (columns.were_named or not _holds_text(path))
        return {"": [path]} if is_asked else {}
    if not path.is_dir():
        return {}
    is_meant = functools.partial(_is_meant, columns)
    paths = files_by_split(filter(_has_fields, path.iterdir()), dataset, is_meant, but=held_out)
    every = [file for found in paths.values() for file in found]
    return {} if not columns.were_named and any(map(_holds_text, every)) else paths


def _has_fields(path: Path) -> bool:
    return path.name.lower().endswith(tables.ENDINGS)


def _is_meant(columns: Columns, path: Path) -> bool:
    return tables.has_field(path, *columns.prompt, MESSAGES, CONVERSATIONS)


def _holds_text(path: Path) -> bool:
    """Returns whether a file has a field `text` and none of prompts."""
    names = set(tables.header_of(path))
    return TEXT in names and names.isdisjoint({*PROMPT, MESSAGES, CONVERSATIONS})


def load_prompts(
    dataset: str,
    *,
    held_out: Mapping[str, Path] = NO_FILES,
    test_file: Path | None = None,
    columns: Columns = USUAL,
) -> Prompts:
    """Loads prompts and responses.

    A prompt may also be called `instruction` or `question`, and a response `completion`, `output`
    or `answer`. An `input` or `context` follows the prompt on the next line but one. A text in
    `system` makes the prompt a chat that begins with this system message. JSON may have `messages`
    instead, with `role` and `content`: an optional system message, then user and assistant messages
    in turn; the response is the last one, the prompt all before it. A content may be a list of
    parts of the type text, which are joined as lines. Messages may also be
    `conversations`, with `from` and `value`, or be divided into lists `prompt` and `completion`.

    Args:
        dataset: A file with an object per line (JSONL) or one list of objects (JSON), a CSV or TSV,
            each also compressed (`.gz`), or Parquet, split 90/5/5 by a hash of the prompt, of a
            chat by its first message; or a
            folder with such files that begin with train, valid (or val or dev) and test, each in
            one file or in shards (train-00000-of-00002.jsonl). A split that a folder lacks is
            cut from training in the same way. Prompts without a response are left out.
        held_out: Files by split ("valid", "test"), which replace those of the dataset; such a split
            is not cut from training.
        test_file: A file, all of which is the test split instead, while training stays as it is.
        columns: The names of the prompt and the response.

    Raises:
        DataError: A file cannot be read, an example is not what it should be, a split is empty, or
            a folder has several files for it.
    """
    paths = find_files(dataset, columns, held_out)
    if not paths:
        path = files.expand(dataset)
        problem = "no files of prompts and responses" if path.exists() else "no such file or folder"
        raise DataError(
            f"{dataset}: {problem}; expected a JSONL, JSON, CSV, TSV or Parquet file with prompt "
            "and response, or a folder with train, valid and test files"
            f"{layout_hint(path)}"
        )
    cut = missing_from({*paths, *held_out})  # from training
    splits: dict[str, list[Pair]] = {split: [] for split in SPLITS}
    notes, empty_responses = [], 0
    to_split: list[Pair] = []
    unread: dict[str, None] = {}  # names of fields, in the order of the files
    for split, found in paths.items():
        for pair in itertools.chain.from_iterable(_read(path, unread, columns) for path in found):
            if not pair[1].strip():
                empty_responses += 1
                continue
            is_held_out = split in TITLES
            (splits[split] if is_held_out else to_split).append(pair)
    drawn = _splits_of(to_split, cut)
    for pair, split in zip(to_split, drawn, strict=True):
        splits[split].append(pair)
    given = held_out_files(held_out, test_file)
    for path in dict.fromkeys(given.values()):  # one file may be two splits
        read = list(_read(path, unread, columns.of_held_out()))
        pairs = [pair for pair in read if pair[1].strip()]
        empty_responses += len(read) - len(pairs)
        if not pairs:
            raise DataError(f"{path}: no prompt with a response")
        splits |= {split: pairs for split in given if given[split] == path}
    empty = [split for split, pairs in splits.items() if not pairs]
    if empty and empty_responses:
        raise DataError(
            f"{dataset}: no prompts with a response for the {' and '.join(empty)} split; "
            f"{empty_responses:,} prompts have an empty one"
        )
    if empty:
        raise DataError(
            f"{dataset}: no prompts for the {' and '.join(empty)} split; expected more of them, or "
            "a folder with train, valid and test files (.jsonl, .json, .parquet, .csv or .tsv)"
        )
    if "train" in paths and cut:
        notes.append(f"no file for {' and '.join(cut)}: a twentieth of the training prompts each")
    if empty_responses:
        notes.append(f"{empty_responses:,} prompts without a response are left out")
    if "" not in paths:
        paths_read = [*itertools.chain.from_iterable(paths.values()), *held_out.values()]
        unread_files = tables.unread_note(
            paths_read[0].parent, paths_read, (*columns.prompt, MESSAGES, CONVERSATIONS)
        )
        notes += [unread_files] if unread_files is not None else []
    if unread:
        fields = [repr(name[:40]) for name in unread]
        notes.append(f"fields that are not read: {listed(fields)}")
    return Prompts(dataset, splits, "; ".join(notes) or None)


def _splits_of(pairs: Sequence[Pair], held_out: Sequence[str]) -> list[str]:
    """Returns the split of each pair; in other case or spacing a prompt is where its first is."""
    beginnings = [_beginning(prompt) for prompt, _ in pairs]
    first: dict[int, str] = {}
    for each in beginnings:
        first.setdefault(hash(fold(each)), each)

    def draw(beginning: str) -> str:
        split = split_of(beginning)
        return split if split in held_out else "train"

    drawn = of_each(first.values(), draw, held_out, CUT)
    return [drawn[first[hash(fold(each))]] for each in beginnings]


def read_pairs(path: Path, columns: Columns = USUAL) -> list[Pair]:
    """Returns the pairs of a test or validation file that have a response.

    Args:
        path: As one of `held_out` of `load_prompts`.
        columns: The names of the prompt and the response.

    Raises:
        DataError: It cannot be read, a row is not what it should be, or none has a response.
    """
    read = _read(files.expand(path), {}, columns.of_held_out())
    pairs = [pair for pair in read if pair[1].strip()]
    if not pairs:
        raise DataError(f"{path}: no prompt with a response")
    return pairs


def read_prompts(
    path: Path, column: str, template: str | None, columns: Columns = USUAL
) -> tuple[str, ...]:
    """Returns the prompts of a table, with the other fields that training reads with them.

    An `input` or `context` follows the prompt. With a chat's template a text in `system` makes it a
    chat that begins with this system message.

    Args:
        path: As in `tables.read_table`.
        column: The column of the prompts.
        template: That of the run, whose prompts may be chats; None for an encoder-decoder.
        columns: The names of the prompt and the response in training.

    Returns:
        What `of_input` reads, for each row; "" for an empty one.

    Raises:
        DataError: It cannot be read, lacks the column, or has no row with a prompt.
    """
    others = [name for name in columns.others if name != column]
    rows = tables.read_table(
        files.expand(path),
        (column,),
        *((name, "") for name in others),
        keeps_empty_rows=True,
        takes_chats=template is not None,
    )
    asked = [
        _with_others(text, dict(zip(others, values, strict=True)), template in CHATS)
        for _, (text, *values) in rows
    ]
    require_some(asked, f"--file {path}: no row with a prompt")
    return tuple(asked)


def _with_others(asked: str, others: dict[str, str], takes_system: bool) -> str:
    """Returns a row's prompt with its other fields, as `of_input` reads it; a chat as it is."""
    try:
        is_chat = not isinstance(of_input(asked), str)
    except DataError:  # which the recipe's predict() reports
        is_chat = True
    if is_chat:
        return asked
    passage = next((others[name] for name in INPUT if others.get(name)), "")
    asked = "\n\n".join(filter(None, (asked, passage)))
    system = others.get(SYSTEM) if takes_system else ""
    return as_input(((SYSTEM, system), ("user", asked))) if asked and system else asked


def _beginning(prompt: Prompt) -> str:
    """Returns what decides about a prompt's split: of a chat all up to the user's first message.

    Chats are often written down once for each of their answers; they have one split.
    """
    if isinstance(prompt, str):
        return prompt
    first = next(number for number, (role, _) in enumerate(prompt) if role == "user")
    return prompt[0][1] if first == 0 else json.dumps(prompt[: first + 1])


def _read(path: Path, unread: dict[str, None], columns: Columns) -> Iterator[Pair]:
    """Yields the pairs of a file; adds the fields that are neither read nor empty to `unread`.

    Raises:
        DataError: The file cannot be read, or rows are not what they should be: names the first
            one and where the others are.
    """
    is_table = tables.is_table(path.name)
    read = [*columns.prompt, *columns.response, *columns.others, MESSAGES, CONVERSATIONS]
    rows: Iterator[tuple[str, Any]] = (
        _rows_of_table(path, columns) if is_table else tables.read_objects(path, read)
    )
    header = tables.header_of(path) if tables.is_parquet(path.name) else []
    refused: list[str] = []
    first: DataError | None = None
    for where, row in live_line(rows, f"reading {path.name}"):
        try:
            pair = _pair_of(where, row, unread, columns, header, is_table)
        except DataError as error:
            first = first or error
            refused.append(where.removeprefix(f"{path}, "))
            continue
        unread |= dict.fromkeys(name for name in header if name not in row)  # of Parquet
        yield pair
    if first is not None:
        others = refused[1:]
        more = f"; likewise {len(others):,} more ({listed(others)})" if others else ""
        raise DataError(f"{first}{more}") from first


def _pair_of(
    where: str,
    row,
    unread: dict[str, None],
    columns: Columns,
    header: Sequence[str],
    is_table: bool,
) -> Pair:
    """Returns the pair of a row; adds to `unread` as `_read` does.

    Args:
        where: The row's position.
        row: JSON.
        unread: Names of fields.
        columns: Names of the prompt and the response.
        header: All names of the file's fields, if the row has only those that are read.
        is_table: Whether the row is of a CSV or a TSV.

    Raises:
        DataError: The row is not what it should be.
    """
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected an object with prompt and response")
    # Columns that the user named are read, whatever else there is.
    chats = () if is_table or columns.were_named else (MESSAGES, CONVERSATIONS)
    chat = next((name for name in chats if row.get(name) is not None), None)
    if chat is not None:
        unread |= dict.fromkeys(_not_empty(row, chat))
        return read_messages(where, _as_messages(row[chat]), "assistant", unread)
    either = (columns.prompt, columns.response)
    fields = [_field_of(where, row, names, columns.hint) for names in either]
    if None in fields and columns.were_named:  # which may be names in an object of the row
        lacking = [names for names in either if row.keys().isdisjoint(names)]
        row = tables.unnested(row, {*itertools.chain(*lacking)})
        fields = [_field_of(where, row, names, columns.hint) for names in either]
    if None in fields:
        keys = [*map(str, header or row)]
        inside = {str(name): each for name, each in row.items() if isinstance(each, dict)}
        shown = ", ".join(f"{k} ({', '.join(inside[k])})" if k in inside else k for k in keys)
        small = {tables.folded(name) for name in keys} - {*keys}
        hint = "; names have small letters" if small & {*PROMPT, *RESPONSE} else ""
        or_messages = "" if columns.were_named else "; or messages"
        raise DataError(
            f"{where}: expected {' or '.join(columns.prompt)}, and "
            f"{' or '.join(columns.response)}{or_messages}; found {shown[:100]!a}{hint}"
            f"{columns.hint_for(keys)}"
        )
    parts = [row[name] for name in fields]
    if all(isinstance(part, list) for part in parts):  # TRL's messages in two parts
        unread |= dict.fromkeys(_not_empty(row, *fields))
        return read_messages(where, sum(parts, []), "assistant", unread)
    about = next((n for n in INPUT if n in columns.others and row.get(n)), None)
    system = row.get(SYSTEM) if SYSTEM in columns.others else None
    unread |= dict.fromkeys(_not_empty(row, *fields, about, SYSTEM))
    asked, answer = map(row.get, fields)
    if answer is None:
        answer = ""
    if about is not None and isinstance(asked, str):
        passage = _text(where, about, row[about], may_be_empty=True)
        asked = "\n\n".join(filter(None, (asked, passage)))
    asked = _text(where, "prompt", asked)
    answer = _text(where, "response", answer, may_be_empty=True)
    system = _text(where, SYSTEM, system or "", may_be_empty=True)
    prompt = ((SYSTEM, system), ("user", asked)) if system.strip() else asked
    return prompt, answer


def _field_of(where: str, row: dict, names: Sequence[str], hint: str) -> str | None:
    """Returns which of the names a row has, or None; an empty value counts where there is no other.

    Raises:
        DataError: It has several.
    """
    found = [name for name in names if name in row]
    filled = [name for name in found if row[name] not in (None, "")]
    if len(filled) > 1:
        raise DataError(
            f"{where}: {len(filled)} columns {' and '.join(filled)}, expected one{hint}"
        )
    return next(iter(filled + found), None)


def _as_messages(turns):
    """Returns turns of ShareGPT's form, with from and value, as messages; others as they are."""
    if not isinstance(turns, list) or not all(
        isinstance(turn, dict) and {"from", "value"} <= turn.keys() for turn in turns
    ):
        return turns
    return [
        {"role": ROLES.get(turn["from"], turn["from"]), "content": turn["value"]}
        | {name: value for name, value in turn.items() if name not in ("from", "value")}
        for turn in turns
    ]


def _rows_of_table(path: Path, columns: Columns) -> Iterator[tuple[str, dict]]:
    """Yields the position and the fields of each row, as of JSON."""
    header = tables.header_of(path)
    others = [
        name
        for name in dict.fromkeys(header)
        if name not in ("", *columns.prompt, *columns.response)
        and (header.count(name) == 1 or name in (*INPUT, SYSTEM))
    ]
    names = (columns.prompt[0], columns.response[0], *others)
    wanted = (columns.prompt, columns.response, *((name,) for name in others))
    for where, values in tables.read_table(path, *wanted, hint=columns.hint_for(header)):
        yield where, dict(zip(names, values, strict=True))


def _not_empty(row: dict, *besides) -> list[str]:
    """Returns the names of the fields that have a value, besides these."""
    return [name for name in row if name not in besides and row[name] not in (None, "", [], {})]


def read_messages(where: str, messages, ends_with: str, unread: dict[str, None]) -> Pair:
    """Returns the turns of a chat before its last message, and the last message.

    Assistant's messages of the weight 0 are not trained on. Where such are the last ones, the chat
    ends before them, with an empty message where all of them are.

    Args:
        where: What an error begins with.
        messages: JSON.
        ends_with: The role of the last message, "user" or "assistant".
        unread: Gets the names of the messages' fields that are neither read nor empty.

    Raises:
        DataError: The roles do not alternate, a content is neither text nor a list of parts that
            are text, a message calls tools, or a weight is neither 0 nor 1.
    """
    found = messages if isinstance(messages, list) else []
    if found and _is_empty_system(found[0]):
        found = found[1:]
    roles = [each.get("role") if isinstance(each, dict) else None for each in found]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    expected = ["user", "assistant"] * len(turns)
    if not turns or turns != expected[: len(turns)] or turns[-1] != ends_with:
        is_answered = ends_with == "user" and turns[-1:] == ["assistant"]
        hint = "; leave out the assistant's last message, which the model writes"
        hint = hint if is_answered else ""
        raise DataError(
            f"{where}: expected alternating user and assistant messages, optionally after a "
            f"system message, ending with the {ends_with}; found "
            f"{', '.join(map(str, roles))[:100] or 'none'}{hint}"
        )
    said = [_turn_of(where, message, unread) for message in found]
    learned = [number for number, (role, _) in enumerate(said) if role == ends_with]
    if not learned:
        return tuple(said[:-1]), ""
    *before, (_, last) = said[: learned[-1] + 1]
    is_text = len(before) == 1 and before[0][0] == "user"
    return before[0][1] if is_text else tuple(before), last


def _turn_of(where: str, message: dict, unread: dict[str, None]) -> Turn:
    """Returns the role of a message, and what it says; adds to `unread` as `read_messages` does.

    Raises:
        DataError: The content is not text, the message calls tools, or its weight is wrong.
    """
    role, weight = message["role"], message.get("weight")
    for name in CALLS:
        if message.get(name):
            raise DataError(f"{where}: the {role} has {name}, which the templates cannot write")
    content = _joined(where, role, message.get("content"), unread)
    text = _text(where, f"content of the {role}", content)
    if weight not in (None, 0, 1):
        raise DataError(f"{where}: the weight of the {role} is {weight!r:.40}, expected 0 or 1")
    is_read = ("role", "content", *(["weight"] if role == "assistant" or not weight else []))
    unread |= dict.fromkeys(f"{name} of the {role}" for name in _not_empty(message, *is_read))
    return (NOT_PREDICTED if role == "assistant" and weight == 0 else role), text


def _joined(where: str, role: str, content, unread: dict[str, None]):
    """Returns the texts of a content that is a list of parts, as lines; another one as it is.

    Raises:
        DataError: A part is not text, such as an image.
    """
    if not isinstance(content, list) or not content:
        return content
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else part
        if kind != "text" or not isinstance(part.get("text"), str):
            about = f"of the type {kind}" if isinstance(part, dict) else f"{part!r:.40}"
            raise DataError(
                f"{where}: the content of the {role} has a part {about}, expected parts of the "
                'type text: {"type": "text", "text": ...}'
            )
        others = _not_empty(part, "type", "text")
        unread |= dict.fromkeys(f"{name} of a part of the {role}" for name in others)
    return "\n".join(part["text"] for part in content)


def _is_empty_system(message) -> bool:
    is_system = isinstance(message, dict) and message.get("role") == SYSTEM
    return is_system and "content" in message and message["content"] in (None, "", [])


def as_input(prompt: Prompt) -> str:
    """Returns a prompt as `of_input` reads it: a text, or the messages of a chat as JSON."""
    if isinstance(prompt, str):
        return prompt
    return json.dumps(
        [
            {"role": "assistant", "content": text, "weight": 0}
            if role == NOT_PREDICTED
            else {"role": role, "content": text}
            for role, text in prompt
        ]
    )


def of_input(text: str) -> Prompt:
    """Returns the prompt that a text is, or the turns of a chat whose messages it is in JSON.

    Raises:
        DataError: The last message is not the user's, or the roles do not alternate.
    """
    try:
        value = json.loads(text) if text.lstrip().startswith("[") else None
    except (ValueError, RecursionError):
        return text
    value = _as_messages(value)
    first = value[0] if isinstance(value, list) and value else None
    if not isinstance(first, dict) or "role" not in first:
        return text
    before, last = read_messages(text[:60], value, "user", {})
    return (*before, ("user", last))


def _text(where: str, name: str, value, may_be_empty: bool = False) -> str:
    if not isinstance(value, str) or not (value.strip() or may_be_empty):
        raise DataError(f"{where}: the {name} is {value!r:.40}, expected text")
    if value != value.encode(errors="ignore").decode():
        raise DataError(f"{where}: the {name} is not UTF-8 text")
    return value


class PromptRows:
    """Rows of whole examples, like `data.next_tokens.Rows`; only responses are predicted.

    Attributes:
        tokens: Token ids, int32 of shape (rows, length).
        next_tokens: The next token of each, of the same type and shape.
        documents: Numbers of the examples in their row, from 1 on, 0 for padding; likewise.
        loss: One where the next token belongs to a response, or ends it, also to those of the
            assistant within a prompt; uint8, likewise.
        cut: How many examples were longer than a row: cut off, or left out if the prompt fills it.
    """

    NAMES = ("tokens", "next_tokens", "documents", "loss", "cut")

    def __init__(self, tokens, next_tokens, documents, loss, cut=0):
        self.tokens, self.next_tokens = tokens, next_tokens
        self.documents, self.loss = documents, loss
        self.cut = int(cut)

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the attributes as arrays, from which the same rows can be made."""
        return {name: np.asarray(getattr(self, name)) for name in self.NAMES}

    def __len__(self) -> int:
        return len(self.tokens)

    def make_batch(self) -> Callable:
        """Returns a function from indices to batches, as `data.next_tokens.Rows.make_batch`."""
        parts = (self.tokens, self.next_tokens, self.documents, self.loss)
        kept, floatx = [arrays.as_tensor(part) for part in parts], keras.config.floatx()

        def batch_of(indices, epoch):
            tokens, labels, documents, loss = (tf.gather(part, indices) for part in kept)
            inputs = {"token_ids": tokens, "padding_mask": documents}
            return inputs, labels, tf.cast(loss, floatx)

        return batch_of

    def labels(self) -> Iterator[np.ndarray]:
        """Yields the tokens that are predicted, integers of shape (tokens,)."""
        yield self.next_tokens[self.loss == 1]


def rows_once(
    splits: dict[str, list[Pair]],
    tokenizer,
    cache_dir: Path,
    *,
    template: str,
    length: int,
    together: bool,
) -> dict[str, PromptRows]:
    """Makes the rows of each split, or takes them from the cache; see `make_rows`.

    Args:
        splits: As in `Prompts.splits`.
        tokenizer: As of `make_rows`.
        cache_dir: The cache; rows are stored in its folder `sequences`.
        template: As of `make_rows`.
        length: As of `make_rows`.
        together: As of `make_rows`.

    Raises:
        DataError: As of `make_rows`; it names the split.
    """
    rules = word_pieces.rules_of(tokenizer)

    def rows_of(split: str) -> PromptRows:
        pairs = splits[split]

        def make() -> dict[str, np.ndarray]:
            try:
                rows = make_rows(
                    pairs, tokenizer, template=template, length=length, together=together
                )
            except DataError as error:
                raise DataError(f"{TITLES.get(split, 'training')} split: {error}") from error
            return rows.arrays()

        made_from = (sequences.sha256_of(pairs), "prompts 1", template, length, together, rules)
        return PromptRows(**sequences.arrays_once(cache_dir, made_from, make))

    return {split: rows_of(split) for split in splits}


def make_rows(
    pairs: Sequence[Pair], tokenizer, *, template: str, length: int, together: bool
) -> PromptRows:
    """Tokenises prompts and responses and fills rows with whole examples, in their order.

    Prompt and response are tokenised apart, as a prompt is when the model is queried.

    Args:
        pairs: Prompts and responses.
        tokenizer: A KerasNLP tokenizer.
        template: See `data.templates.Template`; what comes before a response is not predicted.
        length: Predictions of a row.
        together: Whether examples share a row; an example goes into the first row with room.

    Raises:
        DataError: No prompt leaves room for its response, or a text contains a special token of
            the template.
    """
    encode, padding = Template(template, tokenizer), Ends.of(tokenizer).end
    # Of all examples together, in 5 bytes a token: lists of Python take ten times as much.
    tokens, predictions, ends, cut = array.array("i"), bytearray(), [0], 0
    for ids, predicted in encode.examples(live_line(pairs, "tokenising")):
        cut += len(ids) > length + 1
        if any(predicted[: length + 1]):
            tokens.extend(ids[: length + 1])
            predictions.extend(predicted[: length + 1])
            ends.append(len(tokens))
    if len(ends) == 1:
        raise DataError(
            f"no prompt is shorter than {length} tokens; use a longer --sequence-length"
        )
    room: list[int] = []  # of each row
    place = np.zeros((len(ends) - 1, 2), np.int64)
    oldest = 0  # only the last 100 rows are searched for room
    for index, (begin, end) in enumerate(itertools.pairwise(ends)):
        size = end - begin - 1
        row = next((r for r in range(oldest, len(room)) if together and room[r] >= size), len(room))
        if row == len(room):
            room.append(length)
            oldest = max(oldest, len(room) - 100)
        place[index] = row, length - room[row]
        room[row] -= size
    shape = (len(room), length)
    rows = PromptRows(
        np.full(shape, padding, np.int32),
        np.full(shape, padding, np.int32),
        np.zeros(shape, np.int32),
        np.zeros(shape, np.uint8),
        cut,
    )
    every, is_predicted = np.frombuffer(tokens, np.int32), np.frombuffer(predictions, np.uint8)
    for (begin, end), (row, start) in zip(itertools.pairwise(ends), place, strict=True):
        stop = start + end - begin - 1
        rows.tokens[row, start:stop] = every[begin : end - 1]
        rows.next_tokens[row, start:stop] = every[begin + 1 : end]
        rows.documents[row, start:stop] = rows.documents[row].max() + 1
        rows.loss[row, start:stop] = is_predicted[begin + 1 : end]
    return rows
