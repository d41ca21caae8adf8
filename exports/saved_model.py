"""A TensorFlow SavedModel that takes what a person has: texts, oligos, images."""

import json
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
import tensorflow_text  # noqa: F401 (its ops are in the graph of a BERT)

from data import oligos
from exports import compare
from exports.trained import Trained
from models.bert import special_ids

FILLS = 5


def write(trained: Trained, folder: Path) -> dict[str, float]:
    """Writes the SavedModel, loads it again, and compares it with the Keras model.

    Its signature `serving_default` takes and gives, by recipe:

    - "bert_mlm": `texts`, string of shape (batch,), to `fills`, string, and `scores`, float32, of
      shape (batch, masks, 5), the likeliest first; "" and 0 where a text has fewer masks.
    - "text_classification": `texts` to `classes`, string, and `probabilities`, float32, of shape
      (batch, classes), the likeliest first.
    - "mnist": `images`, float32 of shape (batch, 28, 28, 1) in [0, 1], to `probabilities`, float32
      of shape (batch, 10).
    - "dna_melting": `sequences`, string of shape (batch,), to `celsius`, float32 of shape (batch,).

    Args:
        trained: what is exported.
        folder: a folder that is not there yet.

    Returns:
        The largest differences from the Keras model, by what was compared.

    Raises:
        RunError: it differs from the Keras model.
    """
    serve = {
        "bert_mlm": _fills,
        "text_classification": _classes,
        "mnist": _digits,
        "dna_melting": _celsius,
    }[trained.recipe](trained)
    archive = keras.export.ExportArchive()
    archive.track(trained.model)
    archive.add_endpoint("serve", serve)
    archive.write_out(str(folder), verbose=False)
    loaded = tf.saved_model.load(str(folder)).signatures["serving_default"]
    return _compare(trained, loaded)


def _fills(trained: Trained):
    tokenizer, model, longest = trained.tokenizer, trained.model, trained.longest
    pieces = tf.constant(tokenizer.get_vocabulary())
    no_fill = tf.constant(special_ids(tokenizer))
    forbidden = tf.reduce_max(tf.one_hot(no_fill, tokenizer.vocabulary_size()), 0) * -1e9

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="texts")])
    def serve(texts):
        for _ in range(2):  # two that share a space are not found at once
            texts = tf.strings.regex_replace(texts, r"(^|\s)<unk>(\s|$)", r"\1[UNK]\2")
        ragged = tokenizer(texts)
        ends = tf.fill([ragged.nrows(), 1], tokenizer.sep_token_id)
        begins = tf.fill([ragged.nrows(), 1], tokenizer.cls_token_id)
        ragged = tf.concat([begins, ragged, ends], axis=1)
        tf.debugging.assert_less_equal(
            *(tf.reduce_max(ragged.row_lengths()), tf.constant(longest, tf.int64)),
            message=f"a text has more than {longest} tokens, [CLS] and [SEP] counted",
        )
        token_ids = ragged.to_tensor(tokenizer.pad_token_id)
        is_mask = token_ids == tokenizer.mask_token_id
        columns = tf.ragged.boolean_mask(tf.zeros_like(token_ids) + _columns(token_ids), is_mask)
        places = columns.to_tensor(0)
        logits = model(
            {
                "token_ids": token_ids,
                "segment_ids": tf.zeros_like(token_ids),
                "padding_mask": tf.sequence_mask(ragged.row_lengths(), dtype=tf.int32),
                "mask_positions": places,
            },
            training=False,
        )
        best = tf.math.top_k(tf.nn.softmax(logits + forbidden), FILLS)
        there = tf.sequence_mask(columns.row_lengths())[:, :, tf.newaxis]
        return {
            "fills": tf.where(there, tf.gather(pieces, best.indices), ""),
            "scores": tf.where(there, best.values, 0.0),
        }

    return serve


def _columns(token_ids):
    return tf.range(tf.shape(token_ids)[1])[tf.newaxis]


def _classes(trained: Trained):
    names, preprocessor = tf.constant(trained.classes), trained.model.preprocessor

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="texts")])
    def serve(texts):
        inputs = preprocessor(texts)
        inputs = {name: tf.cast(value, tf.int32) for name, value in inputs.items()}
        best = tf.math.top_k(tf.nn.softmax(trained.model(inputs, training=False)), len(names))
        return {"classes": tf.gather(names, best.indices), "probabilities": best.values}

    return serve


def _digits(trained: Trained):
    shape = trained.model.input_shape

    @tf.function(input_signature=[tf.TensorSpec(shape, tf.float32, name="images")])
    def serve(images):
        return {"probabilities": tf.nn.softmax(trained.model(images, training=False))}

    return serve


def _celsius(trained: Trained):
    token_of = np.zeros(256, np.int32)
    for token, base in enumerate(oligos.BASES, start=1):
        token_of[[ord(base), ord(base.lower())]] = token
    longest = trained.longest

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="sequences")])
    def serve(sequences):
        lengths = tf.strings.length(sequences)
        tf.debugging.assert_less_equal(
            *(tf.reduce_max(lengths), longest), message=f"more than {longest} bases"
        )
        letters = tf.io.decode_raw(sequences, tf.uint8, fixed_length=longest)
        token_ids = tf.gather(token_of, tf.cast(letters, tf.int32))
        tf.debugging.assert_equal(
            *(tf.math.count_nonzero(token_ids, axis=1, dtype=tf.int32), lengths),
            message=f"a sequence has letters that are none of {''.join(oligos.BASES)}",
        )
        return {"celsius": trained.model(token_ids, training=False)[:, 0]}

    return serve


def _compare(trained: Trained, loaded) -> dict[str, float]:
    what = "saved_model"
    if trained.recipe == "mnist":
        found = loaded(images=tf.constant(trained.inputs["images"]))["probabilities"]
        difference = compare.largest_difference(_softmax(trained.outputs), found)
        return {"probabilities": compare.require(what, difference, compare.PROBABILITIES)}
    if trained.recipe == "dna_melting":
        found = loaded(sequences=tf.constant(trained.sources))["celsius"].numpy()
        return {"celsius": compare.require_same_logits(what, trained.outputs[:, 0], found)}
    found = {k: v.numpy() for k, v in loaded(texts=tf.constant(trained.sources)).items()}
    if trained.recipe == "bert_mlm":
        logits = trained.outputs[:, 0].copy()
        logits[:, special_ids(trained.tokenizer)] = -np.inf
        expected = _softmax(logits)
        ids = _numbers(found["fills"][:, 0], trained.tokenizer.get_vocabulary())
        scores = found["scores"][:, 0]
    else:
        expected = _softmax(trained.outputs)
        ids, scores = _numbers(found["classes"], trained.classes or []), found["probabilities"]
    # The piece that is named has that probability, and no other has more: ties may change places.
    best = -np.sort(-expected, axis=1)[:, : ids.shape[1]]
    named = np.take_along_axis(expected, ids, axis=1)
    difference = max(
        compare.largest_difference(best, scores), compare.largest_difference(named, scores)
    )
    return {"probabilities": compare.require(what, difference, compare.PROBABILITIES)}


def _numbers(names: np.ndarray, all_names: list[str]) -> np.ndarray:
    number = {name: i for i, name in enumerate(all_names)}
    return np.vectorize(lambda name: number[name.decode()], otypes=[int])(names)


def _softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def how_to_load(trained: Trained) -> str:
    """Python that loads the folder it is run in, without Keras."""
    examples = {
        "bert_mlm": ("texts", ["the [MASK] of the year"]),
        "text_classification": ("texts", ["a small miracle of a film"]),
        "mnist": ("images", None),
        "dna_melting": ("sequences", ["GATTACAGATTACA"]),
    }
    name, value = examples[trained.recipe]
    given = "tf.zeros([1, 28, 28, 1])" if value is None else f"tf.constant({json.dumps(value)})"
    text = "import tensorflow_text  # its ops are in the graph\n" if trained.is_bert else ""
    return (
        f'import tensorflow as tf\n{text}\nserve = tf.saved_model.load(".").signatures'
        f'["serving_default"]\nprint(serve({name}={given}))'
    )
