"""Computes a step of `fit()` and of `evaluate()`, for any number of replicas.

This module makes the results independent of the number of devices. A step is an update of
the weights. In reading order:

1. **Weigh.** Keras averages the weighted losses of one replica over all of its values, so empty
   values count, and replicas with more weight count less. This step divides the weights of a batch
   by their mean over the *global* batch (`mean_one`). Keras's own average of each replica, averaged
   over the replicas, is then the weighted mean over the global batch. A mask of Keras
   (`Embedding(mask_zero=True)`) is a weight of zero, and so is a label that a loss ignores
   (`ignore_class=`).
2. **Forward and backward**, on each replica, by the model's own `compute_loss()`.
3. **Reduce** the gradients over the replicas. Keras does it last: it clips each replica's own
   gradient, looks for overflows on replica 0 only, and never adds up the gradients of a row that a
   batch looks up several times in an embedding.
4. **Finite? Unscale, clip, apply**: Keras's optimizer, on the gradient of the global batch.

With accumulation, 2 runs once per batch, and the weights are divided by their mean over all batches
of the update. (Where a mask of the model decides it, each batch counts by its weights.) An
execution of several steps is a loop around all of it. XLA compiles no reduction over replicas: on
one device it compiles the whole step; on several, or with accumulation, it compiles part 2 on each
replica, and part 4.
"""

import contextlib
import logging
import math
import weakref
from collections.abc import Callable, Iterator, Sequence

import keras
import tensorflow as tf

from distribution import attention, kinds, loss_parts
from distribution.errors import DistributionError
from distribution.keras_compat import (
    attention_layers,
    compiled_losses,
    compiled_metrics,
    fitting,
    inspection,
    randomness,
    recomputing,
)
from distribution.keras_compat.replacing import replaced

log = logging.getLogger("recipes")

# The steps that `install()` has made, by model.
_steps: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def install(
    model: keras.Model,
    *,
    batches_per_update: int = 1,
    updates_per_execution: int = 1,
    jit_compile: bool = False,
    gradient_checkpointing: bool = False,
) -> "Step":
    """Makes `fit()` and `evaluate()` of a model use the step of this module.

    Sets `model.train_function`, unless the model has a `train_step` or a `test_step`, and
    `model.test_function`. A model that is compiled again needs this again.

    Args:
        model: compiled and built, under its strategy's scope.
        batches_per_update: elements of the dataset that one update accumulates.
        updates_per_execution: updates of one call of the training function.
        jit_compile: whether to compile as much as possible with XLA.
        gradient_checkpointing: whether to compute the layers that the model repeats a second time
            for the gradient instead of keeping what is inside of them.

    Raises:
        DistributionError: several replicas, batches or workers cannot have the model's own
            `train_step` or `test_step`, its loss that returns no value per example, its stateful
            layer or its optimizer; XLA cannot compile a layer; or there is nothing to checkpoint.
    """
    strategy = model.distribute_strategy
    own = inspection.own_steps(model)
    replicas = strategy.num_replicas_in_sync
    several = replicas > 1 or kinds.name_of(strategy) == "parameter_server"
    if own and (several or batches_per_update > 1):
        raise DistributionError(
            f"{type(model).__name__} overrides {' and '.join(own)}, which computes the mean of one "
            "replica and one batch: train it on one device, without --accumulate-steps, or "
            "override compute_loss() and compute_metrics() instead"
        )
    stateful = [layer.name for layer in inspection.layers_of(model) if _is_stateful(layer)]
    if stateful and replicas > 1:
        raise DistributionError(
            f"the layer {stateful[0]} is stateful: its state has a row for each example of the "
            "global batch, of which each replica sees a part; train it on one device "
            "(--strategy none)"
        )
    _require_optimizer_for(model)
    if kinds.name_of(strategy) == "central_storage":
        for layer in inspection.layers_of(model):
            if isinstance(layer, keras.layers.SpectralNormalization):  # assigns to its kernel
                raise DistributionError(
                    f"the layer {layer.name} does not work with central_storage, whose replicas "
                    "share one copy of each weight; use --strategy mirrored"
                )
    refused = inspection.not_for_xla(model)
    if jit_compile and refused:
        raise DistributionError(f"--jit on: XLA cannot compile {refused[0]} here; use auto")
    repeated = _layers_to_recompute(model) if gradient_checkpointing else []
    model.steps_per_execution = updates_per_execution
    with strategy.scope():
        step = Step(model, batches_per_update, updates_per_execution, jit_compile, repeated)
    _steps[model] = step
    if own:  # on one device, where Keras's training is right
        model.jit_compile = jit_compile
    if "test_step" not in own:
        compiled_losses.prepare_losses(model, batches_per_update)
        model.test_function = step.test
    elif _takes_any_batch(model):
        compiled_losses.weigh_by_examples(model)
        model.test_function = step.test
    compiled_metrics.prepare_metrics(model)
    if own:
        return step
    compiled_losses.weigh_own_by_examples(model)
    for layer in inspection.layers_of(model):
        if isinstance(layer, keras.layers.BatchNormalization) and replicas > 1:
            layer.synchronized = True  # normalises by the global batch
    model.train_function = step.train
    return step


def _layers_to_recompute(model: keras.Model) -> list[keras.layers.Layer]:
    """Returns the layers of a model that `--gradient-checkpointing` computes a second time.

    Raises:
        DistributionError: there are none, or this module does not compute the gradient.
    """
    if "train_step" in inspection.own_steps(model):
        raise DistributionError(
            f"--gradient-checkpointing: {type(model).__name__} overrides train_step, which "
            "computes the gradient by itself; override compute_loss() and compute_metrics() instead"
        )
    repeated = recomputing.repeated_layers(model)
    if not repeated:
        raise DistributionError(
            f"--gradient-checkpointing: the model {model.name} repeats no layer that contains "
            "others, such as the block of a Transformer (with one block little would be saved); "
            "leave the option out"
        )
    return repeated


def _takes_any_batch(model: keras.Model) -> bool:
    """Tells whether a model takes batches of any size, and so one without its padding."""
    inputs = keras.tree.flatten(getattr(model, "inputs", None) or [])
    fixed = any(tensor.shape[:1] != (None,) for tensor in inputs)
    return not fixed and not any(map(_is_stateful, inspection.layers_of(model)))


def _is_stateful(layer: keras.layers.Layer) -> bool:
    return isinstance(layer, keras.layers.RNN | keras.layers.Bidirectional) and layer.stateful


def _require_optimizer_for(model: keras.Model) -> None:
    """Rejects what Keras's optimizers cannot do under the model's strategy.

    Raises:
        DistributionError: names it, and what to use instead.
    """
    strategy, optimizers = model.distribute_strategy, inner_optimizers(model.optimizer)

    def require_none(name: str, remedy: str) -> None:
        used = [each for each in optimizers if getattr(each, name, None)]
        if used:
            raise DistributionError(f"{type(used[0]).__name__}({name}=...): {remedy}")

    for each in optimizers:
        if type(each).__name__ == "ScheduleFreeAdamW":
            raise DistributionError(
                "ScheduleFreeAdamW of Keras 3.15 is not the published algorithm (it averages with "
                "the new weights, decays the average alone, and is evaluated without it); use "
                "AdamW with a schedule, or use_ema=True"
            )
        if getattr(each, "use_ema", None) and getattr(each, "gradient_accumulation_steps", None):
            raise DistributionError(
                f"{type(each).__name__}(use_ema=True, gradient_accumulation_steps=...): Keras "
                "averages after every batch, not every update; use --accumulate-steps instead"
            )
    dtypes = sorted({str(variable.dtype) for variable in model.trainable_variables})
    if len(dtypes) > 1:
        require_none(
            "global_clipnorm",
            f"Keras cannot add up the gradients of weights of {' and '.join(dtypes)}; use "
            "clipnorm, which clips each of them by itself, or one dtype",
        )
    if strategy.num_replicas_in_sync > 1:
        require_none(
            "gradient_accumulation_steps",
            "does not work on several replicas; use --accumulate-steps instead",
        )
        require_none(
            "ema_overwrite_frequency",
            "does not work on several replicas; leave it out: the run ends on the average",
        )
    if kinds.name_of(strategy) != "central_storage":
        return
    shared = "does not work with central_storage, whose replicas share one copy of each weight"
    require_none("use_ema", f"{shared}; use --strategy mirrored")
    if any(isinstance(each, keras.optimizers.Nadam) for each in optimizers):
        raise DistributionError(f"Nadam {shared}; use Adam, or --strategy mirrored")
    constrained = [v.path for v in model.trainable_variables if v.constraint is not None]
    if constrained:
        raise DistributionError(
            f"the constraint of {constrained[0]} {shared}; use --strategy mirrored"
        )


def inner_optimizers(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """Returns the optimizers that update the weights: usually the optimizer itself.

    A `LossScaleOptimizer` (half precision) contains another one, a `MultiOptimizer` several.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if isinstance(optimizer, keras.optimizers.MultiOptimizer):
        return list(optimizer.optimizers)
    return [optimizer]


def gradient_norm(model: keras.Model) -> float | None:
    """Returns the norm of the last step's gradient, of the global batch and before clipping.

    Returns:
        The root of the sum of all squares; not finite before the first step and where half
        precision overflowed; None for a model without a step, or with its own `train_step`.
    """
    step = _steps.get(model)
    if step is None or inspection.own_steps(model):
        return None
    return float(keras.ops.convert_to_numpy(step.norm))


class Step:
    """Computes the steps of one model; made by `install()`.

    Args:
        model: compiled and built.
        batches_per_update: elements of the dataset that one update accumulates.
        updates_per_execution: updates of one call of `train`.
        jit_compile: whether to compile as much as possible with XLA.
        repeated: layers that the gradient computes a second time.
    """

    def __init__(
        self,
        model: keras.Model,
        batches_per_update: int,
        updates_per_execution: int,
        jit_compile: bool,
        repeated: Sequence[keras.layers.Layer] = (),
    ):
        self._model = weakref.ref(model)  # the model holds the step's functions
        self.strategy = model.distribute_strategy
        self.replicas = self.strategy.num_replicas_in_sync
        self.batches_per_update = batches_per_update
        self.updates_per_execution = updates_per_execution
        self.repeated = list(repeated)
        self.variables = model.trainable_variables
        self.floatx = keras.config.floatx()
        self.norm = keras.Variable(
            math.nan,
            trainable=False,
            dtype=self.floatx,
            synchronization="on_read",  # each replica keeps its own
            aggregation="only_first_replica",  # they are the same
            name="gradient_norm",
        )
        # The part that XLA compiles.
        whole = self.replicas == 1 and batches_per_update == 1
        self.jit_compile = jit_compile
        self.uses_cudnn = jit_compile and _can_use_cudnn(model)
        self._in_parts = jit_compile and not whole
        self._forward_and_backward = self._compiled(self.forward_and_backward, self._in_parts)
        self._update = self._compiled(self.update, jit_compile and whole)
        own_metrics = compiled_metrics.has_own_metrics(model)  # which XLA may not compile
        jit_test = jit_compile and not own_metrics
        self._evaluate_batch = self._compiled(self.evaluate_batch, jit_test)
        self._evaluate_unpadded = self._compiled(self.evaluate_unpadded, jit_test)
        self._own_test_step = self._compiled(self.own_test_step, jit_compile)
        self._evaluate_padded, self._takes_one_size = self._evaluate_batch, False
        if "test_step" in inspection.own_steps(model):
            self._evaluate_batch = self.evaluate_by_own_step
        elif self.replicas == 1 and own_metrics:
            self._evaluate_batch = self.evaluate_without_padding
        elif self.replicas == 1 and compiled_losses.may_mix_examples(model):
            if _takes_any_batch(model):
                self._evaluate_batch = self.evaluate_compared
        elif self.replicas > 1 and compiled_losses.has_own_methods(model):
            shares_weights = kinds.name_of(self.strategy) in kinds.SHARED_WEIGHTS
            if not shares_weights and _takes_any_batch(model):
                self._evaluate_batch = self.evaluate_own_part
        for optimizer in inner_optimizers(model.optimizer):
            if self._in_parts and optimizer is not None:
                optimizer.jit_compile = True  # keras_compat.optimizers.update_together
        # Each replica adds up its own gradients; they are reduced once, when they are applied.
        self.sums: list[tf.Variable] = []
        self.totals: list[tf.Variable] = []
        self._used: set[int] = set()  # positions of the variables that the loss depends on
        if batches_per_update > 1:
            self.sums = [_local(tf.zeros(v.shape, v.dtype)) for v in self.variables]
            self.totals = [_local(tf.zeros((), self.floatx)) for _ in range(2)]
        self._execution = tf.function(self._execute)
        self._test_step = tf.function(self._test_batch)

    @property
    def model(self) -> keras.Model:
        """Returns the model."""
        return self._model()

    def _compiled(self, function, jit_compile: bool):
        if jit_compile and self.uses_cudnn:
            function = attention_layers.attend_by_cudnn()(function)  # while it is traced
        function = tf.autograph.experimental.do_not_convert(function)
        return tf.function(function, jit_compile=True) if jit_compile else function

    # --- One batch, on one replica ---

    def update(self, data) -> dict:
        """Makes one update from one batch; returns the metrics. Runs on each replica."""
        loss, _, gradients = self._forward_and_backward(data, self.sums_of_weights(data))
        return self.apply(self.reduce(gradients), loss)

    def sums_of_weights(self, data) -> list[tf.Tensor]:
        """Sums each output's weights over the global batch, or counts its examples.

        Returns nothing on one device without weights: Keras's mean is right in that case.
        """
        return self.global_sums(self.local_sums(data))

    def local_sums(self, data) -> list[tf.Tensor]:
        """Sums each output's weights over a replica's part of a batch, like `sums_of_weights`."""
        x, _, weights = keras.utils.unpack_x_y_sample_weight(data)
        leaves = [leaf for leaf in keras.tree.flatten(weights) if leaf is not None]
        if not leaves and self.replicas > 1:  # which may have different numbers of examples
            leaves = [_ones(x, self.floatx)]
        return [tf.reduce_sum(tf.cast(leaf, self.floatx)) for leaf in leaves]

    def forward_and_backward(self, data, sums) -> tuple:
        """Computes a replica's loss, its batch's global weight, and its share of the gradient.

        The mean of the losses over the replicas is the loss of the global batch; the sum of the
        shares is its gradient.
        """
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with randomness.part_of_batch(x):
            with tf.GradientTape() as tape:
                y_pred = fitting.call(self.model, x, training=True)
                loss, weight, _ = self.loss(x, y, y_pred, sample_weight, sums, training=True)
                share = self.model.optimizer.scale_loss(loss)
                if self.replicas > 1:
                    share = share / self.replicas
            gradients = tape.gradient(share, [v.value for v in self.variables])
            self.measure(x, y, y_pred, sample_weight)
        # Dense: adds the gradients of embedding rows that a batch looks up several times.
        return loss, weight, [None if g is None else tf.convert_to_tensor(g) for g in gradients]

    def loss(
        self,
        x,
        y,
        y_pred,
        sample_weight,
        sums,
        training: bool,
        is_unpadded: bool = False,
        share=None,
    ) -> tuple:
        """Returns a replica's loss, the sum of all weights of the global batch, and losses.

        These are the losses of several outputs, which evaluation counts one by one. Of a replica
        without its padding, `share` is what part of the examples it has, relative to the mean.
        """
        masks = [inspection.mask_of(leaf) for leaf in keras.tree.flatten(y_pred)]
        of_labels = compiled_losses.masks_of_labels(self.model, y, y_pred)
        masks = [_both(mask, other) for mask, other in zip(masks, of_labels, strict=True)]
        if any(mask is not None for mask in masks):
            if share is not None:  # replicas would add up where some of them may have no example
                raise _AddsUpError
            if self.replicas > 1 and self.jit_compile:
                raise DistributionError(
                    "--jit: a mask of the model, or ignore_class of a loss, decides which values "
                    "count, so replicas add up in the middle of what XLA would compile; pass --jit "
                    "off"
                )
            # Of one output, or where all count the same values, a batch's weight is known.
            alike = all(mask is masks[0] for mask in masks)
            one_weight = len(masks) == 1 or not keras.tree.is_nested(sample_weight)
            if training and self.batches_per_update > 1 and not (alike and one_weight):
                raise DistributionError(
                    "--accumulate-steps: masks, or ignore_class, make the outputs count different "
                    "values, so the mean over the batches of an update is not known before the "
                    "last of them; leave it out, or write the masks as sample weights of the data"
                )
            pairs = _per_output(sample_weight, masks, y_pred)
            if self.replicas > 1 or not training:  # batches, or parts, of different sizes
                ones = _ones(x, self.floatx)
                pairs = [(ones if w is None and m is None else w, m) for w, m in pairs]
            weights = [_times_mask(w, m) for w, m in pairs]
            sums = self.global_sums([tf.reduce_sum(w) for w in weights if w is not None])
            sample_weight = keras.tree.pack_sequence_as(y_pred, weights)
            y_pred = keras.tree.map_structure(tf.identity, y_pred)  # without their masks
        elif sample_weight is None and self.replicas > 1:
            sample_weight = _ones(x, self.floatx)
        left = iter(sums)
        totals = keras.tree.map_structure(
            lambda w: None if w is None else next(left), sample_weight
        )
        if sums:
            total = tf.add_n(compiled_losses.totals_of_losses(self.model, totals))
        else:
            total = tf.reduce_sum(_ones(x, self.floatx))
        weights = keras.tree.map_structure(
            lambda w, t: None if w is None else self.mean_one(w, t, share), sample_weight, totals
        )
        if share is not None:
            totals = keras.tree.map_structure(lambda t: None if t is None else t * share, totals)
        parts = self.replicas * (self.batches_per_update if training else 1)
        counted = None if training else totals
        with compiled_losses.outputs_count(counted, parts, is_unpadded, sample_weight) as losses:
            value = fitting.compute_loss(self.model, x, y, y_pred, weights, training)
        value = tf.convert_to_tensor(value)
        if self.replicas > 1:  # Keras leaves the losses of no examples as they are, of shape (0,)
            value = tf.reduce_sum(value)
        return value, total, losses

    def mean_one(self, weights: tf.Tensor, total: tf.Tensor, share=None) -> tf.Tensor:
        """Divides weights by their mean over the global batch.

        With n replicas that hold `size` weights each, the mean is total / (n size).
        """
        weights = tf.cast(weights, self.floatx)
        count = tf.cast(self.replicas * tf.size(weights), self.floatx)
        if share is not None:
            count /= share
        return weights * tf.math.divide_no_nan(count, total)

    def reduce(self, gradients: list) -> list:
        """Sums the replicas' shares of the gradient."""
        sums = iter(self.global_sums([g for g in gradients if g is not None]))
        return [None if g is None else next(sums) for g in gradients]

    def global_sums(self, values: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sums values over all replicas of all workers."""
        if self.replicas == 1:
            return values
        replica, sums = tf.distribute.get_replica_context(), list(values)
        for dtype in dict.fromkeys(value.dtype for value in values):  # TensorFlow joins the values
            places = [place for place, value in enumerate(values) if value.dtype == dtype]
            of_dtype = [values[place] for place in places]
            found = replica.all_reduce(tf.distribute.ReduceOp.SUM, of_dtype)
            for place, total in zip(places, found, strict=True):
                sums[place] = total
        return sums

    def apply(self, gradients: list, loss: tf.Tensor) -> dict:
        """Applies the gradient of the global batch by Keras's optimizer; returns the metrics."""
        present = [g for g in gradients if g is not None]
        optimizer = self.model.optimizer
        if present:
            norm = tf.linalg.global_norm([tf.cast(g, self.floatx) for g in present])
            scale = getattr(optimizer, "dynamic_scale", None)  # of a LossScaleOptimizer
            if scale is not None:
                norm = norm / tf.cast(scale.value, norm.dtype)
            fixed = getattr(optimizer, "loss_scale_factor", None)
            if fixed is not None:
                norm = norm / tf.cast(fixed, norm.dtype)
            self.norm.assign(tf.cast(norm, self.floatx))
        if self.variables:
            optimizer.apply(gradients, self.variables)
        # Each step counts the same, however many replicas add it to their sums.
        inspection.loss_tracker(self.model).update_state(
            tf.cast(loss, self.floatx), 1 / self.replicas if self.replicas > 1 else None
        )
        return self.model.get_metrics_result()

    def evaluate_batch(self, data, sums, is_unpadded: bool = False, share=None) -> dict:
        """Adds one batch to the metrics; returns them. Runs on each replica."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        y_pred = fitting.call(self.model, x, training=False)
        with self._counted(x, sample_weight, is_unpadded):
            loss, weight, of_outputs = self.loss(
                x, y, y_pred, sample_weight, sums, False, is_unpadded, share
            )
        # A batch counts by its weight: the padded last one counts less. Each of several outputs
        # counts by its own weights; what is left of the loss, such as penalties, by all of them.
        rest = tf.cast(loss, self.floatx)
        # A compute_loss() may call Keras's several times; the metrics have the mean of the calls.
        calls = max(1, len(of_outputs) // compiled_losses.number_of_losses(self.model))
        for value in of_outputs:
            rest -= tf.reduce_sum(tf.cast(value, self.floatx)) / calls
        tracker = inspection.loss_tracker(self.model)
        part = 1.0 if share is None else share
        tracker.update_state(rest, part * (tf.stop_gradient(weight) / self.replicas))
        with compiled_metrics.padding_left_out(None if is_unpadded else sample_weight):
            with self._counted(x, sample_weight, is_unpadded):
                self.measure(x, y, y_pred, sample_weight)
        return self.model.get_metrics_result()

    def _counted(self, x, sample_weight, is_unpadded: bool) -> contextlib.AbstractContextManager:
        """Lets one number, which the model's own methods add to a metric, count by its examples.

        Of a replica with padding it does not: the number is a part of the global batch's mean.
        """
        is_whole = sample_weight is None and self.replicas == 1
        if is_unpadded or is_whole:
            return compiled_losses.examples_of(x)
        return contextlib.nullcontext()

    def measure(self, x, y, y_pred, sample_weight) -> None:
        """Updates the metrics of the model by its own `compute_metrics()`.

        Raises:
            DistributionError: it returns a value that is not a metric, which several batches and
                replicas could not add up.
        """
        found = self.model.compute_metrics(x, y, y_pred, _beside_masks(sample_weight, y_pred))
        kind = type(self.model)
        if kind.compute_metrics is not keras.Model.compute_metrics and found:
            unknown = sorted(found.keys() - self.model.get_metrics_result().keys())
            if unknown:
                raise DistributionError(
                    f"{kind.__name__}.compute_metrics() returns {', '.join(unknown)}, which no "
                    "metric of the model has: make it a keras.metrics.Metric, an attribute of the "
                    "model that compute_metrics() updates"
                )

    # --- Several batches of one update ---

    def _start(self) -> None:
        for variable in (*self.sums, *self.totals):
            variable.assign(tf.zeros_like(variable))

    def _mean_sums(self, batches: tuple) -> list[tf.Tensor]:
        """Returns the mean over batches of each output's sum of weights over a global batch."""
        per_batch = [self.local_sums(data) for data in batches]
        sums = [tf.add_n(parts) / len(batches) for parts in zip(*per_batch, strict=True)]
        return self.global_sums(sums)

    def _add_batch(self, batches: tuple, index: tf.Tensor, sums: list[tf.Tensor]) -> None:
        flat = [tf.nest.flatten(data) for data in batches]
        data = tf.switch_case(index, [lambda batch=batch: batch for batch in flat])
        data = tf.nest.pack_sequence_as(batches[0], data)
        loss, weight, gradients = self._forward_and_backward(data, sums)
        weight = tf.cast(weight, self.floatx)
        for position, gradient in enumerate(gradients):
            if gradient is not None:
                self._used.add(position)
                self.sums[position].assign_add(gradient * tf.cast(weight, gradient.dtype))
        for total, value in zip(
            self.totals, (weight, tf.cast(loss, self.floatx) * weight), strict=True
        ):
            total.assign_add(value)

    def _apply_sums(self) -> dict:
        weight, loss = self.totals
        # None for a variable that has no gradient, as of one batch: Keras does not decay it.
        gradients = [
            tf.math.divide_no_nan(s, tf.cast(weight, s.dtype)) if position in self._used else None
            for position, s in enumerate(self.sums)
        ]
        return self.apply(self.reduce(gradients), tf.math.divide_no_nan(loss, weight))

    # --- The functions of `fit()` and `evaluate()` ---

    def train(self, iterator) -> dict:
        """Makes the updates of one execution; returns the metrics."""
        # A plain function, like Keras's: a tf.function would become part of an export.
        with _one_sentence():
            return self._execution(iterator)

    def _execute(self, iterator):
        # Around all replicas, which are traced in turns.
        with recomputing.recomputed(self.repeated):
            logs = self._updates(iterator)
        drawn_by = randomness.random_operation_of_step()
        if drawn_by is not None:
            raise DistributionError(
                f"the model draws random numbers by {drawn_by} of TensorFlow, whose state no "
                "checkpoint keeps and which replicas do not share: use keras.random with a "
                "keras.random.SeedGenerator of the layer"
            )
        model = self.model
        own = [self.norm, *self.sums, *self.totals]
        require_kept(tf.compat.v1.get_default_graph(), model, [*model.optimizer.variables, *own])
        return logs

    def _updates(self, iterator):
        if self.updates_per_execution > 1:
            for _ in tf.range(self.updates_per_execution - 1):
                tf.autograph.experimental.set_loop_options(parallel_iterations=1)
                self._one_update(iterator)
        return self._logs(self._one_update(iterator))

    def _one_update(self, iterator):
        if self.batches_per_update == 1:
            return self.strategy.run(self._update, args=(next(iterator),))
        taken = []
        for _ in range(self.batches_per_update):
            taken.append(next(iterator))
        batches = tuple(taken)
        sums = self.strategy.run(_plain(self._mean_sums), args=(batches,))
        self.strategy.run(_plain(self._start))
        for index in tf.range(self.batches_per_update):
            # One batch after the other: for the memory, and for the order of collectives.
            tf.autograph.experimental.set_loop_options(parallel_iterations=1)
            self.strategy.run(_plain(self._add_batch), args=(batches, index, sums))
        return self.strategy.run(_plain(self._apply_sums))

    def test(self, iterator) -> dict:
        """Evaluates the batches of one execution, or the remaining ones; returns the metrics."""
        # A model with its own steps may be eager.
        test_step = self._test_batch if self.model.run_eagerly else self._test_step
        with _one_sentence():
            logs = test_step(next(iterator))
            for _, data in zip(range(self.updates_per_execution - 1), iterator, strict=False):
                logs = test_step(data)
            return logs

    def trace_test(self, data: tf.data.Dataset) -> None:
        """Traces the evaluation of a batch, which computes nothing."""
        with _one_sentence():
            self._test_step.get_concrete_function(data.element_spec)

    def _test_batch(self, data):
        return self._logs(self.strategy.run(_plain(self.evaluate), args=(data,)))

    def evaluate(self, data) -> dict:
        """Adds one batch to the metrics; returns them. Runs on each replica."""
        sums = self.sums_of_weights(data)
        try:
            with randomness.part_of_batch(keras.utils.unpack_x_y_sample_weight(data)[0]):
                return self._evaluate_batch(data, sums)
        except compiled_losses.OneNumberError:
            if self.replicas > 1:
                raise
        # A loss that takes a batch as a whole.
        self._evaluate_batch = self.evaluate_without_padding
        return self.evaluate_without_padding(data, sums)

    def evaluate_without_padding(self, data, sums) -> dict:
        """Adds the examples of a batch that have a weight; XLA cannot compile their choice."""
        present = _rows_with_weight(data)
        if present is None:
            return self._evaluate_unpadded(data, sums)
        # The mean over no examples is not a number, and layers may fail without any.
        return tf.cond(
            tf.reduce_any(present),
            lambda: self._evaluate_unpadded(_rows(data, present), sums),
            self.model.get_metrics_result,
        )

    def evaluate_unpadded(self, data, sums, share=None) -> dict:
        """Adds a batch without padding to the metrics; returns them."""
        return self.evaluate_batch(data, sums, is_unpadded=True, share=share)

    def evaluate_own_part(self, data, sums) -> dict:
        """Adds a replica's examples that have a weight; `compute_loss()` may ignore the weights.

        Replicas may have different numbers of them, or none. Where the model adds something up over
        the replicas (masks, outputs of others), all have to, and the padding stays.
        """
        present = _rows_with_weight(data)
        rows = _ones(keras.utils.unpack_x_y_sample_weight(data)[0], self.floatx)
        if present is not None:
            rows *= tf.cast(present, self.floatx)
        count = tf.reduce_sum(rows)
        (of_all,) = self.global_sums([count])
        share = tf.math.divide_no_nan(self.replicas * count, of_all)
        index = tf.distribute.get_replica_context().replica_id_in_sync_group
        place = (index * tf.size(rows), tf.cast(of_all, tf.int32))

        def add() -> dict:
            part = data if present is None else _rows(data, present)
            with _replicas_apart(), randomness.part_of_batch(part[0], place):
                return self._evaluate_unpadded(part, sums, share)

        def unpadded() -> dict:
            return tf.cond(count > 0, add, self.model.get_metrics_result)

        try:
            found = self._or_padded(unpadded, lambda: self._evaluate_padded(data, sums))
        except _AddsUpError:
            return self._evaluate_padded(data, sums)
        self._agree_on_seeds()
        return found

    def _agree_on_seeds(self) -> None:
        """Sets the seeds of replicas that had no example to those of the first one."""
        layers = inspection.layers_of(self.model)
        seeds = [each.state for layer in layers for each in randomness.seeds_of(layer)]
        is_first = tf.distribute.get_replica_context().replica_id_in_sync_group == 0
        values = [tf.convert_to_tensor(seed.value) for seed in seeds]
        values = [tf.where(is_first, value, tf.zeros_like(value)) for value in values]
        for seed, value in zip(seeds, self.global_sums(values), strict=True):
            seed.assign(value)

    def evaluate_compared(self, data, sums) -> dict:
        """Adds the examples that have a weight, which the model's loss may compare."""
        return self._or_padded(
            lambda: self.evaluate_without_padding(data, sums),
            lambda: self._evaluate_padded(data, sums),
        )

    def evaluate_by_own_step(self, data, sums) -> dict:
        """Hands the examples of a batch that have a weight to the model's own `test_step`."""
        present = _rows_with_weight(data)
        if present is None:
            return self._own_test_step(data)
        present |= ~tf.reduce_any(present)  # the logs may be no metrics: padding alone stays whole
        return self._or_padded(
            lambda: self._own_test_step(_rows(data, present)), lambda: self._own_test_step(data)
        )

    def _or_padded(self, unpadded: Callable[[], dict], padded: Callable[[], dict]) -> dict:
        """Evaluates a batch without its padding, or whole where a model takes one size alone.

        Its batch without padding has an unknown size, which `x.shape[0]` of a model needs.
        """
        if self._takes_one_size:
            return padded()
        try:
            return unpadded()
        except (compiled_losses.OneNumberError, _AddsUpError):
            raise
        except Exception:
            found = padded()  # or the error, where the size is not its cause
        self._takes_one_size = True
        log.warning(
            "%s takes batches of one size alone, so the padding of an evaluation's last batch is "
            "among the examples that are compared: use keras.ops.shape(x)[0] instead of "
            "x.shape[0], or a batch size that divides the split",
            type(self.model).__name__,
        )
        return found

    def own_test_step(self, data) -> dict:
        """Returns what the model's own `test_step` returns."""
        with compiled_losses.examples_of(data[0]):
            return self.model.test_step(data)

    def _logs(self, values: dict) -> dict:
        """Averages the results of the replicas; every worker gets the same numbers."""
        if self.replicas == 1:
            return values
        values = flat_results(values)
        names = sorted(values)
        stacked = self.strategy.run(
            _plain(lambda logs: tf.stack([tf.cast(logs[name], self.floatx) for name in names])),
            args=(values,),
        )
        mean = self.strategy.reduce(tf.distribute.ReduceOp.MEAN, stacked, axis=None)
        return dict(zip(names, tf.unstack(mean), strict=True))


class _AddsUpError(Exception):
    """Signals that a traced function sums over the replicas, some of which may not run it."""


@contextlib.contextmanager
def _replicas_apart() -> Iterator[None]:
    """Raises an `_AddsUpError` where the replicas exchange values, while a function is traced."""

    def make(stock):
        def call(self, *args, **kwargs):
            raise _AddsUpError

        return call

    with contextlib.ExitStack() as stack:
        for name in loss_parts.EXCHANGES:
            stack.enter_context(replaced(tf.distribute.ReplicaContext, name, make))
        yield


def require_kept(graph: tf.Graph, model: keras.Model, others: list) -> None:
    """Rejects a step that changes a variable which no checkpoint keeps.

    Args:
        graph: of the traced step.
        model: the model.
        others: variables that may change besides those of the model and its metrics.

    Raises:
        DistributionError: names the variable, and where to create it.
    """
    kept = [*model.variables, *inspection.metric_variables(model), *others]
    kept += [*inspection.states_of_layers(model), *randomness.global_seed()]
    names = randomness.changed_variables(graph, kept)
    if names:
        raise DistributionError(
            f"the training changes the variable {names[0]}, which belongs neither to the model nor "
            "to its optimizer or metrics, so no checkpoint keeps it: create it in a layer, by "
            "self.add_weight(trainable=False) or as a keras.random.SeedGenerator, from which a "
            "loss, regularizer, constraint or schedule may take it"
        )


def flat_results(results: dict) -> dict:
    """Returns the results of metrics, those of a metric that returns a dict among the others."""
    flat: dict = {}
    for name, value in results.items():
        flat |= flat_results(value) if isinstance(value, dict) else {name: value}
    return flat


@contextlib.contextmanager
def _one_sentence() -> Iterator[None]:
    """Raises a `DistributionError` of a trace with its own message.

    TensorFlow raises a copy instead, whose message has the lines of the code that was traced.
    """
    try:
        yield
    except DistributionError as error:
        first: BaseException = error
        while isinstance(first.__context__, DistributionError):
            first = first.__context__
        raise DistributionError(str(first)) from None


def _can_use_cudnn(model: keras.Model) -> bool:
    """Tells whether a model has layers of Keras's attention, and cuDNN can compute them here."""
    if inspection.own_steps(model) or inspection.is_deterministic():
        return False
    layers = [
        each
        for each in inspection.layers_of(model)
        if "Attention" in type(each).__name__ and not attention_layers.attends_by_itself(each)
    ]
    precisions = {each.compute_dtype for each in layers}
    return bool(precisions) and all(map(attention.works, precisions))


def _plain(function):
    return tf.autograph.experimental.do_not_convert(function)


def _local(value: tf.Tensor) -> tf.Variable:
    return tf.Variable(
        value,
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
    )


def _rows_with_weight(data) -> tf.Tensor | None:
    """Returns whether each example of a batch has a weight; None where there are no weights."""
    _, _, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    return compiled_metrics.rows_with_weight(sample_weight)


def _rows(data, present: tf.Tensor):
    """Returns the examples of a batch that are present."""
    return keras.tree.map_structure(
        lambda rows: None if rows is None else tf.boolean_mask(rows, present), data
    )


def _ones(x, dtype) -> tf.Tensor:
    """Returns a weight of one for each example."""
    return tf.ones(tf.shape(keras.tree.flatten(x)[0])[:1], dtype)


def _both(mask, other):
    """Returns where two masks of one shape are true; either may be None."""
    if mask is None or other is None:
        return other if mask is None else mask
    return tf.cast(mask, tf.bool) & other


def _per_output(sample_weight, masks: list, y_pred) -> list[tuple]:
    """Pairs each output's weights with its mask; one tensor of weights serves all outputs."""
    if not keras.tree.is_nested(sample_weight):
        return [(sample_weight, mask) for mask in masks]
    if isinstance(sample_weight, dict) and isinstance(y_pred, dict):  # some may have none
        sample_weight = {name: sample_weight.get(name) for name in y_pred}
    return list(zip(keras.tree.flatten(sample_weight), masks, strict=True))


def _times_mask(weights, mask):
    """Multiplies weights, of the examples or of each value, by a mask; either may be None."""
    if mask is None:
        return None if weights is None else tf.cast(weights, keras.config.floatx())
    mask = tf.cast(mask, keras.config.floatx())
    return mask if weights is None else _as_long(weights, mask) * mask


def _beside_masks(sample_weight, y_pred):
    """Returns the weights, one per value of a mask, since Keras's metrics multiply both."""
    masks = [inspection.mask_of(leaf) for leaf in keras.tree.flatten(y_pred)]
    if sample_weight is None or all(mask is None for mask in masks):
        return sample_weight
    pairs = _per_output(sample_weight, masks, y_pred)
    weights = [w if w is None or m is None else _as_long(w, m) for w, m in pairs]
    return keras.tree.pack_sequence_as(y_pred, weights)


def _as_long(weights, mask):
    """Returns weights of examples, or of each value, in the shape of a mask."""
    weights = tf.cast(weights, keras.config.floatx())
    if len(weights.shape) == len(mask.shape) + 1 and weights.shape[-1] == 1:
        weights = tf.squeeze(weights, axis=-1)
    while len(weights.shape) < len(mask.shape):
        weights = tf.expand_dims(weights, axis=-1)
    return tf.broadcast_to(weights, tf.shape(mask))
