"""Where the reference's tokens are not those of the scoring contract, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from laurel.models.rewardbench_format import ReferenceRow, RewardBenchContract, by_position
from laurel.models.scoring import ScoringContract
from laurel.rewards.to_tokens import Prepared, prepared_by
from laurel.types import Group

BOS = "BOS doubled, the first hidden"
ROLES = "roles by position"
CUT = "cut differently"
EARLIER = "read before the last token"
TEXT = "rendered differently"
SPECIAL = "special tokens added"
FAILS = "one of the two cannot read it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Of the tokens of one conversation."""

    reasons: tuple[str, ...]
    is_read: bool
    """Whether the model reads other tokens; a BOS that is hidden again is none."""


def differences(
    reference: RewardBenchContract, groups: Sequence[Group]
) -> list[tuple[Difference | None, ...]]:
    """For each completion of each group how its tokens differ; None where they are the same."""
    own = prepared_by(reference.own, groups)
    theirs = prepared_by(reference, groups)
    return [
        tuple(
            _difference(reference, group, index, ours, other)
            for index, (ours, other) in enumerate(
                zip(_ids_of(own_tokens), _ids_of(other_tokens), strict=True)
            )
        )
        for group, own_tokens, other_tokens in zip(groups, own, theirs, strict=True)
    ]


def _ids_of(prepared: Prepared) -> list[tuple[list[int], bool] | None]:
    """Tokens of each completion and whether they were cut; None where it cannot be read."""
    tokens, failures = prepared
    if tokens is None:
        return [None] * len(failures)
    trunk = tokens.trunk_ids.tolist()
    read = iter(
        [
            (trunk + ids.tolist(), was_cut)
            for ids, was_cut in zip(tokens.branches_ids_G, tokens.truncated_G, strict=True)
        ]
    )
    return [next(read) if failure is None else None for failure in failures]


def _difference(
    reference: RewardBenchContract,
    group: Group,
    index: int,
    ours: tuple[list[int], bool] | None,
    theirs: tuple[list[int], bool] | None,
) -> Difference | None:
    if ours is None or theirs is None:
        return None if ours is theirs else Difference(reasons=(FAILS,), is_read=True)
    (row,) = reference.rows(_alone(group, index))
    is_read = row.read_ids != ours[0]
    if not is_read and row.ids == ours[0]:
        return None
    return Difference(
        reasons=_reasons(reference.own, group, index, row, ours, is_read=is_read), is_read=is_read
    )


def _reasons(
    own: ScoringContract,
    group: Group,
    index: int,
    row: ReferenceRow,
    ours: tuple[list[int], bool],
    *,
    is_read: bool,
) -> tuple[str, ...]:
    given = group.conversation(index)
    has_other_roles = by_position(group.prompt, group.completions_G[index].messages) != given
    found = {
        BOS: row.start > 0,
        ROLES: has_other_roles,
        CUT: is_read and (row.truncated or ours[1]),
        EARLIER: row.end < len(row.ids),
        TEXT: not has_other_roles and row.text != own.render(given),
    }
    return tuple(reason for reason, holds in found.items() if holds) or (SPECIAL,)


def _alone(group: Group, index: int) -> Group:
    return Group(id=group.id, prompt=group.prompt, completions_G=(group.completions_G[index],))


def summary(found: Sequence[Sequence[Difference | None]]) -> dict[str, Any]:
    """How many rows and conversations differ, and for which reasons, in values that JSON knows."""
    rows = [[one for one in row if one is not None] for row in found]
    every = [one for row in rows for one in row]
    reasons = Counter(reason for one in every for reason in one.reasons)
    rows_by_reason = Counter(
        reason for row in rows for reason in {r for one in row for r in one.reasons}
    )
    return {
        "num_rows": sum(map(bool, rows)),
        "num_rows_read_differently": sum(any(one.is_read for one in row) for row in rows),
        "num_completions": len(every),
        "num_completions_read_differently": sum(one.is_read for one in every),
        "reasons": {
            reason: {"num_rows": rows_by_reason[reason], "num_completions": count}
            for reason, count in reasons.most_common()
        },
    }
