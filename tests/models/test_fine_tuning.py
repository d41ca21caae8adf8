import types

import keras
import keras_nlp
import numpy as np
import pytest
import tensorflow as tf

from data.errors import DataError
from models import fine_tuning
from tests.support import causal_presets, seq2seq_presets

PLAIN = dict(
    evaluation=None,
    optimizer="adamw",
    weight_decay=0.0,
    beta_2=0.999,
    clip_norm=None,
    layer_decay=1.0,
    freeze_backbone=False,
    lora_rank=None,
    lora_alpha=None,
    lora_layers="query_value",
    ema=None,
)
SIZES = dict(vocabulary_size=20, num_layers=2, hidden_dim=8, intermediate_dim=16, dropout=0.0)


def options(**changes):
    return types.SimpleNamespace(**(PLAIN | changes))


def task(kind="Bert", **sizes):
    keras.utils.set_random_seed(0)
    backbone = getattr(keras_nlp.models, f"{kind}Backbone")
    sizes = SIZES | (dict(num_heads=2) if kind != "FNet" else {}) | sizes
    backbone = backbone(max_sequence_length=8, **sizes)
    return getattr(keras_nlp.models, f"{kind}TextClassifier")(
        backbone, num_classes=2, dropout=0.0, compile=False
    )


def batch():
    ids = np.random.default_rng(0).integers(1, 20, (8, 6)).astype(np.int32)
    names = {"token_ids": ids, "segment_ids": 0 * ids, "padding_mask": 0 * ids + 1}
    return names, np.arange(8) % 2


def trained(given, steps=1, **more):
    model = task(**more)
    fine_tuning.freeze_or_adapt(model, given)
    model.compile(
        fine_tuning.make_optimizer(given, 0.01, model),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[],
        run_eagerly=True,
    )
    fine_tuning.save_only_trained(model, given)
    x, y = batch()
    before = values(model)
    model.fit(x, y, batch_size=8, epochs=steps, shuffle=False, verbose=0)
    return model, before


def values(model):
    return {w.path: np.array(keras.ops.convert_to_numpy(w)) for w in model.weights}


class TestLayerDecay:
    def factors(self, model):
        """The factors for a decay of one half, by the path of the weight."""
        found = fine_tuning.layer_factors(model, 0.5)
        return {w.path: found[id(w)] for w in model.weights if id(w) in found}

    def test_factors_by_hand(self):
        found = self.factors(task())
        expected = {"token_embedding": 0.125, "position_embedding": 0.125, "pooled_dense": 1.0}
        expected |= {"embeddings_layer_norm": 0.125, "transformer_layer_0": 0.25}
        expected |= {"transformer_layer_1": 0.5, "segment_embedding": 0.125}
        assert {path.split("/")[0]: factor for path, factor in found.items()} == expected
        assert "logits/kernel" not in found

    @pytest.mark.parametrize(
        ("kind", "last"),
        [("DebertaV3", "disentangled_attention_encoder_layer_1"), ("FNet", "f_net_layer_1")],
    )
    def test_layers_have_other_names_elsewhere(self, kind, last):
        found = self.factors(task(kind))
        of_last = {factor for path, factor in found.items() if path.startswith(last)}
        assert of_last == {0.5} and found["token_embedding/embeddings"] == 0.125

    def test_groups_of_layers_are_numbered_in_their_order(self):
        """ALBERT's layers have the number of their group, too."""
        found = self.factors(task("Albert", embedding_dim=8, num_groups=2, num_inner_repetitions=2))
        layers = ("group_0_inner_layer_0", "group_0_inner_layer_1")
        layers += ("group_1_inner_layer_0", "group_1_inner_layer_1")
        expected = dict(zip(layers, (0.0625, 0.125, 0.25, 0.5), strict=True))
        by_layer = {path.split("/")[0]: factor for path, factor in found.items()}
        assert {name: by_layer[name] for name in layers} == expected
        assert by_layer["token_embedding"] == 0.03125 and by_layer["pooled_dense"] == 1.0

    @pytest.mark.parametrize(
        ("family", "layers"),
        [
            ("Bart", "transformer_{}_layer_{}"),
            ("T5", "transformer_{}_layer_{}"),
            ("T5Gemma", "{}_layer_{}"),
        ],
    )
    def test_encoder_and_decoder_have_the_same_factors(self, family, layers):
        model = seq2seq_presets.make_task(family)
        found = fine_tuning.layer_factors(model, 0.5)
        by_layer = {
            layer.name: {found[id(weight)] for weight in layer.weights}
            for layer in model.backbone.layers
            if layer.weights
        }
        for part in ("encoder", "decoder"):
            assert by_layer[layers.format(part, 0)] == {0.25}
            assert by_layer[layers.format(part, 1)] == {0.5}
        embeddings = [factors for name, factors in by_layer.items() if "embedding" in name]
        assert all(factors == {0.125} for factors in embeddings) and embeddings

    @pytest.mark.parametrize("family", causal_presets.FAMILIES)
    def test_layers_of_decoders(self, family):
        model = causal_presets.make_task(family)
        found = fine_tuning.layer_factors(model, 0.5)
        layers = [layer for layer in model.backbone.layers if layer.weights]
        numbered = [layer for layer in layers if layer.name[-2:] in ("_0", "_1")]
        for layer, expected in zip(numbered, (0.25, 0.5), strict=True):
            assert {found[id(weight)] for weight in layer.weights} == {expected}
        for layer in layers[: layers.index(numbered[0])]:
            head = getattr(layer, "reverse_embeddings", None)
            assert all(found[id(w)] == 0.125 for w in layer.weights if w is not head)
            assert head is None or found[id(head)] == 1.0
        for layer in layers[layers.index(numbered[1]) + 1 :]:
            assert {found[id(weight)] for weight in layer.weights} == {1.0}
        assert {id(weight) for weight in model.trainable_weights} <= set(found)

    @pytest.mark.parametrize("tied", [False, True])
    def test_an_output_matrix_of_its_own_is_a_head(self, tied):
        """KerasHub keeps it in the layer of the embeddings."""
        found = self.factors(causal_presets.make_task("Llama", tie_word_embeddings=tied))
        factors = {path.rsplit("/", 1)[1]: f for path, f in found.items() if "embedding" in path}
        assert factors == {"embeddings": 0.125} | ({} if tied else {"reverse_embeddings": 1.0})

    def test_weights_of_one_path_have_the_factors_of_their_layers(self):
        """KerasHub gives the output projections of all of SmolLM3's layers one path."""
        model = causal_presets.make_task("SmolLM3")
        layers = [layer for layer in model.backbone.layers if "transformer_layer" in layer.name]
        outputs = [layer.self_attn.o_proj.kernel for layer in layers]
        assert len({kernel.path for kernel in outputs}) == 1
        optimizer = fine_tuning.make_optimizer(options(layer_decay=0.5), 0.01, model)
        before = [keras.ops.convert_to_numpy(kernel) for kernel in outputs]
        optimizer.apply([keras.ops.ones_like(kernel) for kernel in outputs], outputs)
        for kernel, old, expected in zip(outputs, before, (0.0025, 0.005), strict=True):
            moved = np.abs(keras.ops.convert_to_numpy(kernel) - old)
            np.testing.assert_allclose(moved, expected, rtol=0.01)

    def test_a_step_is_as_long_as_the_layer_is_high(self):
        """Adam's first step is the rate, whatever the gradient."""
        model = task()
        before = values(model)
        variables = model.trainable_variables
        optimizer = fine_tuning.make_optimizer(options(layer_decay=0.5), 0.01, model)
        optimizer.apply([np.ones(v.shape, np.float32) for v in variables], variables)
        moved = {path: np.abs(v - before[path]).max() for path, v in values(model).items()}
        for path, expected in (
            ("logits/kernel", 0.01),
            ("transformer_layer_1/feedforward_output_dense/kernel", 0.005),
            ("transformer_layer_0/feedforward_output_dense/kernel", 0.0025),
            ("position_embedding/embeddings", 0.00125),
        ):
            assert moved[path] == pytest.approx(expected, rel=0.01), path

    def test_weight_decay_goes_by_the_same_rate(self):
        """Without a gradient AdamW takes rate x weight decay of each weight, and none of a bias."""
        high, low, bias = (keras.Variable([1.0], name=name) for name in ("high", "low", "bias"))
        optimizer = fine_tuning.make_optimizer(options(weight_decay=0.1), 0.01)
        fine_tuning.optimizers.scale_learning_rates(optimizer, {id(low): 0.5, id(bias): 0.5})
        optimizer.apply([np.zeros(1, np.float32)] * 3, [high, low, bias])
        found = [float(v.numpy()[0]) for v in (high, low, bias)]
        assert found == pytest.approx([1 - 0.001, 1 - 0.0005, 1], abs=1e-7)

    @pytest.mark.parametrize("optimizer", ["adamw", "muon"])
    def test_the_variance_decays_as_asked_for(self, optimizer):
        given = options(optimizer=optimizer, beta_2=0.95)
        found = fine_tuning.make_optimizer(given, 0.01, task())
        assert getattr(found, "adam_beta_2" if optimizer == "muon" else "beta_2") == 0.95

    def test_without_it_the_optimizer_is_keras_own(self):
        model = task()
        assert type(fine_tuning.make_optimizer(options(), 0.01, model)) is keras.optimizers.AdamW


class TestMuon:
    RATE = 0.01

    def moved(self, **changes):
        """Returns what one step from random gradients takes from each weight."""
        model = task(hidden_dim=16, num_heads=4)
        optimizer = fine_tuning.make_optimizer(options(optimizer="muon", **changes), self.RATE)
        before, numbers = values(model), np.random.default_rng(0)
        variables = model.trainable_variables
        gradients = [numbers.normal(size=v.shape).astype(np.float32) for v in variables]
        optimizer.apply(gradients, variables)
        after = values(model)
        return {v.path: (before[v.path] - after[v.path], before[v.path]) for v in variables}

    def test_kernels_move_orthogonally_each_head_on_its_own(self):
        moved = {path: change for path, (change, _) in self.moved().items()}
        attention = "transformer_layer_0/self_attention_layer"
        stacks = {
            f"{attention}/query/kernel": lambda w: np.moveaxis(w, 1, 0),
            f"{attention}/value/kernel": lambda w: np.moveaxis(w, 1, 0),
            f"{attention}/attention_output/kernel": lambda w: w,
            "transformer_layer_1/feedforward_intermediate_dense/kernel": lambda w: w[None],
        }
        for path, in_heads in stacks.items():
            matrices = in_heads(moved[path])
            assert matrices.shape[0] == (4 if "attention" in path else 1), path
            for matrix in matrices:
                # Five iterations bring each singular value near one, 0.7 to 1.2.
                size = self.RATE * 0.2 * max(matrix.shape) ** 0.5
                found = np.linalg.svd(matrix, compute_uv=False) / size
                assert 0.6 < found.min() and found.max() < 1.3, (path, found)

    @pytest.mark.parametrize("family", ["Gemma", "Gemma3", "Llama3"])
    def test_heads_of_causal_families(self, family):
        """Gemma's kernels of query, key and value have their heads first, the others' second."""
        model = causal_presets.make_task(family)
        width, given = model.backbone.hidden_dim, options(optimizer="muon")
        optimizer = fine_tuning.make_optimizer(given, self.RATE, model)
        kernels = [
            v for v in model.trainable_variables if v.path.endswith(("query/kernel", "key/kernel"))
        ]
        before = [keras.ops.convert_to_numpy(v) for v in kernels]
        optimizer.apply([keras.random.normal(v.shape, seed=1) for v in kernels], kernels)
        assert kernels
        for kernel, old in zip(kernels, before, strict=True):
            moved = old - keras.ops.convert_to_numpy(kernel)
            heads = moved if family.startswith("Gemma") else np.moveaxis(moved, 1, 0)
            assert heads.shape[1] == width
            for matrix in heads:
                size = self.RATE * 0.2 * max(matrix.shape) ** 0.5
                found = np.linalg.svd(matrix, compute_uv=False) / size
                assert 0.6 < found.min() and found.max() < 1.3, (kernel.path, found)

    def step_of(self, family, *parts):
        """Returns by how much one step changes the weights whose paths end in one of the parts."""
        model = causal_presets.make_task(family)
        optimizer = fine_tuning.make_optimizer(options(optimizer="muon"), self.RATE, model)
        chosen = [v for v in model.trainable_variables if v.path.endswith(parts)]
        before = [keras.ops.convert_to_numpy(v) for v in chosen]
        optimizer.apply([keras.random.normal(v.shape, seed=1) for v in chosen], chosen)
        assert chosen
        return [old - keras.ops.convert_to_numpy(v) for v, old in zip(chosen, before, strict=True)]

    def test_heads_of_an_output_whose_path_names_no_attention(self):
        """SmolLM3's, of shape (heads, width of a head, width)."""
        for heads in self.step_of("SmolLM3", "o_proj/kernel"):
            assert heads.shape == (4, 4, 16)
            for matrix in heads:
                found = np.linalg.svd(matrix, compute_uv=False) / (self.RATE * 0.2 * 4)
                assert 0.6 < found.min() and found.max() < 1.3, found

    def test_biases_of_experts_move_by_adam(self):
        """GPT-OSS has a row for each expert."""
        for change in self.step_of("GptOss", "down_proj_bias", "gate_up_proj_bias"):
            assert change.ndim == 2
            np.testing.assert_allclose(np.abs(change), self.RATE, rtol=0.01)

    def test_the_rest_moves_by_adam(self):
        """Adam's first step is the rate."""
        moved = {path: change for path, (change, _) in self.moved().items()}
        for path in (
            "token_embedding/embeddings",
            "layer_norm/gamma",
            "logits/kernel",
            "logits/bias",
        ):
            found = [np.abs(change) for name, change in moved.items() if name.endswith(path)]
            assert found and all(change == pytest.approx(self.RATE, rel=0.01) for change in found)

    def test_weights_decay_but_not_biases(self):
        plain, decayed = self.moved(), self.moved(weight_decay=0.5)
        for path, (change, before) in decayed.items():
            decay = 0.0 if path.endswith(("bias", "gamma", "beta")) else self.RATE * 0.5
            np.testing.assert_allclose(change - plain[path][0], decay * before, atol=2e-6)

    def test_a_layer_may_be_called_like_a_bias(self):
        """TensorFlow's names are paths."""
        optimizer = fine_tuning.make_optimizer(options(weight_decay=0.5), 0.1)
        with tf.name_scope("bias_head"):
            kernel, bias = (tf.Variable([1.0], name=name) for name in ("kernel", "bias"))
        decays = [optimizer._use_weight_decay(each) for each in (kernel, bias)]
        assert kernel.name.startswith("bias_head/") and decays == [True, False]


class TestAdapters:
    def test_only_adapters_and_head_train(self):
        model, before = trained(options(lora_rank=2))
        moved = {p for p, v in values(model).items() if p in before and (v != before[p]).any()}
        assert all("lora" in p or p.startswith("logits") for p in moved)
        assert any(p.endswith("query/lora_kernel_b") for p in moved)
        momenta = {v.path for v in model.optimizer.variables}
        assert not any("token_embedding" in path for path in momenta)

    @pytest.mark.parametrize(("alpha", "factor"), [(None, 1.0), (2.0, 1.0), (6.0, 3.0)])
    def test_alpha_scales_the_adapters(self, alpha, factor):
        model = task()
        fine_tuning.freeze_or_adapt(model, options(lora_rank=2, lora_alpha=alpha))
        trained = {v.path: v for v in model.backbone.trainable_variables}
        (path, *_) = (path for path in trained if path.endswith("query/lora_kernel_b"))
        layer = next(
            layer
            for layer in model.backbone._flatten_layers()
            if getattr(layer, "lora_kernel_b", None) is trained[path]
        )
        before = np.array(layer.kernel)
        layer.lora_kernel_b.assign(np.ones(layer.lora_kernel_b.shape))
        product = np.array(layer.lora_kernel_a).sum(axis=-1, keepdims=True)
        added = np.array(layer.kernel) - before
        np.testing.assert_allclose(added, factor * product * np.ones_like(added), atol=1e-5)

    @pytest.mark.long
    def test_a_checkpoint_holds_what_trains_and_puts_it_back(self, tmp_path):
        given = options(lora_rank=2, lora_alpha=8.0)
        model, _ = trained(given, steps=2)
        path = tmp_path / "model.weights.h5"
        model.save_weights(path)
        again, _ = trained(given, steps=1)
        again.load_weights(path)
        x, y = batch()
        for one in (model, again):
            one.train_on_batch(x, y)
        ours, theirs = values(model), values(again)
        assert all((ours[p] == theirs[p]).all() for p in ours)

    def test_other_frozen_weights_are_refused(self, tmp_path):
        given = options(freeze_backbone=True)
        model, _ = trained(given)
        model.save_weights(tmp_path / "model.weights.h5")
        again = task()
        again.backbone.token_embedding.embeddings.assign_add(np.ones((20, 8)))
        fine_tuning.freeze_or_adapt(again, given)
        again.compile(fine_tuning.make_optimizer(given, 0.01, again), "mse", metrics=[])
        fine_tuning.save_only_trained(again, given)
        with pytest.raises(DataError, match="the preset's weights have changed"):
            again.load_weights(tmp_path / "model.weights.h5")

    def test_all_linear_layers_are_adapted(self):
        model, before = trained(options(lora_rank=2, lora_layers="all_linear"))
        adapted = {v.path.split("/")[-2] for v in model.backbone.trainable_variables}
        assert adapted == {
            *("query", "key", "value", "attention_output", "pooled_dense"),
            *("feedforward_intermediate_dense", "feedforward_output_dense"),
        }
        moved = {p for p, v in values(model).items() if p in before and (v != before[p]).any()}
        assert all("lora" in p or p.startswith("logits") for p in moved)
        added = sum("lora_kernel_a" in v.path for v in model.trainable_variables)
        assert added == 2 * 6 + 1  # two layers of six, and the pooler

    def test_linear_layers_without_attention_are_adapted(self):
        model = task("FNet")
        fine_tuning.freeze_or_adapt(model, options(lora_rank=2, lora_layers="all_linear"))
        assert any("lora_kernel_a" in v.path for v in model.backbone.trainable_variables)

    @pytest.mark.parametrize("family", ["Llama", "GPT2", "Gemma", "GPTNeoX", "SmolLM3"])
    def test_all_linear_layers_of_a_decoder_are_adapted(self, family):
        """But the embeddings, and the head that KerasHub keeps with them."""
        model = causal_presets.make_task(family)
        kernels = {
            v.path
            for v in model.backbone.trainable_variables
            if v.path.endswith("kernel") and "embedding" not in v.path
        }
        fine_tuning.freeze_or_adapt(model, options(lora_rank=2, lora_layers="all_linear"))
        adapted = [v.path for v in model.trainable_variables if v.path.endswith("lora_kernel_a")]
        assert {path.replace("lora_kernel_a", "kernel") for path in adapted} == kernels

    def test_no_attention_no_adapter(self, monkeypatch):
        expected = "FNetBackbone has no attention .*; pass --lora-layers all_linear, or train all,"
        with pytest.raises(DataError, match=expected):
            fine_tuning.freeze_or_adapt(task("FNet"), options(lora_rank=2))

        def enable_lora(backbone, rank, alpha, all_linear):
            backbone.trainable = False

        monkeypatch.setattr(fine_tuning.hub_models, "enable_lora", enable_lora)
        with pytest.raises(DataError, match="; pass --lora-layers all_linear, or train all$"):
            fine_tuning.freeze_or_adapt(causal_presets.make_task("GPT2"), options(lora_rank=2))

    @pytest.mark.parametrize(
        ("family", "adapted"),
        [("SmolLM3", {"q_proj", "v_proj"}), ("GPTNeoX", {"query_key_value"})],
    )
    def test_layers_that_are_named_otherwise_are_adapted(self, family, adapted):
        model = causal_presets.make_task(family)
        fine_tuning.freeze_or_adapt(model, options(lora_rank=2))
        names = {v.path.split("/")[-2] for v in model.trainable_variables}
        assert names == adapted

    def test_an_encoder_decoder_is_adapted_on_both_sides(self):
        model = seq2seq_presets.make_task("T5")
        fine_tuning.freeze_or_adapt(model, options(lora_rank=2))
        paths = [v.path for v in model.trainable_variables]
        assert {path.split("/")[-2] for path in paths} == {"query_projector", "value_projector"}
        for part in ("encoder", "decoder"):
            assert any(part in path for path in paths)

    def test_a_frozen_backbone_stays(self):
        model, before = trained(options(freeze_backbone=True))
        moved = {p for p, v in values(model).items() if p in before and (v != before[p]).any()}
        assert moved == {"logits/kernel", "logits/bias"}
