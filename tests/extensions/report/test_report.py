"""The HTML report: everything escaped, nothing fetched, whatever a run left behind."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest

from laurel.errors import DataError
from laurel.extensions.report.page import Fact, duration, write_report
from laurel.observe.comparisons import Comparison, ScoredAnswer

EVIL = '<script>alert("x")</script> & \x1b[31m'
METRICS = [
    {"step": 0, "time": 100.0, "validation/accuracy": 0.5},
    {
        "step": 1,
        "time": 101.0,
        "train/reward": -1.0,
        "train/reward_std": 0.5,
        "train/loss": 0.3,
        "timing/train/total_step_time": 1.0,
        "timing/train/generation": 0.75,
    },
    {
        "step": 2,
        "time": 103.0,
        "train/reward": 2.0,
        "train/reward_std": 0.25,
        "train/loss": "NaN",
        "timing/train/total_step_time": 2.0,
        "timing/train/generation": 1.5,
    },
    {
        "step": 2,
        "time": 104.0,
        "validation/accuracy": 0.9,
        "timing/validation/total_validation_time": 1.0,
    },
]


class Page(HTMLParser):
    """What a browser would find: attributes that fetch, ids, the text, unclosed elements."""

    VOID = frozenset({"meta", "br", "path", "use", "rect"})

    def __init__(self, html):
        super().__init__()
        self.fetched: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.tags: set[str] = set()
        self.scripts: list[str] = []
        """What a browser would run."""
        self.policy = ""
        self.text = ""
        self._is_script = self._is_data = False
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        told = dict(attrs)
        self._is_script = tag == "script" and told.get("type") is None
        self._is_data = tag == "script" and not self._is_script
        assert not self._is_data or told["type"] == "application/json"
        if told.get("http-equiv") == "Content-Security-Policy":
            self.policy = told["content"] or ""
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            elif name in ("src", "href", "xlink:href", "srcset", "action", "data"):
                (self.references if (value or "").startswith("#") else self.fetched).append(
                    value or ""
                )
            elif name.startswith("on"):
                self.fetched.append(f"{name}={value}")

    def handle_endtag(self, tag):
        self._is_script = self._is_data = False

    def handle_data(self, data):
        if self._is_script:
            self.scripts.append(data)
        elif not self._is_data:
            self.text += data


def make_run(path, *, kind="grpo", metrics=None, samples=None):
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({kind: {}, "policy": {}}), encoding="utf-8")
    (path / "config.yaml").write_text(f"{kind}:\n  name: '{EVIL[:25]}'\n", encoding="utf-8")
    for name, rows in (("metrics", metrics), ("samples", samples)):
        if rows is not None:
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (path / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return path


def page_of(path):
    html = path.read_text(encoding="utf-8")
    return html, Page(html)


def test_a_whole_run_is_shown_and_nothing_is_fetched_or_run(tmp_path):
    row = {"prompt": EVIL, "completion": "42", "reward": 1.0, "failure": None, "truncated": False}
    run = make_run(
        tmp_path / EVIL.replace("/", "_").replace("\x1b", "_"),
        metrics=METRICS,
        samples=[{"step": 2, "time": 104.0, "table": "validation/completions", "row": row}],
    )
    report = {"train": {"rows_read": 12, "rows_left_out": {EVIL: {"count": 1}}, "notes": [EVIL]}}
    (run / "data_report.json").write_text(json.dumps(report), encoding="utf-8")
    answer = ScoredAnswer(text=EVIL, score=-3.25, is_right=False)
    write_report(
        tmp_path / "report.html",
        [run, run],
        title=EVIL,
        facts=[Fact(EVIL, EVIL, EVIL)],
        comparisons=[Comparison(prompt=EVIL, expected=EVIL, before=answer, after=answer)],
    )
    html, page = page_of(tmp_path / "report.html")
    assert page.fetched == []
    (script,) = page.scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert page.policy == (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "base-uri 'none'; form-action 'none'"
    )
    assert not {"link", "img", "iframe", "object"} & page.tags
    assert "\x1b" not in html
    assert not re.search(r"https?://|url\((?!#)|@import", html)
    assert len(page.ids) == len(set(page.ids))
    assert {reference[1:] for reference in page.references} <= set(page.ids)
    assert html.count("<svg") == 3  # reward, success, and loss with its only finite point
    assert "mean of A and B from -1 to 2" in html
    assert "mean of A and B from 0.5 to 0.9" in html
    assert "-3.25" in page.text
    assert page.text.count(EVIL.replace("\x1b", "\\x1b")) > 8
    assert "<pre>grpo:\n  name: &#39;&lt;script" in html


def test_figures_stand_beside_their_baselines(tmp_path):
    validated = {
        "validation-default/num_valid_samples": 60.0,
        "validation-default/longer_wins_baseline": 0.55,
        "performance/reward_hidden_share": 0.375,
    }
    metrics = [
        {"step": step, "time": 1.0, **validated, "validation-default/accuracy": accuracy}
        for step, accuracy in ((50, 0.625), (100, 0.75))
    ]
    write_report(tmp_path / "report.html", [make_run(tmp_path / "run", kind="rm", metrics=metrics)])
    html, page = page_of(tmp_path / "report.html")
    assert ">75.0%</dd>" in html
    assert "60 pairs; longer answer 55.0%; 62.5% at step 50" in page.text
    assert "38% of the time of scoring was hidden behind sampling" in page.text
    assert not re.search(r"<details[^>]*\bopen\b", html)


def test_where_the_time_went(tmp_path):
    """Of 3 s of steps 2.25 s are generation and 0.75 s have no name; 1 s validates."""
    run = make_run(tmp_path / "run", metrics=METRICS)
    write_report(tmp_path / "report.html", [run])
    text = re.sub(r"<[^>]+>|\s+", " ", page_of(tmp_path / "report.html")[0])
    text = re.sub(r"\s+", " ", text)
    assert "generation, with its rewards 2.2 s 56%" in text
    assert "other 0.8 s 19%" in text
    assert "validation 1.0 s 25%" in text
    assert "2 steps in 4.0 s" in text


@pytest.mark.parametrize("metrics", [None, [{"step": 0, "time": 1.0}]])
def test_a_run_that_logged_nothing_is_no_error(tmp_path, metrics):
    write_report(tmp_path / "report.html", [make_run(tmp_path / "run", metrics=metrics)])
    html, page = page_of(tmp_path / "report.html")
    assert "Nothing was logged." in page.text
    assert "<svg" not in html


def test_what_is_no_run_is_refused_with_a_hint(tmp_path):
    with pytest.raises(DataError, match="no such directory"):
        write_report(tmp_path / "report.html", [tmp_path / "nowhere"])
    make_run(tmp_path / "logs" / "exp_002")
    with pytest.raises(DataError, match=r"did you mean .*exp_002\?"):
        write_report(tmp_path / "report.html", [tmp_path / "logs"])
    broken = make_run(tmp_path / "broken")
    (broken / "data_report.json").write_text("{", encoding="utf-8")
    with pytest.raises(DataError, match=r"data_report\.json: not JSON"):
        write_report(tmp_path / "report.html", [broken])
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.9, "9.9 s"), (42.4, "42 s"), (59.7, "1 min 0 s"), (7_830, "2 h 10 min")],
)
def test_duration(seconds, text):
    assert duration(seconds) == text
