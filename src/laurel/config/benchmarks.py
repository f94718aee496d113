"""A benchmark of reward models where a configuration names one: which rows, from where."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from laurel.config.section import Section

BenchmarkName = Literal[
    "reward-bench", "reward-bench-2", "rm-bench", "judge-bench", "pairs", "best-of-n"
]
"""As the commands of `laurel eval` are called."""
_ONLY_FOR: dict[str, BenchmarkName] = {
    "dataset_name": "pairs", "prior": "reward-bench", "zero_spread": "reward-bench-2"
}  # fmt: skip


class BenchmarkSetConfig(Section):
    """One benchmark, with the rows that `laurel eval` would take."""

    benchmark: BenchmarkName
    """Which one."""
    data_path: str | list[str] | None = None
    """Files (.jsonl, .json, .csv, .parquet, .arrow; also .gz), directories written by
    `datasets.save_to_disk`, or names on the hub. Null: the benchmark's own place on the hub, which
    `pairs` and `best-of-n` have not."""
    split: str | None = None
    """Of a directory or a hub data set; null: the benchmark's own, or `train`."""
    dataset_name: str | None = None
    """The class that reads them (`pairs`); null is told from the rows."""
    prior: bool = False
    """The prior sets too, from the hub (`reward-bench`)."""
    zero_spread: Literal["limit", "leave_out"] = "limit"
    """Prompts of Ties whose right answers all score the same (`reward-bench-2`); see
    `evaluation.reward_bench_2`."""
    max_samples: int | None = Field(default=None, ge=1)
    """Rows at most, of each subset its share, the same ones each time. A benchmark that is cut has
    no final score."""

    @model_validator(mode="after")
    def _fits(self) -> BenchmarkSetConfig:
        for key, benchmark in _ONLY_FOR.items():
            if key in self.model_fields_set and self.benchmark != benchmark:
                raise ValueError(f"{key} is for benchmark={benchmark}; leave it out")
        if not self.paths and self.benchmark in ("pairs", "best-of-n") and not self.dataset_name:
            raise ValueError(
                f"data_path is missing: benchmark={self.benchmark} has no place of its own; name a "
                "file or a hub name, or a dataset_name that has one"
            )
        return self

    @property
    def paths(self) -> tuple[str, ...]:
        """Where its rows are; empty for its own place."""
        if self.data_path is None:
            return ()
        return (self.data_path,) if isinstance(self.data_path, str) else tuple(self.data_path)
