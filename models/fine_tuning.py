"""Fine-tunes a model of any KerasNLP family: frozen weights, adapters, rates by layer.

A recipe whose options are `training.options.FineTuningOptions` calls, in this order,

    model = ...                                     # a task of KerasNLP
    fine_tuning.freeze_or_adapt(model, options)     # under the strategy, before compile()
    model.compile(fine_tuning.make_optimizer(options, schedule, model), ...)
    fine_tuning.save_only_trained(model, options)   # after compile()

Both leave a model that is evaluated as it is: its saved weights have no adapters.
"""

import hashlib
import re
from collections import Counter

import keras
import keras_nlp
import numpy as np

from data.errors import DataError
from distribution.keras_compat import adapters, hub_models, optimizers


def freeze_or_adapt(model: keras.Model, options) -> None:
    """Freezes the backbone (`--freeze-backbone`), or all of it but low-rank adapters.

    `--lora-rank` adds to each attention layer's query and value projections, or with `--lora-layers
    all_linear` to all linear layers of the backbone (Dettmers et al., QLoRA, arXiv 2305.14314,
    section 4), a product of two trainable matrices of this rank (Hu et al., LoRA, arXiv
    2106.09685), times `--lora-alpha` / `--lora-rank`. Weights outside the backbone, such as a
    classifier's head, train in both cases.

    A model that is evaluated (`options.evaluation`) has the saved weights, and stays as it is.

    Args:
        model: a KerasNLP task, not yet compiled.
        options: a recipe's `FineTuningOptions`.

    Raises:
        DataError: the backbone has no such layers to adapt.
    """
    if options.evaluation is not None:
        return
    if options.freeze_backbone:
        model.backbone.trainable = False
    if options.lora_rank is None:
        return
    all_linear = options.lora_layers == "all_linear"
    hub_models.enable_lora(model.backbone, options.lora_rank, options.lora_alpha, all_linear)
    adapters = False
    for weight in model.backbone.trainable_variables:
        # KerasNLP trains the biases of adapted layers, but does not save them with the adapters.
        weight.trainable = "lora_kernel" in weight.path
        adapters = adapters or weight.trainable
    if not adapters:
        backbone = type(model.backbone).__name__
        is_causal = isinstance(model, keras_nlp.models.CausalLM)
        raise DataError(
            f"--lora-rank {options.lora_rank}: {backbone} has no attention with a query and a "
            "value that could be adapted; pass --lora-layers all_linear, or train all"
            + ("" if is_causal else ", or use --freeze-backbone")
        )


def make_optimizer(
    options,
    schedule,
    model: keras.Model | None = None,
    default: str = "adamw",
    output_layers: str = "logits",
):
    """Makes the AdamW or the Muon of the options; biases and layer norms do not decay.

    Muon (Jordan et al., https://kellerjordan.github.io/posts/muon) orthogonalizes the momentum of
    each kernel; AdamW updates embeddings, output layers, biases and scales. Muon's updates have the
    size of AdamW's (Liu et al., arXiv 2502.16982, section 2.2), so both take the same rate.

    Args:
        options: with `optimizer`, `beta_2`, `weight_decay` and `clip_norm`; `FineTuningOptions`
            also have `layer_decay` and `ema`.
        schedule: learning rate by step.
        model: the task that is trained, for `layer_decay` and the shapes of its kernels.
        default: "adamw" or "muon", what `--optimizer auto` is.
        output_layers: pattern of their paths; AdamW updates them.

    Returns:
        A `keras.optimizers.AdamW` or `keras.optimizers.Muon`.

    Raises:
        DataError: `layer_decay` is not 1 and the backbone's layers are not numbered.
    """
    ema = getattr(options, "ema", None)
    decay = options.weight_decay
    shared = dict(
        weight_decay=decay,
        global_clipnorm=options.clip_norm,
        use_ema=ema is not None,
        ema_momentum=ema or 0.0,
    )
    if (default if options.optimizer == "auto" else options.optimizer) == "muon":
        optimizer = keras.optimizers.Muon(
            schedule,
            adam_beta_2=options.beta_2,
            adam_weight_decay=decay,
            exclude_layers=[output_layers],
            **shared,
        )
        width = getattr(getattr(model, "backbone", None), "hidden_dim", None)
        optimizers.orthogonalize_heads(optimizer, width)
    else:
        optimizer = keras.optimizers.AdamW(schedule, beta_2=options.beta_2, **shared)
    # Of the variable itself: TensorFlow's names are paths, in which a layer may be called so, too.
    optimizer.exclude_from_weight_decay(var_names=[r"(bias|gamma|beta|scale)[^/]*$"])
    layer_decay = getattr(options, "layer_decay", 1.0)
    if model is not None and layer_decay != 1.0:
        factors = layer_factors(model, layer_decay)
        optimizers.scale_learning_rates(optimizer, factors)
    return optimizer


def save_only_trained(model: keras.Model, options) -> None:
    """Makes a compiled model save checkpoints of what trains, which are small.

    A model that is evaluated (`options.evaluation`) saves nothing.

    Args:
        model: compiled with the optimizer of `make_optimizer()`.
        options: a recipe's `FineTuningOptions`.
    """
    if options.evaluation is not None:
        return
    if options.freeze_backbone or options.lora_rank is not None:
        _save_what_trains(model)


# --- Learning rates by layer ---


def layer_factors(model: keras.Model, decay: float) -> dict[int, float]:
    """Returns the factor of each weight's learning rate.

    Weights outside the backbone and after its last layer (head, pooler), and an output matrix of
    its own that KerasHub keeps in the layer of the embeddings, have factor 1, the last
    layer `decay`, the layer below its square, and so on down to the embeddings
    (Clark et al., ELECTRA, arXiv 2003.10555, section 3.2 and appendix B). The encoder and the
    decoder of an encoder-decoder each count from their own last layer.

    Args:
        model: a KerasNLP task.
        decay: in (0, 1].

    Returns:
        Factors by the `id()` of the variable: paths are not unique (KerasHub's SmolLM3).

    Raises:
        DataError: the backbone's layers are not numbered.
    """
    backbone = model.backbone
    names = [layer.name for layer in backbone.layers if layer.weights]
    names = [name for name in names if re.search(r"_\d+$", name)]
    kinds = Counter(map(_kind, names))
    if not kinds:
        raise DataError(
            f"--layer-decay {decay}: {type(backbone).__name__} has no numbered layers; leave it out"
        )
    kind = kinds.most_common(1)[0][0]
    pair = {kind, kind.replace("encoder", "decoder"), kind.replace("decoder", "encoder")}
    stacks = {
        each: sorted(_numbers(name) for name in names if _kind(name) == each)
        for each in pair.intersection(kinds)
    }
    longest = max(stacks.values(), key=len)
    factors: dict[int, float] = {}
    is_below = True  # all numbered layers, in the order of the computation
    for layer in backbone.layers:
        numbers = stacks.get(_kind(layer.name), []) if layer.weights else []
        if numbers:
            depth, is_below = numbers.index(_numbers(layer.name)) + 1, False
        else:  # T5Gemma's embeddings of the decoder come after the encoder's first layer
            numbers = longest
            depth = 0 if is_below or "embedding" in layer.name else len(numbers) + 1
        factors |= {id(weight): decay ** (len(numbers) + 1 - depth) for weight in layer.weights}
        head = getattr(layer, "reverse_embeddings", None)
        if head is not None:  # not tied to the embeddings
            factors[id(head)] = 1.0
    return factors


def _kind(name: str) -> str:
    """Returns a layer's name without its numbers: ALBERT's group_0_inner_layer_1 has two."""
    return re.sub(r"\d+", "#", name)


def _numbers(name: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", name)))


# --- Checkpoints of what trains ---


def _save_what_trains(model: keras.Model) -> None:
    # A frozen backbone is loaded from its preset again. Besides, Keras merges an adapter into its
    # layer's kernel when it saves weights, and then loads it as zeros (keras-hub#2701, open).
    trained = _Trained(model)

    def load(path, **_):
        keras.saving.load_weights(trained, path)
        if trained.loaded_sha256 != trained.frozen_sha256():
            raise DataError(
                f"{path}: cannot resume: the preset's weights have changed since, and a "
                "checkpoint contains only the trained weights; restore the preset, or use "
                "another --run-dir"
            )

    model.save_weights = lambda path, **_: keras.saving.save_weights(trained, path)
    model.load_weights = load


class _Trained(adapters.Variables):
    """Saves and loads the trained weights of a model, its optimizer, and a checksum of the rest."""

    def __init__(self, model: keras.Model):
        super().__init__(lambda: model.trainable_variables)
        self.optimizer = model.optimizer
        self.frozen_of = lambda: [
            weight for weight in model.weights if not weight.trainable and "seed" not in weight.path
        ]
        self._frozen_sha256: bytes | None = None
        self.loaded_sha256: bytes | None = None

    def frozen_sha256(self) -> bytes:
        """Computes the checksum of the frozen weights once; they never change."""
        if self._frozen_sha256 is None:
            digest = hashlib.sha256()
            for weight in self.frozen_of():
                digest.update(np.ascontiguousarray(keras.ops.convert_to_numpy(weight)).tobytes())
            self._frozen_sha256 = digest.digest()
        return self._frozen_sha256

    def save_own_variables(self, store):
        """Writes the trained variables, and the checksum."""
        super().save_own_variables(store)
        store["frozen_sha256"] = np.frombuffer(self.frozen_sha256(), np.uint8)

    def load_own_variables(self, store):
        """Reads them."""
        self.loaded_sha256 = bytes(np.array(store["frozen_sha256"]))
        super().load_own_variables(store)
