"""Rejects a compiled model that a run cannot build, train exactly or keep in a checkpoint."""

import keras
import tensorflow as tf

from data.errors import first_line, listed
from distribution import loss_parts, step
from distribution.errors import DistributionError
from distribution.keras_compat import compiled_losses, fitting, inspection, randomness
from training.errors import RunError

NO_LOSS = "No loss to compute"  # in Keras's error
# Packages whose layers and losses treat each example by itself, but for those that are refused.
PACKAGES_OF_SEPARATE_EXAMPLES = ("keras", "keras_hub", "keras_nlp", "models")
# By how much the loss of a batch and the mean of its parts' losses may differ, by compute dtype.
ROUNDING_OF_LOSSES = {"float64": 1e-8, "float32": 1e-4}  # 0.02 in half precision


def random_layers_note(model: keras.Model) -> str | None:
    """Returns a line that names layers whose draws may depend on the number of replicas, or None.

    Most of Keras's are not among them, see `randomness.draw_by_place`. How a layer of the user's
    uses its generators cannot be seen.
    """
    names = [
        layer.name
        for layer in inspection.layers_of(model)
        if randomness.seeds_of(layer) and not randomness.draws_by_place(layer)
    ]
    if not names:
        return None
    return (
        f"{listed(names)}: random numbers that keras.random draws with the batch as the first axis "
        "are those of one device; others, and keras.random.shuffle() and categorical(), each "
        "replica draws for its own examples, so the results may depend on the number of replicas"
    )


def require_compiled(model: keras.Model, train_data) -> None:
    """Rejects a model without `compile()` or `call()`; data that are ragged or not a dataset.

    Raises:
        RunError: one line per problem, with the remedy.
    """
    problems = []
    if not model.compiled:
        problems.append("run.prepare() takes a compiled model: call model.compile() before")
    if type(model).call is keras.Model.call:
        problems.append(
            f"{type(model).__name__} has no call(), which builds and evaluates a model: write one "
            "that takes the inputs of train_data (of a GAN for instance: return "
            "self.discriminator(inputs))"
        )
    if model.compiled and model.run_eagerly and not inspection.own_steps(model):
        problems.append(
            f"{type(model).__name__} is compiled with run_eagerly=True, and a run computes its "
            "steps as graphs: leave it out"
        )
    executed = inspection.compiled_steps_per_execution(model) if model.compiled else 1
    if not isinstance(executed, int) or executed < 1:
        problems.append(
            f"{type(model).__name__} is compiled with steps_per_execution={executed!r}: expected "
            "a number of steps, at least 1"
        )
    if not isinstance(train_data, tf.data.Dataset):
        problems.append(
            f"train_data is a {type(train_data).__name__}: expected batches as a tf.data.Dataset; "
            "data.arrays.training_data(..., **plan.batches) makes them from arrays, "
            "data.batches.training_batches(..., **plan.batches) from a function that returns the "
            "examples of some indices"
        )
    elif any(
        isinstance(spec, tf.RaggedTensorSpec) for spec in tf.nest.flatten(train_data.element_spec)
    ):
        problems.append(
            "train_data has ragged tensors: pad them with zeros, .to_tensor(shape=(None, length)), "
            "and let the model mask them, Embedding(..., mask_zero=True) or Masking()"
        )
    else:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(train_data.element_spec)
        has_labels = not isinstance(y, tf.NoneTensorSpec | None)
        parts = (x, y, weights) if has_labels else (x, weights)
        if any(isinstance(spec, tf.NoneTensorSpec) for spec in tf.nest.flatten(parts)):
            problems.append(
                "train_data has None in a batch: an output without weights of its own needs ones"
            )
        if isinstance(y, dict) and isinstance(weights, dict) and y.keys() - weights.keys():
            problems.append(
                f"train_data has no weights for {listed(sorted(y.keys() - weights.keys()))}: an "
                "output without weights of its own needs ones"
            )
        if model.compiled and not has_labels and inspection.needs_labels(model):
            problems.append(
                "train_data has no labels, which the loss or the metrics of compile() compare with "
                "the outputs: pass them as y (of an autoencoder x itself), or write a "
                "compute_loss() that needs none"
            )
    if problems:
        raise RunError("\n".join(problems))


def require_kept_variables(model: keras.Model) -> None:
    """Rejects variables of TensorFlow in layers, which Keras neither trains nor saves.

    Args:
        model: built.

    Raises:
        RunError: names the layer and its attribute.
    """
    for layer in inspection.layers_of(model):
        for name, value in vars(layer).items():
            if name.startswith("_self_"):  # TensorFlow's own lists of them
                continue
            values = value.values() if isinstance(value, dict) else value
            for leaf in values if isinstance(value, list | tuple | dict) else (value,):
                if isinstance(leaf, tf.Variable):
                    raise RunError(
                        f"{type(layer).__name__}.{name} of the layer {layer.name} is a "
                        "tf.Variable, which Keras does not train and no checkpoint keeps: use "
                        "self.add_weight(), or tf.constant() for what does not change"
                    )


def build_own_step(model: keras.Model, train_data: tf.data.Dataset) -> None:
    """Builds the optimizers of a `train_step` that the model overrides, by tracing it once.

    Keras builds those besides `model.optimizer` in the first step of `fit()`. That is too late to
    restore a checkpoint: Keras skips their state. Tracing computes nothing.

    Args:
        model: compiled and built, under its strategy's scope.
        train_data: the training data.

    Raises:
        RunError: the step returns no loss, or works with `compile(run_eagerly=True)` alone.
    """
    strategy = model.distribute_strategy
    # On several replicas such a model is rejected later.
    if "train_step" not in inspection.own_steps(model) or strategy.num_replicas_in_sync > 1:
        return
    with strategy.scope():
        step_of_batch = tf.function(
            lambda batch: strategy.run(model.train_step, (batch,)), autograph=False
        )
        try:
            traced = step_of_batch.get_concrete_function(train_data.element_spec)
        except Exception as error:  # any that the step raises
            if not model.run_eagerly:
                raise
            raise RunError(
                f"{type(model).__name__}.train_step() works with run_eagerly=True alone "
                f"({first_line(error)}); a run traces it, to build its optimizers"
            ) from error
    names = list(traced.structured_outputs or {})
    if "loss" not in names:
        raise RunError(
            f"{type(model).__name__}.train_step() returns {', '.join(names) or 'nothing'}: add "
            "'loss', the number that the run logs, and that ends it where it is not finite"
        )
    optimizers = [*model.optimizer.variables, *optimizer_variables(model)]
    step.require_kept(traced.graph, model, optimizers)


def require_test_step(
    model: keras.Model, installed: step.Step, validated: list, test
) -> str | None:
    """Rejects a model whose own `train_step` has a loss that its evaluation lacks.

    Traces the evaluation, which computes nothing: it would fail after the first epoch.

    Args:
        model: compiled and built; others than those with a `train_step` need a loss to train.
        installed: its step.
        validated: the splits that `fit()` evaluates; may contain None.
        test: the test split, which a recipe may evaluate without Keras; or None.

    Returns:
        A line if only an `evaluate()` of the recipe would fail, or None.

    Raises:
        RunError: names the remedy.
    """
    if "train_step" not in inspection.own_steps(model) or model.run_eagerly:
        return None
    problem = (
        f"{type(model).__name__} has a train_step and no loss in compile(), so evaluate() fails: "
        "write a test_step"
    )
    validated = [data for data in validated if data is not None]
    try:
        for data in validated:
            installed.trace_test(fitting.batches_of(data))
    except ValueError as error:
        if NO_LOSS not in str(error):
            raise
        raise RunError(
            f"{problem}, or pass validation=None to run.prepare(), without --test-every"
        ) from error
    if test is None or validated:
        return None
    try:
        installed.trace_test(fitting.batches_of(test))
    except Exception as error:  # any that the recipe may have no part in
        return problem if NO_LOSS in str(error) else None
    return None


def require_separate_examples(
    model: keras.Model, installed: step.Step, train_data: tf.data.Dataset
) -> str | None:
    """Rejects a model whose loss of a batch is not the mean of the losses of the batch's parts.

    Replicas, and the batches of an update, have a part each. Models and losses of Keras alone are
    not tried.

    Args:
        model: compiled and built.
        installed: its step, for several replicas or batches per update.
        train_data: its first examples are evaluated.

    Returns:
        A note if it cannot be tried.

    Raises:
        DistributionError: has both numbers, and the way out.
    """
    if not _has_own_parts(model):
        return None
    try:
        found = loss_parts.losses(installed, next(iter(train_data.take(1))))
    except DistributionError:
        raise
    except Exception as error:  # any that the model raises for fewer examples than usual
        return (
            f"{type(model).__name__}: could not try whether the loss of a batch is the mean of "
            f"its parts' losses ({first_line(error)}); it must not compare the batch's examples"
        )
    if found is None:
        return None
    whole, parts = found
    rounding = ROUNDING_OF_LOSSES.get(keras.config.dtype_policy().compute_dtype, 0.02)
    if not abs(whole - parts) > rounding * max(1.0, abs(whole)):  # also where it is not a number
        return None
    each = "replica" if installed.replicas > 1 else "accumulated batch"
    raise DistributionError(
        f"{type(model).__name__}: some examples have a loss of {whole:.6g} as one batch, and of "
        f"{parts:.6g} in parts, of which each {each} has one. A loss, compute_loss() or layer of "
        "yours compares the examples of a batch (in-batch negatives), adds their losses up, or "
        "divides by its own sum of weights: return the mean over the batch of each example's "
        "loss, times sample_weight where that is not None, or train on one device (--strategy "
        "none, without --accumulate-steps)"
    )


def _has_own_parts(model: keras.Model) -> bool:
    """Tells whether a model has layers or losses of the user's, or operations between layers."""
    layers = inspection.layers_of(model)
    for layer in layers:
        is_stock = type(layer).__module__.partition(".")[0] in PACKAGES_OF_SEPARATE_EXAMPLES
        if not is_stock or isinstance(layer, keras.layers.Lambda):
            return True
        if type(layer).__module__.startswith("keras.") and any(
            not isinstance(operation, keras.layers.Layer)
            for operation in getattr(layer, "operations", [])
        ):
            return True
    return compiled_losses.may_mix_examples(model)


def require_in_scope(model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    """Rejects parts of a compiled model that were created outside of the strategy's scope.

    Replicas would share one copy of a metric's sums, or TensorFlow would fail at the first step. On
    one device it makes no difference.

    Raises:
        RunError: names the part.
    """
    if strategy.num_replicas_in_sync == 1:
        return

    def in_scope(variables) -> bool:
        created_in_scope = strategy.extended.variable_created_in_scope
        return all(created_in_scope(variable.value) for variable in variables)

    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    outside = []
    if model.distribute_strategy is not strategy or not in_scope(model.variables):
        outside.append(f"the model {model.name}")
    elif not in_scope(optimizer.variables):
        outside.append(f"the optimizer {type(optimizer).__name__}")
    else:
        metrics = [metric for each in model.metrics for metric in getattr(each, "metrics", [each])]
        outside += [f"the metric {m.name}" for m in metrics if not in_scope(m.variables)]
    if outside:
        raise RunError(
            f"{outside[0]} was created outside of the strategy's scope: create the model, its "
            "optimizer and its metrics, and call compile(), inside `with run.strategy.scope():`"
        )


def optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Returns the optimizers of the training: those of `compile()`, then others that are built.

    The others are attributes of the model or of its layers, or in lists and dicts that are.
    """
    found = {id(each): each for each in step.inner_optimizers(model.optimizer)}
    for layer in inspection.layers_of(model):
        for value in vars(layer).values():
            parts = value.values() if isinstance(value, dict) else value
            for part in parts if isinstance(value, dict | list | tuple) else [value]:
                is_other = isinstance(part, keras.optimizers.Optimizer) and part.built
                if is_other and part is not model.optimizer:
                    found[id(part)] = part
    return list(found.values())


def optimizer_variables(model: keras.Model) -> list:
    """Returns the variables of `optimizers_of(model)`, in their order."""
    return [variable for each in optimizers_of(model) for variable in each.variables]


def suitable_inputs(part: keras.Model, inputs):
    """Returns inputs that a part of a model takes, for a comparison of what it answers.

    Args:
        part: For instance one tower of two, or the generator beside a discriminator.
        inputs: Of the whole model, tensors of shape (1, ...).

    Returns:
        `inputs` if the part takes such ones, or its layers do not say what it takes; otherwise
        ones of its shapes, with unknown sizes of one.
    """
    struct = getattr(part, "input", None)
    if struct is None:  # of a Sequential that was never called by itself
        struct = next(iter(getattr(part, "inputs", None) or ()), None)
    wanted = [tensor for tensor in keras.tree.flatten(struct) if tensor is not None]
    given = keras.tree.flatten(inputs)
    if not wanted or any(tensor.dtype == "string" for tensor in wanted):
        return inputs
    if len(wanted) == len(given) and all(map(_fits, wanted, given)):
        return inputs
    return keras.tree.map_structure(
        lambda tensor: keras.ops.ones([size or 1 for size in tensor.shape], tensor.dtype),
        struct,
    )


def _fits(wanted, given) -> bool:
    sizes = zip(wanted.shape, given.shape, strict=False)
    return len(wanted.shape) == len(given.shape) and all(
        size is None or size == found for size, found in sizes
    )
