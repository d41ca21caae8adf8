"""Labels that are scores: how they are read, and what is measured and computed from them."""

import re

import numpy as np
import pytest
import scipy.stats
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import Ridge
from sklearn.metrics import mean_absolute_error, root_mean_squared_error

from data import scores, sentences, tfidf
from data.errors import DataError
from data.word_pieces import SPECIAL_TOKENS


def write(path, numbers, header="text,stars"):
    rows = [f"review {n},{number}" for n, number in enumerate(numbers)]
    path.write_text("\n".join([header, *rows]) + "\n")
    return str(path)


def load(dataset, **options):
    return sentences.load_sentences(dataset, None, **{"label_column": "stars"} | options)


def message(dataset, **options):
    with pytest.raises(DataError) as caught:
        load(dataset, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def numbers_of(found):
    pairs = [pair for split in found.splits.values() for pair in zip(*split, strict=True)]
    return {text: float(score[0]) for text, score in pairs}


def test_many_fractions_are_scores_and_few_numbers_are_classes(tmp_path):
    quarters = [1 + n % 17 / 4 for n in range(100)]
    few = write(tmp_path / "few.csv", quarters)
    assert load(few).classes[:2] == ("1", "1.25") and not load(few).scores
    tenths = [f"{n % 41 / 10:.2f}" for n in range(200)]
    many = write(tmp_path / "many.csv", tenths)
    found = load(many)
    assert found.scores and found.classes == ()
    assert "labels are scores, 41 different numbers; with --labels classes each is" in found.note
    assert numbers_of(found) == {f"review {n}": n % 41 / 10 for n in range(200)}
    assert {labels.shape[1:] for _, labels in found.splits.values()} == {(1,)}
    assert all(labels.dtype == np.float64 for _, labels in found.splits.values())
    # What was asked for by name is used.
    assert len(load(many, labels="classes").classes) == 41
    named = load(few, labels="scores")
    assert named.scores and "labels are scores" not in named.note
    integers = write(tmp_path / "integers.csv", [n % 40 for n in range(200)])
    assert not load(integers).scores and load(integers, labels="scores").scores
    for form in ("{:02}", "{:05}", "1234567890123456789{}"):
        codes = write(tmp_path / "codes.csv", [form.format(n % 30) for n in range(200)])
        assert len(load(codes).classes) == 30 and load(codes, labels="scores").scores
    once = write(tmp_path / "once.csv", range(200))
    assert message(once).endswith("; pass --labels scores to predict numbers")


def test_of_scores_one_file_is_split_by_sentences_alone(tmp_path):
    """Each score is there once: as classes all of them would be in training."""
    found = load(write(tmp_path / "a.csv", [n / 7 for n in range(200)]))
    sizes = {split: len(texts) for split, (texts, _) in found.splits.items()}
    assert sizes["train"] > 130 and min(sizes.values()) > 10 and sum(sizes.values()) == 200
    assert "in training alone" not in found.note
    assert "200 rows without splits: " in found.note
    four = load(write(tmp_path / "b.csv", [1, 2, 3.5, 4]), labels="scores")
    assert [len(texts) for texts, _ in four.splits.values()] == [2, 1, 1]
    assert "2 different sentences, expected 3 or more, one for each split" in message(
        write(tmp_path / "c.csv", [1, 2]), labels="scores"
    )


@pytest.mark.parametrize("word", ["nan", "inf", "-Infinity", "1e999", "good", "3,5", "1_000", "٣"])
def test_what_is_no_score_is_named_with_its_line(tmp_path, word):
    path = tmp_path / "a.csv"
    write(path, [*range(50), f'"{word}"', "None"])
    expected = f"{path}, line 52: the label is {word!r}, expected a number; likewise 1 more"
    assert message(str(path), labels="scores") == expected


@pytest.mark.parametrize("word", ["nan", "inf"])
def test_a_missing_number_among_fractions_is_no_class(tmp_path, word):
    path = tmp_path / "a.csv"
    write(path, [*(n / 7 for n in range(50)), word])
    assert message(str(path)) == (f"{path}, line 52: the label is {word!r}, the others are numbers")


def test_signs_exponents_and_missing_zeros(tmp_path):
    words = [".5", "+2", "-3.", "1E2"]
    found = load(write(tmp_path / "a.csv", words), labels="scores")
    assert numbers_of(found) == {f"review {n}": v for n, v in enumerate([0.5, 2.0, -3.0, 100.0])}


def test_scores_that_are_all_equal_are_refused(tmp_path):
    same = write(tmp_path / "a.csv", [2.5] * 50)
    assert "all scores of the training split are 2.5" in message(same, labels="scores")


def test_a_folder_reads_the_other_splits_as_scores_too(tmp_path):
    write(tmp_path / "train.csv", [n / 7 for n in range(50)])
    write(tmp_path / "dev.csv", [1, 2, 9.5])
    write(tmp_path / "test.csv", [3, 3])
    found = load(str(tmp_path))
    assert found.splits["valid"][1].ravel().tolist() == [1, 2, 9.5]
    assert "the correlations are 0: all scores of the test split are equal" in found.note
    assert found.describe().endswith(
        "50 train, 3 valid, 2 test; scores from 0 to 7, mean 3.5 ± 2.062"
    )
    other = tmp_path / "other.csv"
    write(other, [5, 6.5, 7, 8])
    assert len(load(str(tmp_path), test_file=other).splits["test"][1]) == 4
    write(tmp_path / "dev.csv", [1, "bad"])
    assert message(str(tmp_path)) == (
        f"{tmp_path / 'dev.csv'}, line 3: the label is 'bad', expected a number"
    )


def test_docstrings_have_no_scores():
    assert message("installed-docs", labels="scores").startswith("--labels scores: ")


@pytest.mark.parametrize("test_label", [None, "-1.0"])
def test_sts_b_as_in_its_archive_and_as_hugging_face_has_it(tmp_path, test_label):
    """The first rows, few of them: the columns say that these are scores."""
    header = "index\tgood\tsentence1\tsentence2\tscore"
    for name, count in (("train", 12), ("dev", 4)):
        rows = [f'{n}\t{n % 2}\tA plane {n}.\tAn "air plane.\t{n / 4:.3f}' for n in range(count)]
        (tmp_path / f"{name}.tsv").write_text("\n".join([header, *rows]) + "\n")
    test = ["index\tgood\tsentence1\tsentence2", "0\t1\ta\tb"]
    if test_label:
        test = [header, f"0\t1\ta\tb\t{test_label}"]
    (tmp_path / "test.tsv").write_text("\n".join(test) + "\n")
    found = load(str(tmp_path), label_column=None)
    assert found.scores and found.pairs
    assert found.splits["test"][1].ravel().tolist() == [0, 0.25, 0.5, 0.75]
    assert found.splits["test"][0][0] == 'A plane 0.\tAn "air plane.'
    assert "test.tsv has no labels: dev.tsv is the test split" in found.note
    assert load(str(tmp_path), label_column="score").scores
    assert load(str(tmp_path), label_column="good").classes == ("0", "1")


def test_classes_and_scores_are_not_mixed_up(tmp_path):
    scored = load(write(tmp_path / "a.csv", [n / 7 for n in range(50)]))
    classes = load(write(tmp_path / "b.csv", [n % 2 for n in range(50)]))
    assert scored.with_classes(()) is scored
    with pytest.raises(DataError, match="a.csv: has scores, the run learned classes"):
        scored.with_classes(("0", "1"))
    with pytest.raises(DataError, match="b.csv: has classes, the run learned scores"):
        classes.with_classes(())


def test_measures_as_scipy_and_scikit_learn():
    rng = np.random.default_rng(0)
    truth = np.round(rng.normal(size=(60, 1)), 1)  # with ties
    predicted = (truth + rng.normal(size=(60, 1))).astype("float32")
    found = scores.measure(truth, predicted)
    x, y = truth.ravel(), predicted.ravel().astype("float64")
    assert found == pytest.approx(
        {
            "mae": mean_absolute_error(x, y),
            "rmse": root_mean_squared_error(x, y),
            "pearson": scipy.stats.pearsonr(x, y).statistic,
            "spearman": scipy.stats.spearmanr(x, y).statistic,
        }
    )
    assert scores.measure(truth, np.full(60, 3.0))["spearman"] == 0.0


def drawn(count, seed, pairs=False):
    """Sentences whose words add up to their score, or pairs whose score is their overlap."""
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 30, (count, 6))
    texts = [" ".join(f"w{word}" for word in row) for row in words]
    numbers = words.sum(axis=1) / 10 + 50
    if pairs:
        kept = rng.random((count, 6)) < rng.random((count, 1))
        others = np.where(kept, words, rng.integers(30, 60, (count, 6)))
        texts = [
            f"{text}\t{' '.join(f'w{word}' for word in row)}"
            for text, row in zip(texts, others, strict=True)
        ]
        numbers = kept.sum(axis=1)
    return texts, numbers[:, None].astype(np.float64)


def test_baselines_know_only_the_training_split():
    splits = {"train": drawn(300, 0), "valid": drawn(80, 1), "test": drawn(80, 2)}
    found = scores.baselines(splits)
    texts, known = splits["train"]
    vectorizer = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    features = vectorizer.fit_transform(texts)
    truth = {name: splits[name][1].ravel() for name in ("valid", "test")}
    answers = {}
    for alpha in scores.ALPHAS:
        model = Ridge(alpha, solver="lsqr", tol=1e-12).fit(features, known.ravel())
        answers[alpha] = {
            name: model.predict(vectorizer.transform(splits[name][0])) for name in truth
        }
    best = min(answers, key=lambda a: root_mean_squared_error(truth["valid"], answers[a]["valid"]))
    expected = scores.measure(truth["test"], answers[best]["test"])
    assert {name: found[f"ridge_{name}"] for name in expected} == pytest.approx(expected, rel=1e-4)
    mean = np.full(80, known.mean())
    assert found["mean_mae"] == pytest.approx(mean_absolute_error(truth["test"], mean))
    assert found["mean_rmse"] == pytest.approx(root_mean_squared_error(truth["test"], mean))
    assert found["ridge_rmse"] < 0.5 * found["mean_rmse"]


def test_of_pairs_the_baseline_sees_what_both_have_in_common():
    splits = {name: drawn(150, seed, pairs=True) for seed, name in enumerate(sentences.SPLITS)}
    assert scores.baselines(splits)["ridge_pearson"] > 0.9


def test_no_penalty_is_chosen_on_the_test_split(monkeypatch):
    """An evaluation reads its test file for a validation file that is gone."""
    splits = {name: drawn(80, seed) for seed, name in enumerate(sentences.SPLITS)}
    chosen = scores.baselines(splits)
    found = scores.baselines(splits | {"valid": splits["test"]})
    monkeypatch.setattr(scores, "ALPHAS", (1.0,))
    assert found == scores.baselines(splits) and found != chosen


def test_the_baseline_learns_from_a_bounded_number_of_sentences(monkeypatch):
    splits = {name: drawn(80, seed) for seed, name in enumerate(sentences.SPLITS)}
    whole = scores.baselines(splits)
    monkeypatch.setattr(tfidf, "MOST_SENTENCES", 40)
    part = scores.baselines(splits)
    texts, numbers = splits["train"]
    splits["train"] = texts[::2], numbers[::2]
    half = scores.baselines(splits)
    assert part["mean_mae"] == whole["mean_mae"] != half["mean_mae"]
    assert part["ridge_mae"] == half["ridge_mae"] != whole["ridge_mae"]


def test_sentences_without_a_word_have_the_mean_alone():
    splits = dict.fromkeys(sentences.SPLITS, (["a"] * 3, np.array([[1.0], [2.0], [6.0]])))
    assert scores.baselines(splits) == {
        "mean_mae": 2.0,
        "mean_rmse": pytest.approx((14 / 3) ** 0.5),
    }


class Tokenizer:
    """A vocabulary of so many pieces, without their text."""

    def __init__(self, size):
        self.size = size

    def vocabulary_size(self):
        return self.size

    def get_vocabulary(self):
        return list(SPECIAL_TOKENS)

    def token_to_id(self, token):
        return SPECIAL_TOKENS.index(token)

    pad_token_id, start_token_id, end_token_id, mask_token_id = 0, 2, 3, 4


def evidence_by_hand(ids, numbers, size):
    """Sentence by sentence, each left out of the means of its own pieces."""
    z = (numbers - numbers.mean()) / numbers.std()
    holds = [set(row) - set(range(5)) for row in ids.tolist()]

    def mean_of(piece, without=None):
        seen = [z[i] for i, pieces in enumerate(holds) if piece in pieces and i != without]
        return sum(seen) / (len(seen) + scores.PRIOR)

    x = np.array([np.mean([mean_of(p, i) for p in pieces]) for i, pieces in enumerate(holds)])
    slope = max(0.0, (x @ z) / (x @ x))
    return slope * np.array([[mean_of(piece) if piece > 4 else 0.0] for piece in range(size)])


def test_evidence_by_hand():
    rng = np.random.default_rng(0)
    ids = rng.integers(5, 30, (40, 6)).astype(np.int32)
    ids[:, 0], ids[::3, 4:] = 2, 0
    numbers = np.where(ids > 4, ids, 0).sum(axis=1) / 3.0
    found = scores.evidence({"token_ids": ids}, numbers[:, None], Tokenizer(32))
    np.testing.assert_allclose(found, evidence_by_hand(ids, numbers, 32), atol=1e-12)
    assert found.shape == (32, 1) and np.ptp(found) > 0 and not found[[*range(5), 30, 31]].any()


def test_pieces_that_say_nothing_are_no_evidence():
    """Left in, a sentence's own score would be in the means of its rare pieces."""
    rng = np.random.default_rng(1)
    ids = rng.integers(5, 400, (500, 8)).astype(np.int32)
    numbers = rng.normal(size=(500, 1))
    found = scores.evidence({"token_ids": ids}, numbers, Tokenizer(400))
    assert np.abs(found).max() < 0.1


@pytest.mark.parametrize(
    ("factor", "offset", "precision", "reason"),
    [
        (1.0, 5000.0, "float32", None),
        (1e10, 0.0, "mixed_float16", None),
        (1e-10, 0.0, "float32", None),
        (1.0, 1e9, "float64", None),
        (1.0, 1e9, "float32", "which float32 rounds by up to .* such as 1000000002, or pass --pre"),
        (
            1e30,
            0.0,
            "float64",
            "score of the training split is 4e[+]30, expected less than 1e[+]15",
        ),
        (1e14, 6e14, "float32", "score of the training split is 1e[+]15, expected less than 1e[+]"),
        (1e-30, 0.0, "float64", "the scores differ by 1.41e-30 .*, expected 1e-15 or more: "),
        (1e-310, 0.0, "float64", "the scores differ by 0 .*, expected 1e-15 or more: "),
    ],
)
def test_scores_that_float32_cannot_hold(factor, offset, precision, reason):
    numbers = offset + factor * np.arange(5.0)[:, None]
    splits = {name: ([], numbers[:count]) for name, count in (("train", 5), ("test", 1))}
    found = scores.out_of_range(splits, precision)
    assert found is None if reason is None else re.search(reason, found)


def test_a_score_of_the_test_split_that_is_too_large():
    splits = {"train": ([], np.array([[1.0], [2.0]])), "test": ([], np.array([[-1e15]]))}
    found = scores.out_of_range(splits, "float64")
    assert found.startswith(
        "the largest score of the test split is 1e+15, expected less than 1e+15"
    )
