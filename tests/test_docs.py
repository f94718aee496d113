"""README.md and docs/ do what they say: their blocks run, their links lead somewhere.

`python tests/test_docs.py [PAGE ...]` runs the pages and writes the outputs that they show anew.
CONTRIBUTING.md ("Pages") says what the comments before blocks mean. The second half of the pages is
run by `test_docs_guides.py`, so that two processes share the work.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from pathlib import Path

import pytest

from doc_blocks import ROOT, documents, faults, parse, read, same
from doc_runner import BlockFailed, PageRun, refreshed, warm_server
from doc_settings import laurel_commands, problems, wrong_options, wrong_overrides

PAGES = documents()
IDS = [path.relative_to(ROOT).as_posix() for path in PAGES]


@pytest.fixture(scope="module")
def server():
    with warm_server() as running:
        yield running


@pytest.mark.slow_parameters(
    "README.md",
    "docs/clusters.md",
    "docs/grpo.md",
    "docs/notebooks.md",
    "docs/reliability.md",
    "docs/reward_models.md",
)
@pytest.mark.parametrize("path", PAGES[::2], ids=IDS[::2])
def test_the_blocks_of_a_page_run(path, server, tmp_path):
    page = PageRun(read(path), tmp_path / "page", server)
    page.all()
    assert not page.differences(), "\n\n".join(page.differences())


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_a_page_keeps_to_the_convention(path):
    document = read(path)
    wrong = faults(document)
    for block in document.blocks:
        if block.language == "bash":
            for arguments in laurel_commands(block.text):
                wrong += [
                    f"{block.place}: {told}"
                    for told in (wrong_options(arguments), wrong_overrides(arguments))
                    if told
                ]
    assert not wrong, "\n".join(wrong)


_NAMED = re.compile(
    r"(?<![\w./-])((?:benchmarks|examples|recipes|tests)/[\w./-]*\w\.(?:py|ya?ml|md|sbatch))"
)
_LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\((?P<target>[^)\s]+)\)")


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_files_that_a_page_names_exist(path):
    text = path.read_text(encoding="utf-8")
    missing = {name for name in _NAMED.findall(text) if not (ROOT / name).exists()}
    assert not missing


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_links_lead_somewhere(path):
    """`mkdocs build --strict` says it of the site; this also of README, and without MkDocs."""
    wrong = []
    for link in _LINK.finditer(
        re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.S)
    ):
        name, _, anchor = link["target"].partition("#")
        if "://" in name:
            continue
        target = (path.parent / name).resolve() if name else path
        generated = "docs/" in target.as_posix() and target.name in MADE_BY_THE_SITE
        pages = target.suffix == ".md" and target.exists()
        if not (target.exists() or generated or "reference" in target.parts) or (
            anchor and pages and anchor not in anchors(target)
        ):
            wrong.append(link["target"])
    assert not wrong


MADE_BY_THE_SITE = {"architecture.md", "contributing.md", "changelog.md"}


def anchors(path: Path) -> set[str]:
    """Of headings, as MkDocs and GitHub both make them of plain words."""
    headings = re.findall(r"^#+ +(.+?)\s*$", path.read_text(encoding="utf-8"), re.MULTILINE)
    slugs = {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", h).strip().lower()) for h in headings}
    return slugs | set(re.findall(r'(?:id="|\{ *#)([\w-]+)', path.read_text(encoding="utf-8")))


# --------------------------------------------------------------------- what would be seen, is seen


def page(text: str):
    return parse(text, ROOT / "docs" / "page.md")


def test_what_the_comments_say():
    document = page(
        "<!-- hidden setup: a.py -->\n<!-- not run: a GPU -->\n```bash\nnvidia-smi\n```\n"
        "<!-- file: a/b.json -->\n```json\n{}\n```\n```python\n1\n```\n"
        "<!-- output -->\n```text\n2\n```\n"
    )
    assert document.setups == ("a.py",)
    assert [(b.kind, b.value) for b in document.blocks] == [
        ("not run", "a GPU"),
        ("file", "a/b.json"),
        ("run", ""),
        ("output", ""),
    ]
    assert faults(document) == []
    wrong = page(
        "<!-- not run: -->\n```bash\nx\n```\n<!-- output -->\n```text\n```\n```\nlaurel rm\n```\n"
    )
    assert [told.split(": ")[0] for told in faults(wrong)] == [
        "docs/page.md:2",
        "docs/page.md:6",
        "docs/page.md:8",
    ]


@pytest.mark.parametrize(
    ("shown", "real", "alike"),
    [
        ("loss 0.31, 12 s", "loss 0.4412, 1 min 3 s", True),
        ("  pairs   1,024  ---", "pairs 7 -----", True),
        ("accuracy 0.9", "loss 0.9", False),
        ("a\n...\nd", "a\nb\nc\nd", True),
        ("a\n...\nd", "a\nb\nc", False),
        ("a\n...\nc\n...", "a\nb\nc", True),
        ("a", "a\nb", False),
    ],
)
def test_outputs_are_compared_without_their_figures(shown, real, alike):
    assert same(shown, real) is alike


@pytest.mark.parametrize(
    ("block", "told"),
    [
        (
            "```bash\necho a | tr a b > c\ntest $(cat c) = b\nfalse\n```\n",
            "page.md:1: exit status 1",
        ),
        ("```python\na = 1\n```\n```python\nassert a == 2\n```\n", 'page.md", line 5'),
        ("```bash\nlaurel config --for what\n```\n", "exit status 2"),
        ("```bash\nlaurel --versio | cat\n```\n", "exit status 2"),
        ("```yaml\npolicy: {precisoin: float32}\n```\n", "precisoin"),
        ("```yaml\njudge: {num_sample: 3}\n```\n", "num_sample"),
        ("<!-- hidden setup: none.py -->\n", "there is no"),
    ],
)
def test_a_block_that_fails_is_seen(block, told, server, tmp_path):
    with pytest.raises(AssertionError, match=re.escape(told)):
        PageRun(page(block), tmp_path / "page", server).all()


def test_a_server_that_a_page_starts_ends_with_it(server, tmp_path):
    text = """```bash
(trap 'echo ended > end.txt; exit' TERM; touch started; while true; do sleep 0.1; done) &
until test -e started; do sleep 0.02; done
```
"""
    PageRun(page(text), tmp_path / "page", server).all()
    end = time.monotonic() + 60
    while not (tmp_path / "page" / "end.txt").exists():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_an_output_that_is_another_is_seen_and_written(server, tmp_path):
    run = PageRun(
        page("```bash\necho new\n```\n<!-- output -->\n```text\nold\n```\n"),
        tmp_path / "page",
        server,
    )
    run.all()
    assert ["docs/page.md:5" in told for told in run.differences()] == [True]


def test_settings_and_options_that_are_none():
    assert problems({"grpo": {"max_num_steps": 4}}) is None
    assert "num_generation" in str(problems({"grpo": {"num_generation_per_prompt": 4}}))
    assert problems({"enabled": True, "target_max": 2.0}) is None
    assert problems({"nothing": 1}) is not None
    [arguments] = laurel_commands("laurel rm --confg a.yaml \\\n  policy.x=1 > log  # says no\n")
    assert arguments == ["rm", "--confg", "a.yaml", "policy.x=1"]
    assert "--confg" in str(wrong_options(arguments))
    assert wrong_options(["eval", "pairs", "-m", "a", "-d", "b"]) is None
    assert wrong_options(["config", "--for", "rm", "rm.max_num_steps=1"]) is None
    assert "evil" in str(wrong_options(["evil", "pairs"]))
    assert "precisoin" in str(
        wrong_overrides(["rm", "-c", "examples/configs/rm.yaml", "policy.precisoin=float32"])
    )


def main(names: list[str]) -> None:
    """Run the pages (all of them, or those named) and write their outputs anew."""
    with warm_server() as server:
        for path in [Path(name).resolve() for name in names] or PAGES:
            with tempfile.TemporaryDirectory(
                prefix="laurel-page-", ignore_cleanup_errors=True
            ) as at:
                run = PageRun(read(path), Path(at) / "page", server)
                try:
                    run.all()
                except BlockFailed as failure:
                    print(failure)
                    continue
                text = refreshed(run.document, run.said)
            if text != path.read_text(encoding="utf-8"):
                path.write_text(text, encoding="utf-8")
                print(f"{run.document.name}: outputs written")


if __name__ == "__main__":
    main(sys.argv[1:])
