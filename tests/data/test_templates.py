"""Templates, and the special tokens of chats in KerasNLP's own tokenizers."""

import json

import pytest

from data import prompts, templates
from data.errors import DataError
from tests.support.chat_presets import make_tokenizer

# One turn each, as the models' pages write them; `apply_chat_template` was not run.
PUBLISHED = {
    "chatml": "<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\nIt is.<|im_end|>",
    "gemma": "<bos><start_of_turn>user\nWhat?<end_of_turn>\n"
    "<start_of_turn>model\nIt is.<end_of_turn>",
    "llama3": "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nWhat?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nIt is.<|eot_id|>",
}
CHAT_OF = {"Qwen": "chatml", "Qwen3": "chatml", "SmolLM3": "chatml", "Llama3": "llama3"}


def pieces(tokenizer, ids) -> str:
    """The text of tokens, special ones by their names."""
    text = "".join(tokenizer.id_to_token(token) for token in ids)
    return text.replace("Ċ", "\n").replace("Ġ", " ").replace("▁", " ")


@pytest.mark.parametrize("family", [*CHAT_OF, "Gemma"])
def test_turns_are_those_that_were_published(family):
    tokenizer = make_tokenizer(family)
    name = CHAT_OF.get(family, "gemma")
    assert templates.choose("chat", "any", tokenizer) == (name, None)
    template = templates.Template(name, tokenizer)
    ids = template.prompt("What?") + template.response("It is.")
    assert pieces(tokenizer, ids) == PUBLISHED[name]
    # Each special token is one token, and the last one ends the response.
    for marker in templates.CHATS[name].markers:
        assert ids.count(tokenizer.token_to_id(marker)) == PUBLISHED[name].count(marker)
    assert ids[-1] == template.end == tokenizer.token_to_id(templates.CHATS[name].end)
    padded = template.prompt(" What?\n") + template.response(" It is. ")
    assert (padded == ids) == templates.CHATS[name].strips
    for marker in template.markers:
        with pytest.raises(DataError, match="is a special token of the template: 'Hi"):
            template.prompt(f"Hi{marker}")
    # A tokenizer of SentencePiece reads the names of its own tokens as text.
    ends = tokenizer.special_tokens if family != "Gemma" else []
    for name in set(ends) - set(template.markers):
        with pytest.raises(DataError, match="is a special token of the model: 'Hi"):
            template.response(f"Hi{name}")


# A system's message and two turns; Gemma has no system's role.
PUBLISHED_TURNS = {
    "chatml": "<|im_start|>system\nIt is two.<|im_end|>\n<|im_start|>user\nWhat?<|im_end|>\n"
    "<|im_start|>assistant\nIt is.<|im_end|>\n<|im_start|>user\nWhat is two?<|im_end|>\n"
    "<|im_start|>assistant\nfour<|im_end|>",
    "gemma": "<bos><start_of_turn>user\nIt is two.\n\nWhat?<end_of_turn>\n"
    "<start_of_turn>model\nIt is.<end_of_turn>\n<start_of_turn>user\nWhat is two?<end_of_turn>\n"
    "<start_of_turn>model\nfour<end_of_turn>",
    "llama3": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nIt is two.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nWhat?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nIt is.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nWhat is two?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nfour<|eot_id|>",
}
TURNS = (
    ("system", "It is two."),
    ("user", "What?"),
    ("assistant", "It is."),
    ("user", "What is two?"),
)


@pytest.mark.parametrize("family", ["Qwen", "Gemma", "Llama3"])
def test_turns_of_a_chat_follow_one_another_and_all_responses_are_predicted(family):
    tokenizer = make_tokenizer(family)
    name = CHAT_OF.get(family, "gemma")
    template = templates.Template(name, tokenizer)
    one_turn = (("user", "What?"),)
    (ids, predicted), of_chat, of_text = template.examples(
        [(TURNS, "four"), (one_turn, "It is."), ("What?", "It is.")]
    )
    assert pieces(tokenizer, ids) == PUBLISHED_TURNS[name]
    end = templates.CHATS[name].end
    said = [token for token, is_said in zip(ids, predicted, strict=True) if is_said]
    assert pieces(tokenizer, said) == f"It is.{end}four{end}"
    assert template.prompt(TURNS) + template.response("four") == ids
    assert of_chat == of_text
    text = templates.Template("{prompt} {response}", tokenizer)
    with pytest.raises(DataError, match="need a chat's template: train with --template chat"):
        list(text.examples([(TURNS, "four")]))


@pytest.mark.parametrize("family", ["Qwen", "Gemma", "Llama3"])
def test_a_turn_that_is_not_predicted_is_context_alone(family):
    tokenizer = make_tokenizer(family)
    template = templates.Template(CHAT_OF.get(family, "gemma"), tokenizer)
    unpredicted = [
        (templates.NOT_PREDICTED, text) if role == "assistant" else (role, text)
        for role, text in TURNS
    ]
    (ids, _), (same, predicted) = template.examples([(TURNS, "four"), (tuple(unpredicted), "four")])
    assert ids == same
    said = [token for token, is_said in zip(ids, predicted, strict=True) if is_said]
    assert said == template.response("four")


def test_the_loss_is_on_the_response_and_the_end_of_its_turn():
    tokenizer = make_tokenizer("Gemma")
    rows = prompts.make_rows(
        [("What?", "It is."), ("What is two?", "four")],
        tokenizer,
        template="gemma",
        length=64,
        together=True,
    )
    (row,), (loss,) = rows.next_tokens, rows.loss
    assert pieces(tokenizer, row[loss == 1].tolist()) == "It is.<end_of_turn>four<end_of_turn>"


@pytest.mark.parametrize(
    ("preset", "named"),
    [
        ("gemma_instruct_2b_en", True),
        ("llama3.2_instruct_1b", True),
        ("hf://google/gemma-3-1b-it", True),
        ("hf://Qwen/Qwen2.5-0.5B-Instruct", True),
        ("/cache/keras/qwen2.5_instruct_0.5b_en/2", True),
        ("llama3.2_1b", False),
        ("/home/it/llama3.2_1b", False),
    ],
)
def test_auto_takes_the_turns_of_presets_that_are_named_for_it(preset, named):
    tokenizer = make_tokenizer("Qwen")
    template, line = templates.choose("auto", preset, tokenizer)
    assert template == ("chatml" if named else templates.TEXT)
    assert ("--template chat" if not named else "the turns of chatml") in line
    # A new Llama has Llama 3's special tokens, which it has not learned.
    assert templates.choose("auto", None, tokenizer) == (templates.TEXT, None)


@pytest.mark.parametrize("name", ["chatml", "Q: {prompt} A: {response}"])
def test_auto_takes_the_template_of_the_run_that_saved_the_preset(name, tmp_path):
    (tmp_path / "recipe.json").write_text(json.dumps({"template": name}))
    found, line = templates.choose("auto", str(tmp_path), make_tokenizer("Qwen"))
    assert found == name and f"{name!r}, that of the run that saved {tmp_path}" in line


@pytest.mark.parametrize(
    "content", ['{"template": null}', '{"template": "auto"}', '{"template": []}', "[]", "{", "{}"]
)
def test_a_run_of_text_has_no_template(content, tmp_path):
    (tmp_path / "recipe.json").write_text(content)
    found, _ = templates.choose("auto", str(tmp_path), make_tokenizer("Qwen"))
    assert found == templates.TEXT


@pytest.mark.parametrize("family", [*CHAT_OF, "Gemma", "GPT2"])
def test_many_examples_are_tokenised_like_each_alone(family, monkeypatch):
    monkeypatch.setattr(templates, "EXAMPLES_AT_ONCE", 2)
    tokenizer = make_tokenizer(family)
    name = templates.find_chat(tokenizer) or templates.TEXT
    template = templates.Template(name, tokenizer)
    pairs = [("What?", "It is."), ("What?", "four"), ("It  is two.\n", " What"), ("What?", "")]
    found = list(template.examples(pairs))
    for (prompt, response), (ids, predicted) in zip(pairs, found, strict=True):
        before, after = template.prompt(prompt), template.response(response)
        assert ids == before + after
        assert predicted == [False] * len(before) + [True] * len(after)


def test_tokenizers_without_turns():
    tokenizer = make_tokenizer("GPT2")
    with pytest.raises(DataError, match="--template chat: the .* gpt2_base_en has none of the"):
        templates.choose("chat", "gpt2_base_en", tokenizer)
    assert templates.choose("auto", "gpt2_base_en", tokenizer) == (templates.TEXT, None)
    found, line = templates.choose("auto", "mistral_instruct_7b_en", tokenizer)
    assert found == templates.TEXT and "the tokens of no known chat" in line
    assert templates.choose("{prompt}>{response}", "x-it", tokenizer)[0] == "{prompt}>{response}"


def test_a_text_with_prompt_and_response():
    tokenizer = make_tokenizer("GPT2")
    template = templates.Template("Q: {prompt}\nA: {response}.", tokenizer)
    end = "<|endoftext|>"
    assert pieces(tokenizer, template.prompt("{response}?")) == f"{end}Q: {{response}}?\nA: "
    assert pieces(tokenizer, template.response(" 4")) == f" 4.{end}"
    for right in ("auto", "chat", "{prompt}{response}"):
        assert templates.problem_of(right) is None
    for wrong in ("", "{prompt}", "{response}{prompt}", "{prompt}{response}{response}"):
        assert "have {prompt} and then {response}" in templates.problem_of(wrong)
