"""Exports a BERT as a SavedModel whose inputs are texts: masked language model or classifier."""

from collections.abc import Sequence
from pathlib import Path

import keras
import keras_nlp
import numpy as np
import tensorflow as tf
import tensorflow_text  # noqa: F401 (its ops are in the graph)

from data.word_pieces import special_ids, with_plain_spaces
from exports.comparison import require_equal

FILLS = 5
TEXTS = tf.TensorSpec([None], tf.string, name="texts")
SECOND_TEXTS = tf.TensorSpec([None], tf.string, name="second_texts")


def write(
    model: keras.Model,
    folder: Path,
    preset: str,
    classes: Sequence[str],
    pairs: bool = False,
    several: bool = False,
) -> str:
    """Writes the SavedModel; its signature `serving_default` takes `texts`, strings of (batch,).

    That of a classifier of pairs also takes `second_texts`.

    A `BertMaskedLM` returns `fills`, strings, and `scores`, float32, both of shape (batch, masks,
    5), in descending order; "" and 0 where a text has fewer masks. A `BertTextClassifier` returns
    `classes`, strings, and `probabilities`, float32, both of shape (batch, classes); one of scores
    returns `scores`, float32 of shape (batch,).

    Args:
        model: in float32.
        folder: does not exist yet.
        preset: the model's own preset, for its tokenizer.
        classes: names in the order of the logits; none for scores; not read for a `BertMaskedLM`.
        pairs: whether a classifier reads two sentences.
        several: whether a text has any number of the classes: probabilities are then each one's.

    Returns:
        One line that describes its inputs.
    """
    is_masked_lm = isinstance(model, keras_nlp.models.BertMaskedLM)
    serve = _fills(model, preset) if is_masked_lm else _classes(model, classes, pairs, several)
    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint("serve", serve)
    archive.write_out(str(folder), verbose=False)
    inputs = "texts and second_texts" if pairs else "texts"
    return f"takes {inputs} of at most {model.preprocessor.sequence_length} tokens"


def compare(model: keras.Model, folder: Path, preset: str, several: bool = False) -> float:
    """Runs the SavedModel on a text; returns its largest difference from the Keras model.

    Args:
        model: the exported model.
        folder: the export.
        preset: the model's own preset, for its tokenizer.
        several: as `write` got it.

    Raises:
        Differs: the outputs differ.
    """
    tokenizer = keras_nlp.models.BertTokenizer.from_preset(preset, special_tokens_in_strings=True)
    words = [piece for piece in tokenizer.get_vocabulary() if piece.isalpha()][:3] or [""]
    serve = tf.saved_model.load(str(folder)).signatures["serving_default"]
    is_masked_lm = isinstance(model, keras_nlp.models.BertMaskedLM)
    length = model.preprocessor.sequence_length
    if SECOND_TEXTS.name in serve.structured_input_signature[1]:
        words = words[: max(0, length - 3) // 2]  # nothing is cut
        given = {TEXTS.name: " ".join(words), SECOND_TEXTS.name: " ".join(reversed(words))}
    else:
        words = words[: max(0, length - 2 - is_masked_lm)]
        given = {TEXTS.name: " ".join([*words, tokenizer.mask_token] if is_masked_lm else words)}
    tensors = {name: tf.constant([text]) for name, text in given.items()}
    outputs = {name: value.numpy() for name, value in serve(**tensors).items()}
    # Without padding and one text at a time, unlike the exported graph.
    segments = [[*tokenizer(text), tokenizer.sep_token_id] for text in given.values()]
    segments[0].insert(0, tokenizer.cls_token_id)
    ids = np.array([sum(segments, [])], np.int32)[:, :length]
    segment_ids = np.repeat(np.arange(len(segments)), list(map(len, segments)))[None, :length]
    inputs = {
        "token_ids": ids,
        "segment_ids": segment_ids.astype(np.int32),
        "padding_mask": 0 * ids + 1,
    }
    if not is_masked_lm:
        if "scores" in outputs:
            return require_equal([outputs["scores"]], model(inputs, training=False)[:, 0])
        activation = keras.ops.sigmoid if several else keras.ops.softmax
        probabilities = activation(model(inputs, training=False))
        return require_equal([outputs["probabilities"]], -np.sort(-np.asarray(probabilities)))
    inputs["mask_positions"] = np.argwhere(ids == tokenizer.mask_token_id)[:, 1:].astype(np.int32)
    logits = np.array(model(inputs, training=False))[..., : tokenizer.vocabulary_size()]
    logits[..., special_ids(tokenizer)] = -np.inf
    probabilities = np.asarray(keras.ops.softmax(logits))
    return require_equal([outputs["scores"]], -np.sort(-probabilities)[..., :FILLS])


def _fills(model: keras_nlp.models.BertMaskedLM, preset: str):
    tokenizer = keras_nlp.models.BertTokenizer.from_preset(preset, special_tokens_in_strings=True)
    length = model.preprocessor.sequence_length
    # One extra position distinguishes a text that fits exactly from one that is too long.
    packer = keras_nlp.layers.StartEndPacker(
        length + 1, tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id
    )
    pieces = tf.constant(tokenizer.get_vocabulary())
    special = tf.one_hot(special_ids(tokenizer), tokenizer.vocabulary_size())
    never = -1e9 * tf.reduce_sum(special, axis=0)

    @tf.function(input_signature=[TEXTS])
    def serve(texts):
        count = tf.shape(texts)[0]
        # KerasHub's head fails on an empty batch.
        texts = tf.concat([texts, tf.fill([tf.maximum(1 - count, 0)], "")], axis=0)
        token_ids = packer(tokenizer(with_plain_spaces(texts, tokenizer)))
        is_token = tf.cast(token_ids != tokenizer.pad_token_id, tf.int32)
        message = f"a text has more than {length} tokens, [CLS] and [SEP] counted"
        tf.debugging.assert_equal(tf.reduce_max(is_token[:, length:]), 0, message)
        token_ids, is_token = token_ids[:, :length], is_token[:, :length]
        places = tf.zeros_like(token_ids) + tf.range(length)
        masks = tf.ragged.boolean_mask(places, token_ids == tokenizer.mask_token_id)
        inputs = {
            "token_ids": token_ids,
            "segment_ids": tf.zeros_like(token_ids),
            "padding_mask": is_token,
            "mask_positions": masks.to_tensor(0),
        }
        logits = model(inputs, training=False)[..., : tokenizer.vocabulary_size()]
        best = tf.math.top_k(tf.nn.softmax(logits + never), FILLS)
        is_mask = tf.sequence_mask(masks.row_lengths())[:, :, tf.newaxis]
        return {
            "fills": tf.where(is_mask, tf.gather(pieces, best.indices), "")[:count],
            "scores": tf.where(is_mask, best.values, 0.0)[:count],
        }

    return serve


def _classes(
    model: keras_nlp.models.BertTextClassifier,
    classes: Sequence[str],
    pairs: bool,
    several: bool,
):
    names = tf.constant(list(classes), tf.string)
    activation = tf.nn.sigmoid if several else tf.nn.softmax

    @tf.function(input_signature=[TEXTS, SECOND_TEXTS] if pairs else [TEXTS])
    def serve(*texts):
        texts = tuple(with_plain_spaces(part, model.preprocessor.tokenizer) for part in texts)
        # With a second argument: KerasNLP would treat a pair alone as inputs and labels.
        inputs = model.preprocessor(texts if pairs else texts[0], None)
        inputs = {name: tf.cast(value, tf.int32) for name, value in inputs.items()}
        if not classes:
            return {"scores": tf.cast(model(inputs, training=False)[:, 0], tf.float32)}
        best = tf.math.top_k(activation(model(inputs, training=False)), len(names))
        return {"classes": tf.gather(names, best.indices), "probabilities": best.values}

    return serve
