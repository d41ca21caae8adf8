"""Measures the share of time that saving checkpoints takes, at the default interval.

    python benchmarks/checkpoint_cost.py

Trains the default BERT on generated text and times, in one run, the steps and each save.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipes import bert_mlm  # noqa: E402

EPOCH = 258  # steps of an epoch of the default run without a network; each ends with a save


def main(steps: int = 60, saves: int = 6) -> None:
    from callbacks.checkpoint import Checkpoint
    from tests.support.strategy_run import write_text

    spent = []
    stock = Checkpoint.save

    def save(self, *args, **kwargs):
        begun = time.perf_counter()
        stock(self, *args, **kwargs)
        spent.append(time.perf_counter() - begun)

    Checkpoint.save = save
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        write_text(text)
        text.write_text(text.read_text() * 80)
        options = bert_mlm.Options(
            dataset=str(text),
            preset="scratch",
            vocabulary=_vocabulary(Path(folder)),
            max_steps=steps,
            checkpoint_every=steps // saves,
            run_dir=Path(folder) / "run",
            cache_dir=Path(folder) / "cache",
            quiet=True,
        )
        results = bert_mlm.main(options)
    a_step = results["global_batch_size"] / results["examples_per_second"]
    a_save = sorted(spent)[len(spent) // 2]
    every = bert_mlm.Options().checkpoint_every
    saving = a_save * (1 / every + 1 / EPOCH)  # seconds a step
    print(
        json.dumps(
            {
                "seconds_a_step": round(a_step, 4),
                "seconds_a_save": round(a_save, 4),
                "checkpoint_every": every,
                "share_of_training_time": round(a_save / (every * a_step + a_save), 5),
                "steps_in_an_epoch_of_installed_docs": EPOCH,
                "share_with_one_an_epoch_too": round(saving / (a_step + saving), 5),
            }
        )
    )


def _vocabulary(folder: Path) -> Path:
    """Returns 8,192 pieces, the default's number for the installed packages' docstrings."""
    from data.word_pieces import SPECIAL_TOKENS

    letters = [chr(c) for c in range(33, 127) if not chr(c).isupper()]
    pieces = [*SPECIAL_TOKENS, *letters, *(f"##{c}" for c in letters)]
    pieces += [f"word{number}" for number in range(8192 - len(pieces))]
    path = folder / "vocabulary.txt"
    path.write_text("".join(f"{piece}\n" for piece in pieces))
    return path


if __name__ == "__main__":
    main()
