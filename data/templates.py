"""Templates of a prompt and its response: a text that holds both, or the turns of a chat."""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator

from data import files
from data.errors import DataError
from data.next_tokens import Ends, names_in_text
from data.word_pieces import as_lists

TEXT = "{prompt}\n{response}"
EXAMPLES_AT_ONCE = 1000  # that are tokenised


# The role of the assistant's turns that are context alone: their tokens are not predicted.
NOT_PREDICTED = "assistant (not predicted)"
Turn = tuple[str, str]  # a role, "system", "user", "assistant" or this, and what it says
Prompt = str | tuple[Turn, ...]  # the turns of a chat before the response; a text is a user's
# Of an example: a text that is not tokenised yet, or tokens; and whether it is predicted.
Part = tuple[str | list[int], bool]


@dataclasses.dataclass(frozen=True)
class Chat:
    """The turns that an instruction-tuned model was trained on.

    Attributes:
        turn: A turn with {role} and {text}.
        between: What stands between two turns.
        markers: Its special tokens.
        end: The one that ends a turn.
        strips: Whether white space around texts is left out.
        assistant: The name of the role that responds.
        has_system: Whether there is a system role; otherwise the system message begins the first
            user turn, before an empty line.
    """

    turn: str
    between: str
    markers: tuple[str, ...]
    end: str
    strips: bool
    assistant: str = "assistant"
    has_system: bool = True


# As the models' pages describe them; Gemma's were compared with its page, none with the
# `chat_template` of a tokenizer. In the order of the search.
CHATS = {
    "chatml": Chat(  # Qwen, SmolLM; qwen.readthedocs.io, "Key Concepts"
        "<|im_start|>{role}\n{text}<|im_end|>",
        "\n",
        ("<|im_start|>", "<|im_end|>"),
        end="<|im_end|>",
        strips=False,
    ),
    "gemma": Chat(  # Gemma 1 to 3; ai.google.dev/gemma/docs/core/prompt-structure
        "<start_of_turn>{role}\n{text}<end_of_turn>",
        "\n",
        ("<start_of_turn>", "<end_of_turn>"),
        end="<end_of_turn>",
        strips=True,
        assistant="model",
        has_system=False,
    ),
    "llama3": Chat(  # Llama 3 to 3.3; llama.com/docs, "Model Cards and Prompt formats"
        "<|start_header_id|>{role}<|end_header_id|>\n\n{text}<|eot_id|>",
        "",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        end="<|eot_id|>",
        strips=True,
    ),
}


def form_of(chat: Chat, start: str | None) -> str:
    """Returns a text of two turns: a {prompt} and its {response}.

    Args:
        chat: The form of the turns.
        start: The token that begins a text, or None.
    """
    prompt = chat.turn.replace("{role}", "user").replace("{text}", "{prompt}")
    response = chat.turn.replace("{role}", chat.assistant).replace("{text}", "{response}")
    return (start or "") + prompt + chat.between + response


def last_text(prompt: Prompt) -> str:
    """Returns a prompt that is a text, or what the last turn of a chat says."""
    return prompt if isinstance(prompt, str) else prompt[-1][1]


def problem_of(template: str) -> str | None:
    """Returns the problem of a `--template`, or None if it is valid."""
    if template in ("auto", "chat"):
        return None
    counts = [template.count(name) for name in ("{prompt}", "{response}")]
    if counts == [1, 1] and template.find("{prompt}") < template.find("{response}"):
        return None
    return "must be auto, chat, or have {prompt} and then {response}, each once"


def find_chat(tokenizer) -> str | None:
    """Returns the name in `CHATS` whose special tokens a KerasNLP tokenizer has, or None."""
    known = set(tokenizer.get_vocabulary())
    return next((name for name, chat in CHATS.items() if known.issuperset(chat.markers)), None)


def choose(template: str, preset: str | None, tokenizer) -> tuple[str, str | None]:
    """Chooses the template that `auto` and `chat` stand for.

    `auto` takes the template of the run that saved the preset, or the turns of a chat for a preset
    whose name says that it knows them (instruct, it, chat) and whose tokenizer has them, otherwise
    `TEXT`: base models may have untrained tokens.

    Args:
        template: The option.
        preset: A name, a handle or a folder; None for a new model.
        tokenizer: Its KerasNLP tokenizer.

    Returns:
        A text with {prompt} and {response}, or a name in `CHATS`; and a line that says what was
        chosen, or None.

    Raises:
        DataError: `chat`, and the tokenizer has the tokens of no chat.
    """
    if template not in ("auto", "chat"):
        return template, None
    chat = find_chat(tokenizer)
    if template == "chat":
        if chat is None:
            raise DataError(
                f"--template chat: the tokenizer of {preset or 'a new model'} has none of the "
                f"tokens of known chats ({', '.join(c.end for c in CHATS.values())}); pass a text "
                "with {prompt} and {response}"
            )
        return chat, None
    if not preset:
        return TEXT, None
    learned = _of_the_run(preset)
    if learned is not None:
        return learned, f"template: {learned!r}, that of the run that saved {preset}"
    if not _named_for_chats(preset):
        hint = "the tokenizer also has a chat's tokens; --template chat uses them" if chat else None
        return TEXT, hint
    if chat is None:
        return TEXT, f"template: {TEXT!r}, since the tokenizer has the tokens of no known chat"
    return chat, f"template: the turns of {chat}, by the preset's name; --template overrides it"


def _of_the_run(preset: str) -> str | None:
    """Returns the template that the model of a run was trained with, or None."""
    template = files.json_object(files.expand(preset) / files.METADATA).get("template")
    if not isinstance(template, str) or template in ("auto", "chat"):
        return None
    return template if template in CHATS or problem_of(template) is None else None


def _named_for_chats(preset: str) -> bool:
    parts = re.split(r"[/\\]", preset.rstrip("/\\"))
    while len(parts) > 1 and parts[-1].isdigit():  # a version
        parts.pop()
    return bool({"instruct", "it", "chat"} & set(re.split(r"[^a-z0-9]+", parts[-1].lower())))


class Template:
    """Makes the tokens of prompts and responses.

    The special tokens of a chat become their ids, whatever the tokenizer makes of their names in a
    text; a prompt or response with such a name, or that of another special token of the model, is
    rejected, so that it cannot end its own turn.

    Args:
        template: A text with {prompt} and {response}, or a name in `CHATS`.
        tokenizer: A KerasNLP tokenizer.

    Attributes:
        end: The token that ends a response.
    """

    def __init__(self, template: str, tokenizer):
        ends = Ends.of(tokenizer)
        self.tokenizer, self.chat = tokenizer, CHATS.get(template)
        self.start = [] if ends.start is None else [ends.start]
        self.before, _, self.after = template.partition("{response}")
        self.end, self.markers, self.refused = ends.end, {}, {}
        if self.chat is not None:
            self.after = ""
            self.markers = {name: int(tokenizer.token_to_id(name)) for name in self.chat.markers}
            self.end = self.markers[self.chat.end]
            self.refused = dict.fromkeys(names_in_text(tokenizer), "model")
            self.refused |= dict.fromkeys(self.markers, "template")

    def prompt(self, prompt: Prompt) -> list[int]:
        """Returns the tokens before the response to a prompt, the document's start included.

        Raises:
            DataError: as `examples`.
        """
        ((ids, _),) = self._tokenised([self._of_prompt(prompt)])
        return ids

    def response(self, text: str) -> list[int]:
        """Returns the tokens of a response with what follows it, and the one that ends it.

        Raises:
            DataError: the response of a chat contains a special token.
        """
        ((ids, _),) = self._tokenised([self._of_response(text)])
        return ids

    def examples(
        self, pairs: Iterable[tuple[Prompt, str]]
    ) -> Iterator[tuple[list[int], list[bool]]]:
        """Yields the tokens of each prompt with its response, and which of them are predicted.

        Those are the response and the assistant's earlier turns, each with the token that ends it,
        except the turns whose role is `NOT_PREDICTED`.

        Args:
            pairs: Prompts and responses; reads `EXAMPLES_AT_ONCE` of them at a time.

        Raises:
            DataError: a text of a chat contains a special token, or the template is none of a
                chat and the prompt has several turns.
        """
        pairs = iter(pairs)
        while block := list(itertools.islice(pairs, EXAMPLES_AT_ONCE)):
            yield from self._tokenised(
                [
                    self._of_prompt(prompt) + self._of_response(response)
                    for prompt, response in block
                ]
            )

    def _of_prompt(self, prompt: Prompt) -> list[Part]:
        turns = (("user", prompt),) if isinstance(prompt, str) else prompt
        chat = self.chat
        parts: list[Part] = [(self.start, False)]
        if chat is None:
            if [role for role, _ in turns] != ["user"]:
                raise DataError(
                    "a system message or several turns need a chat's template: train with "
                    "--template chat"
                )
            text = self.before.replace("{prompt}", self._checked(turns[0][1]))
            return parts + self._with_markers(text)
        text = ""  # before the next response
        opening = chat.turn.partition("{text}")[0].replace("{role}", chat.assistant)
        system = ""
        for role, said in turns:
            said = self._checked(said)
            if role == "system" and not chat.has_system:
                system = f"{said}\n\n"
            elif role in ("assistant", NOT_PREDICTED):
                response = self._of_response(said)
                if role == NOT_PREDICTED:
                    response = [(part, False) for part, _ in response]
                parts += self._with_markers(text + opening) + response
                text = chat.between
            else:
                turn = chat.turn.replace("{role}", role).replace("{text}", system + said)
                text, system = text + turn + chat.between, ""
        return parts + self._with_markers(text + opening)

    def _of_response(self, text: str) -> list[Part]:
        return [(self._checked(text) + self.after, True), ([self.end], True)]

    def _with_markers(self, text: str) -> list[Part]:
        pattern = "|".join(map(re.escape, self.markers))
        texts = re.split(f"({pattern})", text) if pattern else [text]
        return [
            ([self.markers[each]] if each in self.markers else each, False)
            for each in texts
            if each
        ]

    def _tokenised(self, examples: list[list[Part]]) -> Iterator[tuple[list[int], list[bool]]]:
        """Yields the tokens of each example, and which are predicted; calls the tokenizer once."""
        parts = itertools.chain.from_iterable(examples)
        texts = list(dict.fromkeys(part for part, _ in parts if isinstance(part, str) and part))
        ids_of: dict[str, list[int]] = {"": []}
        if texts:
            ids_of |= zip(texts, as_lists(self.tokenizer(texts)), strict=True)
        for example in examples:
            ids: list[int] = []
            predicted: list[bool] = []
            for part, is_predicted in example:
                new = ids_of[part] if isinstance(part, str) else part
                ids += map(int, new)
                predicted += [is_predicted] * len(new)
            yield ids, predicted

    def _checked(self, text: str) -> str:
        for name, whose in self.refused.items():
            if name in text:
                raise DataError(f"{name} is a special token of the {whose}: {text[:60]!r}")
        return text.strip() if self.chat is not None and self.chat.strips else text
