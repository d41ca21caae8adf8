"""Attention by cuDNN, with a stand-in for the GPU; on one: tests/gpu."""

import types

import keras
import keras_nlp
import numpy as np
import pytest
import tensorflow as tf

from distribution import attention, step
from distribution.keras_compat import attention_layers, fitting, inspection, patches
from tests.support import cudnn

BATCH, PLACES, HEADS, COLUMNS = 4, 6, 2, 8


@pytest.fixture
def gpu(monkeypatch):
    """Puts a stand-in in place of a GPU with cuDNN; returns the names of the calls."""
    names = []

    def custom_call(**named):
        names.append(named["call_target_name"].removeprefix("__cudnn$fmha"))
        return cudnn.custom_call(**named)

    stand_in = types.SimpleNamespace(xla_custom_call_v2=custom_call)
    monkeypatch.setattr(attention, "gen_xla_ops", stand_in)
    monkeypatch.setattr(attention, "has_hopper_gpus", lambda: True)
    attention.works.cache_clear()
    yield names
    attention.works.cache_clear()


def drawn(dtype=tf.bfloat16, places=PLACES, keys=None, columns=COLUMNS):
    generator = np.random.default_rng(0)
    of_keys = (BATCH, keys or places, HEADS, columns)
    shapes = [(BATCH, places, HEADS, columns), of_keys, of_keys]
    return [tf.constant(generator.normal(size=shape), dtype) for shape in shapes]


def with_gradients(function, tensors, *words, **named):
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        found = function(*tensors, *words, **named)
        weights = tf.constant(np.random.default_rng(1).normal(size=found.shape), found.dtype)
        total = tf.reduce_sum(tf.cast(found * weights, tf.float32))
    return [found, *tape.gradient(total, tensors)]


def assert_close(found, expected, tolerance=0.02):
    """Compares the output, and the gradients, by the largest of all gradients."""
    (found, *ours), (expected, *theirs) = (
        [np.asarray(tf.cast(each, tf.float32)) for each in tensors] for tensors in (found, expected)
    )
    assert np.abs(found - expected).max() < tolerance * np.abs(expected).max()
    largest = max((np.abs(each).max() for each in theirs), default=0)
    for one, other in zip(ours, theirs, strict=True):
        assert np.abs(one - other).max() < tolerance * largest


GENERATOR = np.random.default_rng(2)
MASKS = {
    "none": None,
    "of padding": tf.sequence_mask([6, 4, 1, 3], PLACES)[:, None, None],
    "of padding in front": tf.sequence_mask([6, 4, 1, 3], PLACES)[:, None, None, ::-1],
    "of pairs": tf.constant(GENERATOR.random((BATCH, 1, PLACES, PLACES)) < 0.7),
    "for all": tf.constant(GENERATOR.random((1, 1, PLACES, PLACES)) < 0.7),
    "that leaves nothing": tf.sequence_mask([6, 0, 1, 0], PLACES)[:, None, None],
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_it_is_keras_attention(gpu, mask, is_causal):
    tensors = drawn()
    named = {"mask": mask, "is_causal": is_causal}
    found = with_gradients(attention.attention, tensors, **named)
    kind = "Softmax" if mask is None else "ScaleBiasSoftmax"
    assert gpu == [kind, f"{kind}Backward"]
    wide = [tf.cast(each, tf.float32) for each in tensors]
    assert_close(found, with_gradients(keras.ops.dot_product_attention, wide, **named))
    assert {each.dtype for each in found} == {tf.bfloat16}


def test_another_scale_and_precision(gpu):
    tensors = drawn(tf.float16)
    found = with_gradients(attention.attention, tensors, scale=0.3)
    wide = [tf.cast(each, tf.float32) for each in tensors]
    assert_close(found, with_gradients(keras.ops.dot_product_attention, wide, scale=0.3))


def test_xla_takes_the_calls():
    compiled = tf.function(
        lambda *tensors: with_gradients(attention.attention, tensors, mask=MASKS["of padding"]),
        jit_compile=True,
        autograph=False,
    )
    program = compiled.experimental_get_compiler_ir(*drawn())(stage="hlo")
    calls = [line for line in program.splitlines() if "custom-call(" in line]
    forward, backward = (line.partition("custom-call(") for line in calls)
    by_head, statistics = "bf16[4,2,6,8]{3,2,1,0}", "f32[4,2,6]{2,1,0}"
    assert f"({by_head}, {statistics}, u8[0]{{0}})" in forward[0]
    assert f"({by_head}, {by_head}, {by_head}, u8[0]{{0}})" in backward[0]
    assert 'custom_call_target="__cudnn$fmhaScaleBiasSoftmax"' in forward[2]
    assert 'custom_call_target="__cudnn$fmhaScaleBiasSoftmaxBackward"' in backward[2]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"dtype": tf.float16}, True),
        ({"dtype": tf.float32}, False),
        ({"columns": 12}, False),
        ({"columns": 136}, False),
        ({"places": 7}, False),
        ({"keys": 10}, False),
    ],
)
def test_what_it_takes(changes, expected):
    assert attention.takes(*drawn(**changes)) == expected


def test_it_takes_no_open_batch_and_no_mask_of_numbers():
    query, key, value = drawn()
    assert not attention.takes(query, key[:, :, :1], value[:, :, :1])  # grouped heads
    assert not attention.takes(query, key[:1], value[:1])
    assert not attention.takes(query, key, value, tf.ones([4, 1, 6, 6]))
    assert not attention.takes(query, key, value, MASKS["of pairs"][:, 0])
    of_heads = tf.ones([BATCH, HEADS, PLACES, PLACES], tf.bool)
    assert not attention.takes(query, key, value, of_heads)
    took = []

    @tf.function(
        input_signature=[
            tf.TensorSpec([None, *query.shape[1:]], query.dtype),
            tf.TensorSpec([BATCH, None, PLACES, PLACES], tf.bool),
        ]
    )
    def trace(tensor, mask):
        took.append(attention.takes(tensor, tensor, tensor))
        took.append(attention.takes(query, key, value, mask))

    trace.get_concrete_function()
    assert took == [False, False]


def test_a_penalty_of_gradients(gpu):
    """The gradient of a function of gradients."""

    def penalty(function, tensors):
        with tf.GradientTape() as outer:
            outer.watch(tensors)
            with tf.GradientTape() as inner:
                inner.watch(tensors)
                total = tf.reduce_sum(function(*tensors, mask=MASKS["of pairs"]) ** 2)
            gradients = inner.gradient(total, tensors)
            squares = tf.add_n([tf.reduce_sum(each**2) for each in gradients])
        return [tf.reshape(squares, [1]), *outer.gradient(squares, tensors)]

    tensors = drawn()
    wide = [tf.cast(each, tf.float32) for each in tensors]
    expected = penalty(keras.ops.dot_product_attention, wide)
    assert_close(penalty(attention.attention, tensors), expected, 0.05)


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [([], False), ([(9, 0)], True), ([(8, 0)], False), ([(9, 0), (8, 9)], False), ([()], False)],
)
def test_which_gpus_it_was_tried_on(capabilities, expected, monkeypatch):
    def details_of(capability):
        return {"compute_capability": capability} if capability else {}

    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: capabilities)
    monkeypatch.setattr(tf.config.experimental, "get_device_details", details_of)
    assert attention.has_hopper_gpus() == expected


class TestWorks:
    @pytest.mark.long
    def test_where_it_does(self, gpu, caplog):
        assert attention.works("bfloat16") and attention.works("float16")
        assert not attention.works("float32") and not caplog.messages

    def test_no_other_gpu_is_asked(self, gpu, monkeypatch):
        monkeypatch.setattr(attention, "has_hopper_gpus", lambda: False)
        assert not attention.works("bfloat16") and not gpu

    @pytest.mark.long
    def test_wrong_numbers(self, gpu, monkeypatch, caplog):
        stand_in = types.SimpleNamespace(
            xla_custom_call_v2=lambda **named: [
                1.1 * part if part.dtype == tf.bfloat16 else part
                for part in cudnn.custom_call(**named)
            ]
        )
        monkeypatch.setattr(attention, "gen_xla_ops", stand_in)
        assert not attention.works("bfloat16")
        (line,) = caplog.messages
        assert line.startswith(
            "cuDNN's attention does not work here, so steps take longer: it diff"
        )

    def test_a_gpu_that_refuses(self, gpu, monkeypatch, caplog):
        def refuse(**named):
            raise tf.errors.InternalError(None, None, "no such kernel\n  at line 5")

        monkeypatch.setattr(
            attention, "gen_xla_ops", types.SimpleNamespace(xla_custom_call_v2=refuse)
        )
        assert not attention.works("bfloat16")
        (line,) = caplog.messages
        assert line.endswith("so steps take longer: no such kernel")


@pytest.fixture
def half_precision():
    keras.config.set_dtype_policy("mixed_bfloat16")
    yield
    keras.config.set_dtype_policy("float32")


@pytest.fixture
def products(monkeypatch):
    """The equations of the products that are computed."""
    equations, stock = [], tf.einsum

    def einsum(equation, *words, **named):
        equations.append(equation)
        return stock(equation, *words, **named)

    monkeypatch.setattr(tf, "einsum", einsum)
    return equations


def attend(layer, *inputs, **named):
    """Output and gradients of a layer of Keras, with and without cuDNN's attention."""

    def compute():
        variables = [v.value for v in layer.trainable_variables]
        with tf.GradientTape() as tape:
            found = layer(*inputs, **named)
            total = tf.reduce_sum(tf.cast(found, tf.float32) ** 3)
        return [found, *map(tf.convert_to_tensor, tape.gradient(total, variables))]

    within = tf.function(attention_layers.attend_by_cudnn()(compute), autograph=False)
    return within(), tf.function(compute, autograph=False)()


@pytest.mark.usefixtures("half_precision")
class TestInKeras:
    def layer(self, heads=HEADS, **named):
        keras.utils.set_random_seed(0)
        layer = keras.layers.MultiHeadAttention(heads, COLUMNS, **named)
        layer.build((BATCH, PLACES, 16), (BATCH, PLACES, 16))
        return layer

    def inputs(self):
        return tf.constant(np.random.default_rng(0).normal(size=(BATCH, PLACES, 16)), tf.bfloat16)

    @pytest.mark.parametrize("use_bias", [True, False])
    def test_self_attention(self, gpu, products, use_bias):
        kinds, x = (keras.layers.MultiHeadAttention, keras.layers.EinsumDense), self.inputs()
        stock = [kind.call for kind in kinds]
        found, expected = attend(
            self.layer(use_bias=use_bias), x, x, attention_mask=MASKS["of pairs"][:, 0]
        )
        assert_close(found, expected, 0.03)
        assert gpu == ["ScaleBiasSoftmax", "ScaleBiasSoftmaxBackward"]
        assert products.count("btd,dcnh->btcnh") == 1
        assert [kind.call for kind in kinds] == stock

    def test_attention_to_something_else_has_products_of_its_own(self, gpu, products):
        x = self.inputs()
        found, expected = attend(self.layer(), x, 2 * x)
        assert_close(found, expected, 0.03)
        assert gpu and "btd,dcnh->btcnh" not in products

    def test_projections_of_another_kind(self, gpu, products):
        layer, x = self.layer(COLUMNS, use_bias=False), self.inputs()
        for each in (layer._query_dense, layer._key_dense, layer._value_dense):
            each.equation = "abc,cde->abed"
        found, expected = attend(layer, x, x)
        assert_close(found, expected, 0.03)
        assert "btd,dcnh->btcnh" not in products

    def test_biases_of_another_shape(self, gpu, products):
        layer, x = self.layer(), self.inputs()
        for each in (layer._query_dense, layer._key_dense, layer._value_dense):
            each.bias = tf.ones([COLUMNS])

        def compute():
            return layer(x, x)

        found = tf.function(attention_layers.attend_by_cudnn()(compute), autograph=False)()
        assert_close([found], [tf.function(compute, autograph=False)()], 0.03)
        assert "btd,dcnh->btcnh" not in products

    def test_nothing_is_left_for_the_next_call(self, gpu):
        """A projection that is replaced on the layer does not take what was computed for it."""
        layer, x = self.layer(), self.inputs()
        stock, of_key = keras.layers.EinsumDense.call, layer._key_dense
        of_key.call = lambda inputs, training=None: stock(of_key, inputs)

        def twice():
            layer(x, x)
            del of_key.call
            try:
                return layer(2 * x, 3 * x)
            finally:
                of_key.call = lambda inputs, training=None: stock(of_key, inputs)

        found = tf.function(attention_layers.attend_by_cudnn()(twice), autograph=False)()
        assert_close([found], [tf.function(twice, autograph=False)()], 0.03)

    def test_a_function_of_the_user_stays_as_it_is(self, gpu):
        """Its program is kept, and may be called where XLA compiles nothing."""
        layer, x = self.layer(), self.inputs()
        inner = tf.function(lambda: layer(x, x), autograph=False)
        tf.function(attention_layers.attend_by_cudnn()(lambda: inner()), autograph=False)()
        assert not gpu

    def test_masks_of_numpy_and_what_is_switched_off(self, gpu):
        query, key, value = drawn()
        mask = np.tril(np.ones((1, 1, PLACES, PLACES), bool))
        with attention_layers.attend_by_cudnn():
            keras.ops.dot_product_attention(query, key, value, mask=mask)
            assert gpu == ["ScaleBiasSoftmax"]
            keras.ops.dot_product_attention(query, key, value, flash_attention=False)
            keras.ops.dot_product_attention(query, key, value, bias=tf.zeros([1, 1, 1, 1]))
        assert gpu == ["ScaleBiasSoftmax"]

    def test_causal_attention(self, gpu):
        x = self.inputs()
        found, expected = attend(self.layer(), x, x, use_causal_mask=True)
        assert_close(found, expected, 0.03)
        assert gpu == ["Softmax", "SoftmaxBackward"]

    def test_dropout_of_attention_is_kerass(self, gpu):
        x = self.inputs()
        attend(self.layer(dropout=0.5), x, x, training=False)
        assert not gpu

    def test_adapters(self, gpu, products):
        layer, x = self.layer(), self.inputs()
        layer._query_dense.enable_lora(2)
        layer._query_dense.lora_kernel_b.assign(tf.ones_like(layer._query_dense.lora_kernel_b))
        found, expected = attend(layer, x, x)
        assert_close(found, expected, 0.06)  # of large numbers, whose last bits the CPU decides
        assert "btd,dcnh->btcnh" in products

    def test_quantized_projections_stay_as_they_are(self, gpu, products):
        layer, x = self.layer(), self.inputs()
        layer._value_dense.quantize("int8")

        def compute():
            return layer(x, x)

        found = tf.function(attention_layers.attend_by_cudnn()(compute), autograph=False)()
        assert_close([found], [tf.function(compute, autograph=False)()], 0.03)
        assert "btd,dcnh->btcnh" not in products

    def test_full_precision_stays_as_it_is(self, gpu, products):
        keras.config.set_dtype_policy("float32")
        x = tf.cast(self.inputs(), tf.float32)
        found, expected = attend(self.layer(), x, x)
        assert_close(found, expected, 1e-6)
        assert not gpu and "btd,dcnh->btcnh" not in products


def masked_lm():
    keras.utils.set_random_seed(0)
    backbone = keras_nlp.models.BertBackbone(
        vocabulary_size=20, num_layers=2, num_heads=2, hidden_dim=16, intermediate_dim=32,
        dropout=0.0, max_sequence_length=8,
    )  # fmt: skip
    inputs = backbone.input
    outputs = keras.layers.Dense(1)(backbone(inputs)["pooled_output"])
    return keras.Model(inputs, outputs)


@pytest.mark.usefixtures("half_precision")
class TestInSteps:
    def fit(self, jit_compile, monkeypatch):
        """Trains two steps; returns the losses. XLA's part is traced, and not compiled."""
        stock = tf.function
        monkeypatch.setattr(
            tf, "function", lambda f=None, jit_compile=None, **named: stock(f, **named)
        )
        model = masked_lm()
        model.compile(keras.optimizers.SGD(0.1), loss="mse")
        x = {
            "token_ids": np.arange(64).reshape(8, 8) % 20,
            "segment_ids": np.zeros((8, 8), int),
            "padding_mask": np.arange(8)[:, None] >= np.arange(8),
        }
        data = tf.data.Dataset.from_tensor_slices((x, np.ones((8, 1), "float32")))
        data = data.batch(4, drop_remainder=True)
        with patches.patch_keras_for(tf.distribute.get_strategy()):
            fitting.build(model, data)
            step.install(model, jit_compile=jit_compile)
            return model.fit(data, epochs=2, verbose=0, shuffle=False).history["loss"]

    @pytest.mark.long
    def test_compiled_steps_use_it(self, gpu, monkeypatch):
        attention.works("bfloat16")
        gpu.clear()
        compiled = self.fit(True, monkeypatch)
        assert gpu == ["ScaleBiasSoftmax"] * 2 + ["ScaleBiasSoftmaxBackward"] * 2
        gpu.clear()
        assert self.fit(False, monkeypatch) == pytest.approx(compiled, rel=0.02)
        assert not gpu

    def test_models_without_attention_do_not_ask(self, monkeypatch):
        monkeypatch.setattr(attention, "works", lambda precision: 1 / 0)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        with patches.patch_keras_for(tf.distribute.get_strategy()):
            assert not step.install(model, jit_compile=True).uses_cudnn

    def test_attention_of_kerashub_alone_does_not_ask(self, monkeypatch):
        """Llama's multiplies itself on TensorFlow."""
        monkeypatch.setattr(attention, "works", lambda precision: 1 / 0)
        backbone = keras_nlp.models.LlamaBackbone(
            vocabulary_size=8,
            num_layers=1,
            num_query_heads=2,
            num_key_value_heads=2,
            hidden_dim=4,
            intermediate_dim=4,
        )
        model = keras_nlp.models.LlamaCausalLM(backbone)
        model.compile("sgd", "mse")
        with patches.patch_keras_for(tf.distribute.get_strategy()):
            assert not step.install(model, jit_compile=True).uses_cudnn

    @pytest.mark.long
    def test_deterministic_steps_do_not(self, gpu, monkeypatch):
        monkeypatch.setattr(inspection, "is_deterministic", lambda: True)
        self.fit(True, monkeypatch)
        assert not gpu
