"""Measures other costs of training: memory of a step, time to the first step, tokenising.

    python benchmarks/costs.py [--dataset FILE] [--vocabulary FILE] [--json FILE]

- Memory: by how much the resident memory of a process grows at most from the built model to the end
  of the third training step with the stock head, over the same with the head in chunks (vocabulary
  30,522, batch 256 x 128), a process each. Under XLA it includes compiling. The memory of
  TensorFlow, weights and optimizer is excluded.
- Start: seconds from the command to the end of the first step with everything in the cache, and
  with everything but what XLA compiled, less the time of a process that only imports TensorFlow and
  KerasNLP; the three take turns.
- Tokenising: lines by `data.word_pieces.tokenize`, which calls Keras's tokenizer once for each
  distinct word, against the bulk path of the `tokenizers` package on the same lines, with the
  number of lines whose ids differ.
- Mapping: anonymous memory (RssAnon) of a process that has read a whole token store through
  `tf.data`, 1 GB of it, less that of one that has read 100 MB.
- Input: the examples that one of four workers gathers and masks for a global batch, over all of
  it, and the processor time that both take.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from benchmarks import pipelines, steps  # noqa: E402
from benchmarks.pipelines import row  # noqa: E402


def resident(kind: str) -> int:
    """Returns VmRSS or VmHWM (its peak) of this process in bytes."""
    for line in open("/proc/self/status"):
        if line.startswith(kind):
            return 1024 * int(line.split()[1])
    raise KeyError(kind)


def memory_of_a_step(way: str, vocabulary_size: int, batch_size: int) -> None:
    """Prints the peak growth of this process during three steps, in bytes."""
    import numpy as np
    import tensorflow as tf

    from data import masked_lm
    from distribution.keras_compat import patches

    ids = np.random.default_rng(0).integers(5, vocabulary_size, (batch_size, steps.LENGTH))
    special = masked_lm.SpecialTokens(0, 1, 2, 3, 4)
    masking = masked_lm.Masking(special, vocabulary_size, 0.15, round(0.15 * steps.LENGTH), 0)
    data = masked_lm.training_data(ids.astype(np.int32), masking, batch_size=batch_size)
    with patches.patch_keras_for(tf.distribute.get_strategy()):
        model, _ = steps.make_way(way, data, vocabulary_size)
        iterator = iter(data)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = resident("VmRSS")
        for _ in range(3):
            float(model.train_function(iterator)["loss"])
    print(json.dumps({"step": resident("VmHWM") - before, "all": resident("VmHWM")}))


def compare_memory(turns: int) -> list[dict]:
    """Measures the rows of the table: stock head ÷ head in chunks."""
    found = {way: [] for way in ("stock", "chunked", "chunked, XLA")}
    for _ in range(turns):
        for way, values in found.items():
            words = [sys.executable, __file__, "--memory-of", way]
            done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
            if done.returncode:
                raise SystemExit(done.stderr[-3000:])
            values.append(json.loads(done.stdout)["step"])
        print(f"memory: {found}", file=sys.stderr)
    rows = []
    for way in ("chunked", "chunked, XLA"):
        ratios = [a / b for a, b in zip(found["stock"], found[way], strict=True)]
        rows.append(row(f"memory of a step, stock head ÷ {way}", ratios))
        rows[-1]["megabytes"] = [round(statistics.median(found[w]) / 1e6) for w in ("stock", way)]
    return rows


def first_step(folder: Path, index: int) -> float:
    """Returns the seconds from the command to the end of the first step."""
    run = folder / f"run-{index}"
    words = [sys.executable, "-m", "recipes.bert_mlm", "--dataset", str(folder / "text")]
    words += ["--vocabulary", str(folder / "vocabulary.txt"), "--cache-dir", str(folder / "cache")]
    words += ["--preset", "scratch", "--run-dir", str(run), "--log-every", "1", "--quiet"]
    begun = time.perf_counter()
    process = subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        # The record of step 1 is written at its end.
        while not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").stat().st_size:
            if process.poll() is not None:
                raise SystemExit(f"the run ended with status {process.returncode}")
            time.sleep(0.02)
        return time.perf_counter() - begun
    finally:
        process.kill()
        process.wait()


def compare_start(folder: Path, turns: int) -> list[dict]:
    """Measures the rows of the table: seconds without the imports."""
    code = "import os; os.environ['KERAS_BACKEND'] = 'tensorflow'; import tensorflow, keras_nlp"
    first_step(folder, 0)  # fills the cache
    known, compiled = [], []
    for turn in range(1, turns + 1):
        begun = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        imports = time.perf_counter() - begun
        known.append(first_step(folder, 2 * turn) - imports)
        shutil.rmtree(folder / "cache" / "programs", ignore_errors=True)
        compiled.append(first_step(folder, 2 * turn + 1) - imports)
        print(
            f"start: {known[-1]:.2f} s; compiling {compiled[-1]:.2f} s; imports {imports:.2f} s",
            file=sys.stderr,
        )
    return [
        row("seconds to the end of the first step, less the imports: program known", known),
        row("seconds to the end of the first step, less the imports: program compiled", compiled),
    ]


def write_store(folder: Path, megabytes: int):
    """Writes a token store of random ids to a folder; returns its mapped rows."""
    import numpy as np

    from data import sequences

    rows, block = megabytes * 10**6 // (2 * steps.LENGTH), 100_000
    rng = np.random.default_rng(0)

    def blocks():
        for start in range(0, rows, block):
            yield rng.integers(5, 30_522, (min(block, rows - start), steps.LENGTH), np.uint16)

    if not folder.exists():
        folder.mkdir(parents=True)
        sequences.write(folder / "train.bin", blocks(), sequences.dtype_of(30_522))
    return sequences.mapped(folder / "train.bin", sequences.dtype_of(30_522), steps.LENGTH)


def read_store(folder: Path, megabytes: int) -> None:
    """Prints the anonymous memory of this process after it has read a store through `tf.data`."""
    import tensorflow as tf

    from data import arrays, batches

    stored = write_store(folder, megabytes)  # reads the existing store
    tensor = arrays.as_tensor(stored)

    def make_batch(indices, epoch):
        rows = tf.gather(tensor, indices)
        return rows, rows, tf.ones_like(indices, tf.float32)

    total = 0
    for rows, _, _ in batches.evaluation_batches(len(stored), 4096, make_batch):
        total += int(tf.reduce_max(rows))
    assert total
    print(json.dumps(resident("RssAnon")))


def compare_mapping(folder: Path, turns: int) -> dict:
    """Measures the row of the table: additional megabytes for a larger store."""
    sizes, differences = (100, 1000), []
    for size in sizes:
        write_store(folder / f"store-{size}", size)
    for _ in range(turns):
        anonymous = []
        for size in sizes:
            words = [sys.executable, __file__, "--read-store", str(folder / f"store-{size}")]
            done = subprocess.run([*words, str(size)], capture_output=True, text=True, cwd=ROOT)
            if done.returncode:
                raise SystemExit(done.stderr[-3000:])
            anonymous.append(json.loads(done.stdout))
        differences.append((anonymous[1] - anonymous[0]) / 1e6)
        print(f"mapping: {anonymous}", file=sys.stderr)
    return row("RssAnon after reading a store of 1 GB, less of 100 MB, in MB", differences)


def compare_input(folder: Path, turns: int, workers: int = 4, batches: int = 300) -> list[dict]:
    """Measures the rows of the table: a worker's part ÷ the whole global batch."""
    import numpy as np
    import tensorflow as tf

    from data import masked_lm

    sizes = json.loads((folder / "sizes.json").read_text())
    special = masked_lm.SpecialTokens(0, 1, 2, 3, 4)
    masking = masked_lm.Masking(special, sizes["vocabulary_size"], 0.15, 19, 0)
    data = masked_lm.training_data(np.load(folder / "train.npy"), masking, batch_size=32 * workers)
    parts = [data.part_of_worker(0, count).take(batches) for count in (workers, 1)]
    examples, seconds = [], []
    for turn in range(turns + 1):
        found, begun = [], [time.process_time()]
        for part in parts:
            found.append(int(part.reduce(0, lambda count, batch: count + tf.shape(batch[1])[0])))
            begun.append(time.process_time())
        if turn:  # the first one warms up
            examples.append(found[0] / found[1])
            seconds.append((begun[1] - begun[0]) / (begun[2] - begun[1]))
    return [
        row(f"examples that one of {workers} workers gathers and masks ÷ global batch", examples),
        row(f"processor time of the input of one of {workers} workers ÷ of all of it", seconds),
    ]


def compare_tokenizers(folder: Path, turns: int) -> dict:
    """Measures the row of the table: this package ÷ the bulk path of `tokenizers`."""
    import keras_nlp
    import numpy as np
    import tokenizers

    from data import word_pieces

    pieces = word_pieces.read_vocabulary(folder / "vocabulary.txt")
    # WikiText's `<unk>` is [UNK] in this package and three letters in brackets in `tokenizers`.
    text = (folder / "text" / "wiki.train.tokens").read_text("utf-8").replace("<unk>", " ")
    lines = text.splitlines()
    stock = keras_nlp.models.BertTokenizer(vocabulary=pieces, lowercase=True, strip_accents=True)
    bulk = tokenizers.BertWordPieceTokenizer(
        {piece: number for number, piece in enumerate(pieces)}, lowercase=True
    )
    ratios = []
    for turn in range(turns + 1):
        begun = time.perf_counter()
        ids = [ids for ids, _ in word_pieces.tokenize(lines, stock)]
        middle = time.perf_counter()
        encoded = bulk.encode_batch(lines, add_special_tokens=False)
        theirs = [each.ids for each in encoded]
        end = time.perf_counter()
        if turn:  # the first one warms up
            ratios.append((end - middle) / (middle - begun))
    lengths = np.concatenate([sizes for _, sizes in word_pieces.tokenize(lines, stock)])
    rows = np.split(np.concatenate(ids), np.cumsum(lengths)[:-1])
    differ = [
        line
        for line, ours, other in zip(lines, rows, theirs, strict=True)
        if ours.tolist() != other
    ]
    words = sorted({word for line in differ for word in line.split()})
    others = bulk.encode_batch(words, add_special_tokens=False)
    words = [
        word
        for word, ours, other in zip(words, stock(words), others, strict=True)
        if list(ours) != other.ids
    ]
    found = row("tokens/s: each distinct word once ÷ `tokenizers` in bulk", ratios)
    return found | {"lines": len(lines), "lines_that_differ": len(differ), "words": words}


def main() -> None:
    """Measures, prints the table, and writes it to `--json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    pipelines.text_options(parser)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    parser.add_argument("--read-store", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.read_store:
        read_store(Path(chosen.read_store[0]), int(chosen.read_store[1]))
        return
    if chosen.memory_of:
        memory_of_a_step(chosen.memory_of, 30_522, 256)
        return
    sizes = {"batch_size": 32, "length": 128, "vocabulary_size": chosen.vocabulary_size}
    with tempfile.TemporaryDirectory(prefix="costs-") as temporary:
        folder = Path(temporary) / "work"
        pipelines.prepare(folder, chosen.dataset, chosen.vocabulary, sizes)
        rows = [
            compare_tokenizers(folder, chosen.turns),
            *compare_start(folder, chosen.turns),
            *compare_input(folder, chosen.turns),
            compare_mapping(folder, min(chosen.turns, 2)),
        ]
    rows += compare_memory(min(chosen.turns, 3))
    print()
    for each in rows:
        print(
            f"{each['measure']:56} {each['median']:8.2f} {each['smallest']:8.2f} "
            f"{each['largest']:8.2f}"
        )
    if chosen.json:
        chosen.json.write_text(json.dumps({"rows": rows}, indent=2))


if __name__ == "__main__":
    main()
