import json
import types

import keras
import keras_nlp
import numpy as np
import pytest
import tensorflow as tf

from data.errors import DataError
from data.templates import Template
from models import decoders, presets, samplers
from models.chunked_head import ChunkedHead
from tests.support import causal_presets
from training import numerics

# Learned positions and rotary ones; the others in `make check-long`.
QUICK = ("GPT2", "OPT", "Llama3")
SHARING = [
    pytest.param(family, marks=() if family in QUICK else pytest.mark.long)
    for family in causal_presets.FAMILIES
    if family not in causal_presets.OWN_ROWS
]
NEW = dict(num_layers=2, num_heads=2, hidden_dim=32, dropout=None, sequence_length=8)
PROMPTS = ["the loss of", "a good film was", "Paris"]


def tokens(count=2, length=10):
    return np.random.default_rng(0).integers(5, 200, (count, length)).astype(np.int32)


def answers(model, ids, documents):
    return np.array(model({"token_ids": ids, "padding_mask": np.array(documents, np.int32)}))


@pytest.fixture(scope="module")
def gpt2():
    return causal_presets.make_task("GPT2")


@pytest.mark.long
@pytest.mark.parametrize("family", SHARING)
def test_documents_of_a_row_are_as_if_each_were_alone(family):
    task = causal_presets.make_task(family)
    assert decoders.can_share_rows(task)
    ids = tokens()
    found = answers(decoders.apart(task.backbone), ids, [[1] * 4 + [2] * 6, [1] * 7 + [0] * 3])
    parts = ((0, slice(0, 4)), (0, slice(4, 10)), (1, slice(0, 7)))
    for row, part in parts:
        alone = answers(
            task.backbone, ids[row : row + 1, part], np.ones((1, part.stop - part.start))
        )
        # Rotations round differently in float32.
        np.testing.assert_allclose(found[row, part], alone[0], atol=1e-4)
    together = answers(task.backbone, ids, np.ones_like(ids))
    assert np.abs(together[0, 4:] - found[0, 4:]).max() > 0.1


@pytest.mark.long
@pytest.mark.parametrize("family", ["GPT2", pytest.param("Llama3", marks=pytest.mark.long)])
def test_chunks_train_as_the_stock_head_does(family):
    """Tied embeddings, and others; dropout draws the same."""
    ids, logs, changes = tokens(4, 12), [], dict(dropout=0.3) if family == "GPT2" else {}
    weights = np.ones(ids.shape, "float32")
    weights[:, 8:] = 0
    for chunked in (True, False):
        task = causal_presets.make_task(family, **changes)
        task.preprocessor = None
        model = decoders.learner(task) if chunked else task
        assert isinstance(model, ChunkedHead) == chunked
        model.compile(
            optimizer=keras.optimizers.SGD(0.5),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            weighted_metrics=[keras.metrics.SparseCategoricalAccuracy("accuracy")],
        )
        x = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
        steps = [model.train_on_batch(x, np.roll(ids, -1, axis=1), weights) for _ in range(3)]
        logs.append(steps)
    np.testing.assert_allclose(*logs, rtol=1e-4)
    assert np.ptp([loss for loss, _ in logs[0]]) > 0.01


def test_a_model_with_more_than_a_plain_head_is_trained_itself():
    for family, changes in (("QwenMoe", {}), ("Gemma", dict(final_logit_soft_cap=30))):
        task = causal_presets.make_task(family, **changes)
        assert decoders.learner(task) is task and not decoders.can_share_rows(task)


@pytest.mark.long
def test_a_linear_layer_reads_the_documents_before_its_own():
    """Although it takes an attention mask."""
    task = causal_presets.make_task("Qwen3_5")
    assert not decoders.can_share_rows(task)
    ids = tokens(1, 10)
    found = answers(decoders.apart(task.backbone), ids, [[1] * 4 + [2] * 6])
    alone = answers(task.backbone, ids[:, 4:], np.ones((1, 6)))
    assert np.abs(found[0, 4:] - alone[0]).max() > 0.01


def test_a_router_s_loss_needs_whole_batches():
    """It differs from the mean over the batch's halves, so these are refused."""
    task = causal_presets.make_task("QwenMoe", router_aux_loss_coefficient=1.0)
    ids = tokens(4, 12)

    def loss(ids):
        task({"token_ids": ids, "padding_mask": np.ones_like(ids)}, training=True)
        return float(sum(task.losses))

    assert abs(loss(ids) - (loss(ids[:2]) + loss(ids[2:])) / 2) > 1e-4
    decoders.require_whole_batches(task, 1)
    with pytest.raises(DataError, match="QwenMoeCausalLM: .* adds a loss.* --strategy none"):
        decoders.require_whole_batches(task, 2)


@pytest.mark.parametrize("task", decoders.REFUSED)
def test_a_family_that_cannot_be_trained_is_refused(task):
    assert hasattr(keras_nlp.models, task)
    with pytest.raises(DataError, match=f"preset p: {task[:-8]} .* here: .*[a-z]"):
        decoders.require_family("p", task)


def test_a_preset_that_also_takes_images_is_refused(tmp_path, monkeypatch):
    """Its rows would lack the images, after the weights were downloaded."""
    causal_presets.make_task("Llama3").save_to_preset(str(tmp_path / "preset"))
    stock = presets.load_task

    def with_images(*arguments, **changes):
        task = stock(*arguments, **changes)
        backbone = task.backbone
        images = keras.Input((8, 8, 3), name="images")
        inputs = backbone.input | {"images": images}
        both = keras.Model(inputs, backbone(backbone.input))
        return types.SimpleNamespace(backbone=both)

    monkeypatch.setattr(presets, "load_task", with_images)
    with pytest.raises(DataError, match="takes images too; pass a preset for text alone"):
        decoders.load_task(str(tmp_path / "preset"), None, 8)


@pytest.mark.parametrize("precision", ["float64", "mixed_bfloat16"])
def test_a_family_that_fails_in_a_precision_is_refused_there(precision, tmp_path):
    causal_presets.make_task("QwenMoe").save_to_preset(str(tmp_path / "preset"))
    preset = str(tmp_path / "preset")
    with numerics.precision(precision):
        with pytest.raises(
            DataError, match=f"QwenMoe fails in {precision}; pass --precision float32"
        ):
            decoders.load_preprocessor(preset, 8)
    decoders.load_preprocessor(preset, 8)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_kernels_of_a_new_model_have_a_variance_of_one_over_their_inputs(architecture):
    """Each is drawn by itself; KerasHub draws several of a Llama's equal."""
    keras.utils.set_random_seed(0)
    options = types.SimpleNamespace(architecture=architecture, **NEW)
    kernels = [
        (weight.path, keras.ops.convert_to_numpy(weight))
        for weight in decoders.new_task(options, 300).weights
        if weight.path.endswith("/kernel")
    ]
    assert len(kernels) == 2 * (6 if architecture == "gpt2" else 7)
    for path, kernel in kernels:
        inputs = kernel.size // kernel.shape[-1] if "output" in path else kernel.shape[0]
        assert kernel.std() == pytest.approx(inputs**-0.5, rel=0.1), path
    assert len({kernel.std() for _, kernel in kernels}) == len(kernels)


def test_tokens_of_a_new_gpt2_begin_as_openai_s():
    options = types.SimpleNamespace(architecture="gpt2", **NEW)
    embeddings = decoders.new_task(options, 300).backbone.token_embedding.embeddings
    assert keras.ops.convert_to_numpy(embeddings).std() == pytest.approx(0.02, rel=0.05)


class TestSampler:
    LOGITS = tf.math.log([[0.4, 0.3, 0.2, 0.1]])

    def drawn(self, count=2000, **settings):
        sampler = samplers.Sampler(**settings)

        @tf.function
        def draw():
            def largest(place):
                return tf.argmax(sampler.with_noise(self.LOGITS, place, tf.constant([5]))[0])

            return tf.map_fn(largest, tf.range(count), fn_output_signature=tf.int64)

        return draw().numpy().tolist()

    def shares(self, **settings):
        return np.bincount(self.drawn(**settings), minlength=4) / 2000

    def test_it_draws_from_the_softmax(self):
        np.testing.assert_allclose(self.shares(), [0.4, 0.3, 0.2, 0.1], atol=0.04)
        expected = np.array([0.16, 0.09, 0.04, 0.01]) / 0.3
        np.testing.assert_allclose(self.shares(temperature=0.5), expected, atol=0.04)

    def test_among_the_likeliest(self):
        np.testing.assert_allclose(self.shares(top_k=2), [4 / 7, 3 / 7, 0, 0], atol=0.04)
        np.testing.assert_allclose(self.shares(top_p=0.65), [4 / 7, 3 / 7, 0, 0], atol=0.04)
        np.testing.assert_allclose(self.shares(top_p=0.75), [4 / 9, 3 / 9, 2 / 9, 0], atol=0.04)
        assert self.shares(top_p=0.01)[0] == self.shares(top_k=1)[0] == 1

    def test_the_noise_is_finite(self, monkeypatch):
        """For the largest and the smallest random number."""
        numbers = tf.constant([[1 - 2.0**-24, 0.0, 0.5, 1 - 2.0**-24]])
        monkeypatch.setattr(samplers.batches, "uniform", lambda *_: numbers)
        found = samplers.Sampler(top_k=2).with_noise(self.LOGITS, 0, tf.constant([5])).numpy()
        assert np.isfinite(found[0, :2]).all() and np.isneginf(found[0, 2:]).all()
        assert found[0].argmax() == 0

    def test_a_temperature_next_to_zero_draws_nothing(self):
        assert samplers.Sampler(temperature=1e-39).scale == 0
        assert samplers.Sampler(temperature=1e-6).scale == 1e-6

    def test_seeds_draw_differently(self):
        assert self.drawn(40, seed=0) == self.drawn(40) != self.drawn(40, seed=1)


@pytest.mark.long
def test_a_text_is_the_same_alone_and_in_a_batch(gpt2):
    sampler = samplers.Sampler(temperature=0.7, top_k=30, top_p=0.9, seed=3)

    def texts(prompts, **settings):
        return decoders.generate(
            gpt2, gpt2.preprocessor, prompts, max_length=16, sampler=sampler, **settings
        )

    together = texts(PROMPTS)
    assert [texts([prompt])[0] for prompt in PROMPTS] == together == texts(PROMPTS)
    for prompt, text in zip(PROMPTS, together, strict=True):
        assert text.startswith(prompt) and "endoftext" not in text
    stripped = texts(PROMPTS, strip_prompt=True)
    assert [prompt + text for prompt, text in zip(PROMPTS, stripped, strict=True)] == together
    assert gpt2.preprocessor is not None


@pytest.mark.long
@pytest.mark.parametrize("family", ["Llama", "Qwen"])
def test_a_row_without_a_token_is_never_generated(family):
    """Presets have rows that no token has; SentencePiece cannot name them."""
    tokens = causal_presets.make_tokenizer(family).vocabulary_size()
    task = causal_presets.make_task(family, tie_word_embeddings=False)
    more = causal_presets.make_task(family, vocabulary_size=tokens + 37, tie_word_embeddings=False)
    for weight, full in zip(task.weights, more.weights, strict=True):
        values = np.array(full)
        rows = values.T if "reverse" in full.path else values
        if len(rows) > tokens:
            rows[tokens:] *= 100
            rows[:tokens] = np.array(weight).T if "reverse" in full.path else weight
        else:
            values[:] = weight
        full.assign(values)
    for settings in (dict(temperature=0.0), dict(temperature=5.0)):
        few, many = (
            decoders.generate(
                each,
                each.preprocessor,
                PROMPTS,
                max_length=24,
                sampler=samplers.Sampler(**settings),
            )
            for each in (task, more)
        )
        assert few == many


SLIDING = dict(use_sliding_window_attention=True, sliding_window_size=causal_presets.WINDOW)
GENERATING = {family: (family, {}) for family in causal_presets.FAMILIES} | {
    "sliding Qwen": ("Qwen", SLIDING),
    "sliding QwenMoe": ("QwenMoe", SLIDING),
    "untied Qwen3": ("Qwen3", dict(tie_word_embeddings=False)),
    "tied Llama3": ("Llama3", dict(tie_word_embeddings=True)),
}


@pytest.mark.long
@pytest.mark.parametrize("name", GENERATING)
def test_a_generated_token_is_the_likeliest_of_a_forward_pass(name, monkeypatch):
    """A cache changes no text, also beyond a sliding window."""
    family, sizes = GENERATING[name]
    task = causal_presets.make_task(family, **sizes)
    generated = {}
    monkeypatch.setattr(
        task.preprocessor, "generate_postprocess", lambda found: generated.update(found) or []
    )
    decoders.generate(
        task,
        task.preprocessor,
        PROMPTS,
        max_length=32,
        sampler=samplers.Sampler(temperature=0.0),
    )
    ids, is_text = (np.array(generated[name]) for name in ("token_ids", "padding_mask"))
    logits = answers(task, ids, is_text)[:, :-1]
    likeliest, drawn = logits.max(axis=-1), np.take_along_axis(logits, ids[:, 1:, None], -1)[..., 0]
    tokenizer, count = task.preprocessor.tokenizer, 0
    for row, prompt in enumerate(PROMPTS):
        start = len(decoders.prompt_tokens(prompt, tokenizer))
        new = slice(start - 1, is_text[row].sum() - 1)
        np.testing.assert_allclose(drawn[row, new], likeliest[row, new], atol=1e-4)
        count += new.stop - new.start
    assert count > 2 * causal_presets.WINDOW


@pytest.mark.long
def test_a_temperature_next_to_zero_takes_the_likeliest_token(gpt2):
    """Divided by such a number, logits would be infinite."""
    coldest, almost = (
        decoders.generate(
            gpt2,
            gpt2.preprocessor,
            PROMPTS,
            max_length=16,
            sampler=samplers.Sampler(temperature=temperature, seed=3),
        )
        for temperature in (0.0, 1e-39)
    )
    assert almost == coldest


def test_the_end_of_a_template_is_no_answer(gpt2, monkeypatch):
    template = Template("Q: {prompt} A: {response} ###", gpt2.preprocessor.tokenizer)
    said = {"the loss": "is low ###", "loss the": "## ###  low"}
    monkeypatch.setattr(
        gpt2.preprocessor, "generate_postprocess", lambda outputs: list(said.values())
    )
    settings = dict(max_length=32, sampler=samplers.Sampler(), strip_prompt=True, template=template)
    assert decoders.generate(gpt2, gpt2.preprocessor, list(said), **settings) == [
        "is low",
        "## ###  low",
    ]


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ((), "one # two ## three"),
        (("##",), "one # two "),
        (("four",), "one # two ## three"),
        (("three", "two"), "one # "),
        (("#", "# t"), "one "),
        (("##", " ##"), "one # two"),
        ((" two ## three", "## t"), "one # two "),
    ],
)
def test_a_text_ends_before_the_stop_string_that_is_complete_first(stop, expected):
    text = "one # two ## three"
    assert decoders.before_stop(text, stop) == expected
    assert decoders.before_stop(f"{text}, {text}", stop, 20) == f"{text}, {expected}"


@pytest.mark.parametrize(
    ("family", "stop", "tokens"),
    [
        ("GPT2", ("#", "##", "a"), {"#", "a"}),
        ("Llama3", ("#", "<|start_header_id|>"), {"#", "<|start_header_id|>"}),
        # A word's beginning, which reads "t" at the beginning of a text and " t" elsewhere.
        ("Llama", ("t", " o", "①", "\n"), {"▁t"}),
    ],
)
def test_stop_strings_that_are_one_token_end_texts(family, stop, tokens):
    tokenizer = causal_presets.make_tokenizer(family)
    stock = decoders.stop_tokens(tokenizer)
    found = decoders.stop_tokens(tokenizer, stop) - stock
    assert {tokenizer.id_to_token(token) for token in found} == tokens


@pytest.mark.long
def test_a_continuation_ends_before_a_stop_string(gpt2, monkeypatch):
    """Decoding ends there too where it is one token, which changes no text."""
    preprocessor, sampler = gpt2.preprocessor, samplers.Sampler(temperature=0.8, seed=2)
    tokenizer, postprocess, seen = preprocessor.tokenizer, preprocessor.generate_postprocess, []
    monkeypatch.setattr(
        preprocessor,
        "generate_postprocess",
        lambda outputs: seen.append(np.array(outputs["token_ids"])) or postprocess(outputs),
    )
    asked = PROMPTS[:2]

    def texts(stop, **settings):
        del seen[:]
        settings |= dict(max_length=20, sampler=sampler, stop=stop)
        return decoders.generate(gpt2, preprocessor, asked, **settings)

    whole = texts(())
    written = [text.removeprefix(prompt) for text, prompt in zip(whole, asked, strict=True)]
    ids = seen[0]
    begins = [len(decoders.prompt_tokens(prompt, tokenizer)) for prompt in asked]
    several = (written[0][5:9], written[1][3:6], "the", "never written")
    stock = decoders.stop_tokens(tokenizer)
    tokens = tuple(
        next(
            text
            for token in row[begin + 1 : -1].tolist()
            if decoders.stop_tokens(tokenizer, [text := tokenizer.detokenize([token])]) > stock
        )
        for row, begin in zip(ids, begins, strict=True)
    )
    for stop in (several, tokens):
        expected = [
            prompt + decoders.before_stop(text, stop)
            for prompt, text in zip(asked, written, strict=True)
        ]
        assert texts(stop) == expected
        assert all(a != b for a, b in zip(expected, whole, strict=True))
        assert (seen[0] == ids).all() == (stop == several)
        answers = texts(stop, strip_prompt=True)
        assert [p + a for p, a in zip(asked, answers, strict=True)] == expected


@pytest.mark.long
@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_a_stop_string_is_not_looked_for_in_the_prompt(family):
    task = causal_presets.make_task(family)

    def texts(*stop):
        sampler = samplers.Sampler(temperature=0.8, seed=2)
        settings = dict(max_length=32, sampler=sampler, stop=stop)
        return decoders.generate(task, task.preprocessor, PROMPTS, **settings)

    for prompt, text in zip(PROMPTS, whole := texts(), strict=True):
        assert text.startswith(prompt)
        stop = (prompt[-1], text[len(prompt) + 4 : len(prompt) + 5] or "x")
        assert texts(*stop) == [
            decoders.before_stop(each, stop, len(begun))
            for each, begun in zip(whole, PROMPTS, strict=True)
        ]


@pytest.mark.long
def test_different_prompts_are_continued_by_different_draws(gpt2):
    """Of a model that knows nothing: all tokens are as likely. A shorter text begins alike."""
    before = gpt2.get_weights()
    gpt2.set_weights([np.zeros_like(weights) for weights in before])

    def drawn(max_length):
        sampler, prepared = samplers.Sampler(seed=1), gpt2.preprocessor
        settings = dict(max_length=max_length, sampler=sampler, strip_prompt=True)
        return decoders.generate(gpt2, prepared, ["the loss", "loss the", "the loss"], **settings)

    try:
        first, swapped, again = drawn(16)
        assert first == again and len(set(first) & set(swapped)) < len(set(first))
        assert first != swapped and all(map(str.startswith, (first, swapped), drawn(12)[:2]))
    finally:
        gpt2.set_weights(before)


def test_prompts_without_room_are_refused(gpt2):
    def generate(prompt, max_length):
        sampler = samplers.Sampler(temperature=0)
        decoders.generate(gpt2, gpt2.preprocessor, [prompt], max_length=max_length, sampler=sampler)

    with pytest.raises(DataError, match="--max-length 65: the model takes at most 64 tokens"):
        generate("a", 65)
    with pytest.raises(DataError, match="tokens leave no room for more within 4: 'the loss of a"):
        generate("the loss of a step", 4)


def test_tied_embeddings_of_a_llama_stay_tied(tmp_path):
    """KerasHub leaves the option out of the configuration that it saves."""
    task = causal_presets.make_task("Llama3", tie_word_embeddings=True)
    task.save_to_preset(str(tmp_path / "first"))
    with pytest.raises(
        DataError, match='add "tie_word_embeddings": true to the "config" of'
    ) as said:
        decoders.load_task(str(tmp_path / "first"), None, 16)
    assert "\n" not in str(said.value)
    for name in ("config.json", "task.json"):
        path = tmp_path / "first" / name
        config = json.loads(path.read_text())
        inner = config["config"].get("backbone", config)["config"]
        assert "tie_word_embeddings" not in inner, "no longer needed"
        inner["tie_word_embeddings"] = True
        path.write_text(json.dumps(config))
    loaded = decoders.load_task(str(tmp_path / "first"), None, 16)
    loaded.preprocessor = task.preprocessor
    loaded.save_to_preset(str(tmp_path / "second"))
    again = keras_nlp.models.CausalLM.from_preset(str(tmp_path / "second"))
    ids = tokens()
    expected = answers(task, ids, np.ones_like(ids))
    np.testing.assert_allclose(answers(again, ids, np.ones_like(ids)), expected, atol=1e-5)


def test_a_preset_of_another_task_or_too_short_is_refused(gpt2, tmp_path):
    gpt2.save_to_preset(str(tmp_path / "gpt2"))
    with pytest.raises(DataError, match="--sequence-length 65: .* takes at most 64 tokens"):
        decoders.load_task(str(tmp_path / "gpt2"), None, 65)
    with pytest.raises(DataError, match="has no CausalLM in KerasNLP"):
        decoders.load_preprocessor("bert_tiny_en_uncased", 16)
    with pytest.raises(DataError, match="neither a folder nor a name"):
        decoders.load_preprocessor("nothing_of_the_kind", 16)
