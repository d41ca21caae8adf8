"""Starts TensorBoard on a run and sends it the requests that its pages send."""

import html
import json
import re
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request

import pytest
from tensorboard import program

SECONDS = 120  # until it has read everything, at most


class Pages:
    """A TensorBoard that a thread of this process serves, until the process ends."""

    def __init__(self, logdir):
        board = program.TensorBoard()
        where = ["--host", "127.0.0.1", "--port", "0", "--load_fast", "false"]
        board.configure([None, "--logdir", str(logdir), *where])
        self.url = f"{board.launch()}data/plugin/"
        no_proxy = urllib.request.ProxyHandler({})  # it runs on this machine
        self.opener = urllib.request.build_opener(no_proxy)

    def get(self, path, **query):
        return self.post(f"{path}?{urllib.parse.urlencode(query)}", None)

    def post(self, path, content):
        sent = None if content is None else json.dumps(content).encode()
        kind = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, sent, kind)
        with self.opener.open(request, timeout=60) as answer:
            return json.loads(answer.read())

    def is_complete(self):
        try:
            return (
                self.get("scalars/scalars", run="bert", tag="accuracy/test")
                and (groups_of_hparams(self)["sessionGroups"])
            )
        except urllib.error.HTTPError:  # not read yet
            return False


def groups_of_hparams(pages, **column):
    """Returns the session groups of the HParams page, sorted by a column."""
    wanted = {
        "experimentName": "",
        "allowedStatuses": ["STATUS_UNKNOWN", "STATUS_SUCCESS", "STATUS_RUNNING"],
        "colParams": [column] if column else [],
        "startIndex": 0,
        "sliceSize": 10,
    }
    return pages.post("hparams/session_groups", wanted)


@pytest.fixture(scope="module")
def pages(tiny_run, tmp_path_factory):
    """TensorBoard on the tiny run of bert_mlm."""
    folder = tmp_path_factory.mktemp("board")
    shutil.copytree(tiny_run.folder, folder / "bert")
    started, end = Pages(folder), time.monotonic() + SECONDS
    while not started.is_complete():
        assert time.monotonic() < end
        time.sleep(0.1)
    return started


def test_a_run_is_one_entry_under_its_own_name(pages):
    """A chart is a tag; charts of a metric are one group."""
    tags = pages.get("scalars/tags")
    assert set(tags) == {"bert"}
    for metric in ("cross_entropy", "perplexity", "accuracy"):
        assert {f"{metric}/{split}" for split in ("train", "validation", "test")} <= set(
            tags["bert"]
        )
    for tag in ("optimizer/learning_rate", "optimizer/gradient_norm", "speed/tokens_per_second"):
        assert tag in tags["bert"]


def test_charts_hold_every_record_once(pages, tiny_run):
    for name in ("loss", "learning_rate", "gradient_norm"):
        tag = "loss/train" if name == "loss" else f"optimizer/{name}"
        points = pages.get("scalars/scalars", run="bert", tag=tag)
        expected = [r for r in tiny_run.records if r["event"] == "step"]
        assert [step for _, step, _ in points] == [r["step"] for r in expected]
        values = [value for _, _, value in points]
        assert values == pytest.approx([r[name] for r in expected], rel=1e-6)


def texts(pages, run, tag):
    """Step and HTML of each text of a tag."""
    return [
        (text["step"], html.unescape(text["text"]))
        for text in pages.get("text/text", run=run, tag=tag)
    ]


def test_samples_as_text(pages):
    samples = texts(pages, "bert", "filled_masks/sentence_1")
    assert [step for step, _ in samples] == [20, 40]  # an epoch each
    for _, sample in samples:
        assert "<td>[MASK]</td>" in sample and "<strong>" in sample.split("<table>")[0]
    assert samples[0][1] != samples[1][1]


def test_training_and_validation_are_in_one_chart(pages):
    (category,) = pages.get("custom_scalars/layout")["category"]
    charts = {chart["title"]: chart["multiline"]["tag"] for chart in category["chart"]}
    assert {"loss", "cross_entropy", "perplexity", "accuracy"} <= set(charts)
    (tag,) = charts["cross_entropy"]
    found = pages.get("custom_scalars/scalars", run="bert", tag=tag)["tag_to_events"]
    assert set(found) == {f"cross_entropy/{split}" for split in ("train", "validation", "test")}


def test_options_as_text(pages, tiny_run):
    ((step, table),) = texts(pages, "bert", "options")
    cells = re.findall(r"<td>(.*?)</td>", table)
    shown = dict(zip(cells[::2], cells[1::2], strict=True))
    assert step == 0 and shown["dropout"] == "0.1" and shown["total_steps"] == "40"
    assert not {"run_dir", "cache_dir"} & set(shown)


def test_runs_can_be_sorted_by_options_and_final_metrics(pages, tiny_run):
    experiment = pages.post("hparams/experiment", {"experimentName": ""})
    names = {info["name"] for info in experiment["hparamInfos"]}
    assert {"base_learning_rate", "dropout", "seed", "recipe", "global_batch_size"} <= names
    assert not {"run_dir", "cache_dir", "quiet", "log_every"} & names
    metrics = [info["name"] for info in experiment["metricInfos"]]
    accuracy = next(name for name in metrics if name["tag"] == "accuracy/test")
    (group,) = groups_of_hparams(pages, metric=accuracy, order="ORDER_DESC")["sessionGroups"]
    assert group["hparams"]["dropout"] == 0.1 and group["hparams"]["recipe"] == "bert_mlm"
    values = {value["name"]["tag"]: value["value"] for value in group["metricValues"]}
    for name, tag in (
        ("accuracy", "accuracy/test"),
        ("cross_entropy", "cross_entropy/test"),
    ):
        assert values[tag] == pytest.approx(tiny_run.results["test"][name], rel=1e-6)
