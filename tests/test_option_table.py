"""The table of options in docs/grpo.md is that of the schema. `python tests/test_option_table.py`
writes it anew, from the docstring under each key."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from laurel.config.grpo import GenerationConfig, GRPOConfig, GRPORun, PolicyLossConfig
from laurel.config.schema_info import choices_of, item_kinds, kinds_of, sections_of
from laurel.config.yaml_tree import Section

PAGE = Path(__file__).parents[1] / "docs" / "grpo.md"
START = "<!-- options: written by `python tests/test_option_table.py` from the schema -->\n"
END = "<!-- end of options -->"
REASON = " Default: "
"""What a docstring says behind this is the reason for the default."""
LONGEST_DEFAULT = 48


def table(run: Section) -> str:
    """Every key of a run, a table a section; what occurs twice is shown once."""
    shown: dict[type[Section], str] = {}
    parts = [
        _section(name, getattr(run, name), field.description, shown)
        for name, field in type(run).model_fields.items()
    ]
    return "\n".join(line for part in parts for line in part)


def _section(
    path: str, value: Any, about: str | None, shown: dict[type[Section], str]
) -> Iterator[str]:
    """A heading, the keys of the section itself, then the sections inside it."""
    kind = value if isinstance(value, type) else type(value)
    own = about if about not in (None, "See there.") else (kind.__doc__ or "").split("\n\n")[0]
    yield f"{'#' * min(3 + path.count('.'), 5)} `{path}`\n"
    if kind in shown:
        yield f"{_plain(own)} Keys as in [`{shown[kind]}`](#{_anchor(shown[kind])}).\n"
        return
    like, known = _shared_keys(kind, shown)
    shown[kind] = path
    yield f"{_plain(own)}{f' Keys as in [`{like}`](#{_anchor(like)}), and:' if like else ''}\n"
    rows, inner = [], []
    for name, field in kind.model_fields.items():
        if name in known:
            continue
        default = (
            "required" if field.is_required() else field.get_default(call_default_factory=True)
        )
        if not isinstance(value, type):
            default = getattr(value, name)
        if isinstance(default, Section) and not _is_call(default):
            inner.append((f"{path}.{name}", default, field.description))
            continue
        rows.append(_row(name, default, field))
        inner += [
            (f"{path}.{name}{suffix}", section, None)
            for suffix, section in _sections_inside(field.annotation)
            if not _is_call(section)
        ]
    if rows:
        yield "| key | default | what it does, and why that is the default |\n| --- | --- | --- |"
        yield "\n".join(rows) + "\n"
    for entry in inner:
        yield from _section(*entry, shown)


def _shared_keys(kind: type[Section], shown: dict[type[Section], str]) -> tuple[str, set[str]]:
    """A section that is shown already and has most keys of this one; and which, with defaults."""
    for other, path in shown.items():
        same = {
            name
            for name, field in kind.model_fields.items()
            if (there := other.model_fields.get(name)) is not None
            and there.description == field.description
            and repr(there.default) == repr(field.default)
        }
        if len(same) > len(kind.model_fields) / 2:
            return path, same
    return "", set()


def _sections_inside(annotation: Any) -> Iterator[tuple[str, type[Section]]]:
    """Sections that a key may hold: itself, in a list, or by names of the user's own."""
    seen: set[type[Section]] = set()
    for kind in kinds_of(annotation):
        for suffix, kinds in (("", (kind,)), (".<each>", item_kinds(kind) or ())):
            for section in sections_of(kinds):
                if section not in seen:
                    seen.add(section)
                    yield suffix, section


def _is_call(value: Any) -> bool:
    """A class and its arguments, or steps between schedulers: shown on the line of their key."""
    kind = value if isinstance(value, type) else type(value)
    return kind.__name__ in ("NamedCall", "Milestones")


def _row(name: str, default: Any, field: Any) -> str:
    meaning, _, reason = " ".join((field.description or "").split()).partition(REASON)
    if choices := choices_of(kinds_of(field.annotation)):
        named = [choice for choice in choices if f"`{choice}`" not in meaning]
        meaning += f" One of {', '.join(f'`{c}`' for c in choices)}." if len(named) > 1 else ""
    why = f" *Why:* {reason}" if reason else ""
    return f"| `{name}` | {_default(default)} | {_cell(meaning + why)} |"


def _default(value: Any) -> str:
    if value == "required":
        return "required"
    plain = value.model_dump() if isinstance(value, Section) else value
    written = yaml.safe_dump(
        plain, default_flow_style=True, sort_keys=False, width=10**6, allow_unicode=True
    )
    text = written.removesuffix("\n").removesuffix("\n...").strip()
    text = {"''": '""'}.get(text, text)
    if len(text) > LONGEST_DEFAULT and isinstance(value, str):
        return "see `laurel config --describe`"
    return f"`{_cell(text)}`"


def _plain(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _anchor(path: str) -> str:
    """As GitHub and MkDocs make it of the heading."""
    return re.sub(r"[^\w-]", "", path.lower())


def on_the_page() -> str:
    return PAGE.read_text(encoding="utf-8").split(START)[1].split(END)[0]


def test_the_table_on_the_page_is_that_of_the_schema() -> None:
    assert on_the_page() == table(GRPORun()), "run `python tests/test_option_table.py`"


def test_every_key_has_a_meaning() -> None:
    """A row without one would be a key whose docstring is missing."""
    rows = [line.split(" | ") for line in on_the_page().splitlines() if line.startswith("| `")]
    assert len(rows) > 200
    assert [row[0] for row in rows if row[2].strip(" |") in ("", "See there.")] == []


def test_what_a_run_learns_by_says_why_it_is_set_as_it_is() -> None:
    """Numbers and switches of the method; null and what the neighbour above explains aside."""
    unexplained = {
        "GRPOConfig": {"batch_multiplier", "seed"},
        "PolicyLossConfig": {
            "use_on_policy_kl_approximation",
            "use_cispo",
            "disable_ppo_ratio",
            "normalizer",
            "force_on_policy_ratio",
        },
        "GenerationConfig": set[str](),
    }
    for section in (GRPOConfig, PolicyLossConfig, GenerationConfig):
        for name, field in section.model_fields.items():
            is_plain = isinstance(field.default, bool | int | float | str)
            if is_plain and name not in unexplained[section.__name__]:
                assert REASON in " ".join((field.description or "").split()), (section, name)


if __name__ == "__main__":
    before, rest = PAGE.read_text(encoding="utf-8").split(START)
    PAGE.write_text(before + START + table(GRPORun()) + END + rest.split(END)[1], encoding="utf-8")
