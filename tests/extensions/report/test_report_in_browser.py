"""The report in a real browser: sorted, searched, in the dark, on a phone, following a run."""

import json
import os
import signal
import subprocess
import sys

import pytest

from headless_browser import NAMES, browser_page, find_browser
from laurel.extensions.report.page import write_report
from report_runs import reward_model_run, write_lines

BROWSER = find_browser()
pytestmark = pytest.mark.skipif(
    BROWSER is None,
    reason=f"no browser here ({', '.join(NAMES)}); Debian: apt-get install chromium",
)
TABLE = "run1-samples2"  # the first one is before and after


@pytest.fixture(scope="module")
def tab():
    assert BROWSER is not None
    with browser_page(BROWSER) as page:
        yield page


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    run = reward_model_run(folder / "exp_001")
    alarm = {
        "step": 41,
        "alarm": "zero_spread_groups",
        "state": "raised",
        "value": 0.912345,
        "metric": "train/frac_reward_zero_std",
        "threshold": 0.9,
        "text": "So it is.",
    }
    write_lines(run / "health.jsonl", [alarm])
    write_report(folder / "report.html", [run])
    return (folder / "report.html").as_uri()


@pytest.fixture
def page(tab, address):
    tab.complaints.clear()
    tab.requests.clear()
    tab.look()
    tab.open("about:blank")
    tab.open(address)
    tab.run(f"document.getElementById('{TABLE}-fold').open = true")
    tab.wait_for(f"!document.getElementById('{TABLE}-controls').hidden")
    return tab


def column(page, heading):
    """What stands in a column of the rows that are there."""
    return page.run(
        f"[...document.querySelectorAll('#{TABLE} tbody tr')].map(tr => [...tr.cells]"
        f".find(td => td.dataset.label === {json.dumps(heading)}).textContent)"
    )


def click(page, heading):
    page.run(
        f"[...document.querySelectorAll('#{TABLE} th button')]"
        f".find(b => b.textContent === {json.dumps(heading)}).click()"
    )


def search(page, words):
    """Type, and read how many were found."""
    return page.run(
        f"(() => {{ const box = document.getElementById('{TABLE}-search');"
        f"box.value = {json.dumps(words)};"
        "box.dispatchEvent(new Event('input', {bubbles: true}));"
        f"return document.getElementById('{TABLE}-count').textContent; }})()"
    )


def test_nothing_is_asked_for_and_nothing_complained_of(page, address):
    assert set(page.requests) <= {"about:blank", address}
    assert address in page.requests
    assert page.complaints == []


def test_the_policy_refuses_the_network_and_foreign_scripts(page):
    refused = page.run(
        "fetch('http://127.0.0.1:9/').then(() => 'asked', (e) => e.name + ' ' + e.message)"
    )
    assert refused.startswith("TypeError")
    page.run(
        "const s = document.createElement('script'); s.textContent = 'window.ran = 1';"
        "document.body.append(s)"
    )
    assert page.run("window.ran") is None
    assert any("Content Security Policy" in complaint for complaint in page.complaints)


def test_sorting(page):
    assert column(page, "prompt")[:3] == ["question 0", "question 1", "question 2"]
    click(page, "margin")  # numbers first from the top
    margins = [float(text) for text in column(page, "margin")]
    assert margins == sorted(margins, reverse=True)
    assert margins[0] == 55.0  # pair 59 at step 100: 59 - 5 + 1
    click(page, "margin")
    assert [float(text) for text in column(page, "margin")][:2] == [-4.5, -4.0]
    click(page, "prompt")  # names as people count
    assert column(page, "prompt")[:3] == ["question 0", "question 0", "question 1"]
    assert page.run(f"document.querySelector('#{TABLE} th[aria-sort=ascending]').textContent") == (
        "prompt"
    )


def test_searching_and_turning_pages(page):
    assert search(page, "") == "1 to 25 of 120"
    page.run(f"document.getElementById('{TABLE}-on').click()")
    assert column(page, "prompt")[0] == "question 25"
    assert search(page, "QUESTION 32") == "1 to 2 of 2"
    assert column(page, "chosen") == ["good answer 32"] * 2
    assert search(page, "wrong 3") == "1 to 2 of 2"  # every word, wherever it stands
    assert search(page, "not there") == "nothing found"
    assert column(page, "prompt") == []


def test_a_hostile_completion_is_shown_and_does_nothing(page):
    assert search(page, "question 7 hacked") == "1 to 2 of 2"
    assert column(page, "chosen")[0] == (
        '</script><script>document.title="hacked"</script>\\x1b[31m\\u202egnp\\u200b&amp;'
    )
    assert page.run("document.title") == "Laurel report"
    assert page.run("document.querySelectorAll('td script, td img').length") == 0


def test_light_and_dark(page):
    paper = "getComputedStyle(document.body).backgroundColor"
    assert page.run(paper) == "rgb(255, 255, 255)"
    page.look(theme="dark")
    assert page.run(paper) == "rgb(20, 24, 28)"
    choose = (
        "(() => {{ const box = document.getElementById('{0}'); box.value = '{1}';"
        "box.dispatchEvent(new Event('change')); }})()"
    )
    page.run(choose.format("theme", "light"))
    assert page.run(paper) == "rgb(255, 255, 255)"
    shown = "getComputedStyle(document.querySelector('g[id*=\"-raw-\"]')).display"
    assert page.run(shown) != "none"
    page.run(choose.format("curves", "smooth"))
    assert page.run(shown) == "none"


@pytest.mark.parametrize("width", [390, 320])
def test_on_a_phone_the_page_does_not_move_sideways(page, width):
    page.look(width=width, height=800)
    page.run("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert page.run("document.documentElement.scrollWidth") <= width
    widest = (
        "Math.max(...[...document.querySelectorAll('main *')]"
        ".filter(e => !e.closest('.scroll, svg, pre')).map(e => e.getBoundingClientRect().right))"
    )
    assert page.run(widest) <= width
    # Alarms and settings are cards, too, and nothing of them is cut off.
    cards = "[...document.querySelectorAll('.cards')]"
    assert page.run(f"{cards}.length") == 2
    beyond = "t => t.parentElement.scrollWidth > t.parentElement.clientWidth"
    assert page.run(f"{cards}.filter({beyond}).length") == 0
    # Each sample is a card: its cells stand below one another, with their headings.
    cells = f"[...document.querySelector('#{TABLE} tbody tr').cells].slice(0, 3)"
    tops = page.run(f"{cells}.map(td => td.getBoundingClientRect().top)")
    assert tops == sorted(set(tops))
    heading = "getComputedStyle({}, '::before').content".format(
        f"document.querySelector('#{TABLE} tbody td')"
    )
    assert page.run(heading) in ('"step"', "attr(data-label)")


@pytest.mark.slow
def test_following_a_run_keeps_what_its_reader_was_doing(tab, tmp_path):
    run = reward_model_run(tmp_path / "exp_001", num_steps=30)
    # Many steps are to come: of a run that has ended, the page stops asking.
    (run / "config.json").write_text(json.dumps({"rm": {"max_num_steps": 1_000}}))
    server = subprocess.Popen(
        [sys.executable, "-m", "laurel", "report", "--follow", str(run)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        # Whoever runs the tests in the background has had Ctrl-C ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        tab.complaints.clear()
        tab.requests.clear()
        tab.look()
        tab.open(url)
        tab.run(f"document.getElementById('{TABLE}-fold').open = true")
        tab.wait_for(f"!document.getElementById('{TABLE}-controls').hidden")
        click(tab, "margin")
        assert search(tab, "question 32") == "1 to 2 of 2"
        tab.run(f"document.getElementById('{TABLE}-search').focus()")
        tab.run("scrollTo(0, 700)")
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 31, "time": 9.0, "train/loss": 0.1}) + "\n")
        tab.wait_for("document.querySelector('main').textContent.includes('31 steps')")
        tab.wait_for("document.getElementById('live').textContent.includes('step 31')")
        assert tab.run(f"document.getElementById('{TABLE}-fold').open")
        assert column(tab, "prompt") == ["question 32"] * 2
        assert [float(text) for text in column(tab, "margin")] == [28.0, 27.5]
        assert tab.run("document.activeElement.id") == f"{TABLE}-search"
        assert tab.run("scrollY") == 700
        assert tab.complaints == []
        assert all(one.startswith((url, "about:")) for one in tab.requests)
        server.send_signal(signal.SIGINT)
        _, told = server.communicate(timeout=60)
        assert server.returncode == 130
        assert told == ""
        tab.wait_for("document.getElementById('live').textContent.includes('server has ended')")
    finally:
        if server.poll() is None:
            server.kill()
            server.communicate()
