"""Templates of chats for `transformers`, compared with `data.templates.Template`."""

import json

import pytest

from data.templates import CHATS, Template
from exports import huggingface
from tests.support import causal_presets

# Chat: family of a model, and special tokens of its vocabulary.
FAMILIES = {
    "llama3": ("Llama3", causal_presets.BYTE_PAIRS["Llama3"]),
    "chatml": ("Qwen", ("<|endoftext|>", *CHATS["chatml"].markers)),
    "gemma": ("GPT2", ("<|endoftext|>", *CHATS["gemma"].markers)),
}
TALKS = (
    [("user", "the loss of a step")],
    [("user", "a good\nfilm "), ("assistant", "Paris is."), ("user", "{text} \\n 'x' \"y\"")],
    [("system", "the mean "), ("user", "of tokens")],
    [("system", "of"), ("user", "a"), ("assistant", "is"), ("user", "all")],
)


def make_task(name, monkeypatch):
    family, special = FAMILIES[name]
    monkeypatch.setitem(causal_presets.BYTE_PAIRS, family, special)
    return causal_presets.make_task(family)


def stops_of(folder):
    return json.loads((folder / "generation_config.json").read_text())["eos_token_id"]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_chat_is_shown_and_ends_with_its_turns(name, monkeypatch, tmp_path):
    task = make_task(name, monkeypatch)
    lines = huggingface.write_causal_lm(task, tmp_path / "out", name)
    assert "tokenizer.apply_chat_template(messages, add_generation_prompt=True)" in lines
    shown = repr(CHATS[name].turn.replace("{role}", "user").replace("{text}", "{prompt}"))
    assert shown[1:-1] in lines and f"'{name}'" not in lines
    tokenizer = task.preprocessor.tokenizer
    stops = stops_of(tmp_path / "out")
    assert {tokenizer.token_to_id(CHATS[name].end), tokenizer.end_token_id} <= set(stops)


def test_a_text_ends_with_its_end_token(tmp_path):
    task = causal_presets.make_task("GPT2")
    huggingface.write_causal_lm(task, tmp_path / "text")
    huggingface.write_causal_lm(task, tmp_path / "prompts", "{prompt}\n{response}")
    end = task.preprocessor.tokenizer.end_token_id
    assert stops_of(tmp_path / "text") == stops_of(tmp_path / "prompts") == [end]


@pytest.mark.export
@pytest.mark.parametrize("name", FAMILIES)
def test_messages_have_the_tokens_of_training(name, monkeypatch, tmp_path):
    import transformers

    task = make_task(name, monkeypatch)
    huggingface.write_causal_lm(task, tmp_path / "out", name)
    there = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    template = Template(name, task.preprocessor.tokenizer)
    for turns in TALKS:
        messages = [{"role": role, "content": text} for role, text in turns]
        found = there.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert found == template.prompt(tuple(turns)), turns
        answered = [*messages, {"role": "assistant", "content": "Paris is."}]
        found = there.apply_chat_template(answered, return_dict=False)
        assert found == template.prompt(tuple(turns)) + template.response("Paris is.")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert template.end in model.generation_config.eos_token_id
