"""Classify sentences: a KerasNLP task on its own preprocessor, with dropout."""

import dataclasses

import keras
import keras_nlp
import numpy as np

from data import arrays
from training.command_line import command_line
from training.options import SharedOptions
from training.run import start_run

WORDS = "the film was good poor long short very a story".split()


@dataclasses.dataclass(kw_only=True)
class Options(SharedOptions):
    """Options of the program."""


def main(options: Options) -> dict:
    """Trains and tests."""
    with start_run("kerasnlp_task", options) as run:
        if run.finished:
            return run.results
        rng = np.random.default_rng(5)
        sentences = [" ".join(rng.choice(WORDS, 3 + i % 6)) for i in range(66)]
        labels = np.array(["good" in sentence for sentence in sentences], "int32")
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        preprocessor = keras_nlp.models.DistilBertTextClassifierPreprocessor(
            keras_nlp.models.DistilBertTokenizer(special + WORDS), sequence_length=12
        )
        x = {name: np.array(array, "int32") for name, array in preprocessor(sentences).items()}

        def part(begin, end):
            return {name: array[begin:end] for name, array in x.items()}, labels[begin:end]

        plan = run.plan(examples=40, base_learning_rate=1e-3)
        train = arrays.training_data(*part(0, 40), seed=options.seed, **plan.batches)
        valid = arrays.evaluation_data(*part(40, 51), batch_size=plan.global_batch_size)
        test = arrays.evaluation_data(*part(51, 66), batch_size=plan.global_batch_size)

        with run.strategy.scope():
            backbone = keras_nlp.models.DistilBertBackbone(
                vocabulary_size=15, num_layers=1, num_heads=2, hidden_dim=8, intermediate_dim=16
            )
            model = keras_nlp.models.DistilBertTextClassifier(backbone, num_classes=2)
            model.compile(optimizer=keras.optimizers.AdamW(plan.learning_rate))  # KerasNLP's loss
        fit_options = run.prepare(model, train, validation=valid, test=test)
        model.fit(train, **fit_options)
        scores = model.evaluate(test, return_dict=True, **run.evaluate_options)
        return run.finish(model, test=scores, baseline={}, preprocessor=preprocessor)


if __name__ == "__main__":
    command_line(Options, main)
