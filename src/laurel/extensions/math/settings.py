"""Defines `env.math`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from laurel.config.yaml_tree import MAY_CHANGE, ONE_PER_CORE, Section


class MathEnvironmentConfig(Section):
    """Answers that are checked against a known one."""

    num_workers: Annotated[int, MAY_CHANGE, ONE_PER_CORE] = Field(default=8, ge=1)
    """Processes that check answers; at most one per core is started. Default: as many as
    most machines have cores to spare."""
    verifier_type: Literal["math", "english_multichoice", "multilingual_multichoice"] = "math"
    """`math`: math-verify; the others read a letter after the last "Answer:"."""
    stop_strings: list[str] | None = None
    """Where a completion ends besides the end of its turn."""
    timeout_seconds: float = Field(default=3.0, gt=0)
    """Wall-clock limit of one answer, after which its process is killed. A timeout is a verdict
    (the policy wrote what cannot be checked in time), worth 0 and counted. Default: real answers
    are checked in milliseconds."""
    forbid_unevaluated: bool = True
    """Reject an unevaluated integral, sum, product or arithmetic with plain numbers (`(16-3-4)*2`)
    unless the known answer has one: the policy would only restate the problem."""
