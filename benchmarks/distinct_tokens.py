"""How many tokens of real data does a model compute: one by one, with shared prompts, as trees?

    python benchmarks/distinct_tokens.py --tokenizer HuggingFaceTB/SmolLM2-135M-Instruct --markdown

A pass over each kind of data is cut into micro-batches as a run cuts it (steps of 128 groups, 4,096
tokens a micro-batch): in the order of the rows with shared prompts, and with what begins alike
brought together (`data.group_by_prefix`). The last column is all data in one tree. A second table
shows what the least length of a shared run costs and brings: tokens and runs.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from material import DATA_DIR, DATA_SETS, load_rows
from rounds import machine, table, write_json

from laurel.config.policy import LEAST_SHARED, BatchLimits
from laurel.data.forest import Batcher, distinct_tokens, prefix_trees, whole_sequences
from laurel.training.epochs import StepOrder, rows_of_dialogues
from laurel.types import Group, Preference, PreferenceSample, TokenGroup, group_of

STEP, BUDGET = 128, 4096
LEASTS = (1, 2, 4, 8, 16, 32, 64)


def main() -> None:
    from transformers import AutoTokenizer

    options = read_options()
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    kinds = {
        "pairs of dialogues (HH-harmless)": load_rows(DATA_SETS["hh_rlhf_harmless"]),
        "pairs with long prompts (QA feedback)": load_rows(DATA_SETS["qa_feedback"]),
        "lists of four solutions (GSM8K)": ranked(),
        "groups of code samples (HumanEval)": code_samples(),
    }
    rows: list[dict[str, Any]] = []
    lengths: list[dict[str, Any]] = []
    for what, preferences in kinds.items():
        samples = [
            PreferenceSample(preference=one, tokens=encoded(tokenizer, one.group))
            for one in preferences
        ]
        groups = [sample.tokens for sample in samples]
        alone = sum(sum(group.lengths_G) for group in groups)
        plain = StepOrder(len(samples), STEP, shuffle=True, seed=0)
        units = rows_of_dialogues(samples)
        together = StepOrder(len(samples), STEP, shuffle=True, seed=0, units=units)
        prompts = tokens_of_pass(groups, plain, None)
        rows.append(
            {
                "what": what,
                "groups": len(groups),
                "alone": alone,
                "prompts": prompts,
                "trees": tokens_of_pass(groups, together, LEAST_SHARED),
                "whole": distinct_tokens(groups, LEAST_SHARED),
            }
        )
        for least in LEASTS:
            runs = prefix_trees(whole_sequences(groups), least)
            tokens = sum(run.end - run.start for run in runs)
            lengths.append({"what": what, "least": least, "tokens": tokens, "runs": len(runs)})
    header = ["data", "groups", "one by one", "prompts shared", "`group_by_prefix`", "one tree"]
    cells = [
        [row["what"], f"{row['groups']:,}", f"{row['alone']:,}"]
        + [f"{row[key]:,} ({row[key] / row['alone']:.2f})" for key in ("prompts", "trees", "whole")]
        for row in rows
    ]
    print(table(header, cells, as_markdown=options.markdown))
    print()
    header = ["data", *(f"at least {least}" for least in LEASTS)]
    cells = [
        [what, *(f"{n['tokens']:,} in {n['runs']:,}" for n in lengths if n["what"] == what)]
        for what in kinds
    ]
    print(table(header, cells, as_markdown=options.markdown))
    facts = {"machine": machine(), "options": vars(options)}
    write_json(options.json, {**facts, "rows": rows, "lengths": lengths})


def tokens_of_pass(groups: Sequence[TokenGroup], order: StepOrder, least: int | None) -> int:
    """Tokens that a model computes in one epoch."""
    batcher = Batcher("forest", BatchLimits(forest_tokens=BUDGET, least_shared=least), pad_id=0)
    count = 0
    for step in range(order.steps_per_epoch):
        chosen = [groups[row] for row in order.rows(step)]
        count += sum(micro.num_tokens for micro in batcher.cut(chosen, chosen))
    return count


def encoded(tokenizer: Any, group: Group) -> TokenGroup:
    """Whole conversations in the model's template; the trunk is what they have in common."""
    whole = []
    for index in range(len(group.completions_G)):
        said = [{"role": m.role, "content": m.content} for m in group.conversation(index)]
        ids = tokenizer.apply_chat_template(said, return_dict=False)
        whole.append(np.array(ids, np.int32))
    shortest = min(map(len, whole))
    table_GL = np.array([ids[:shortest] for ids in whole])
    same_L = (table_GL == table_GL[0]).all(axis=0)
    trunk = min(int(np.argmin([*same_L, False])), shortest - 1)
    return TokenGroup(
        id=group.id,
        trunk_ids=whole[0][:trunk],
        branches_ids_G=tuple(ids[trunk:] for ids in whole),
    )


def ranked() -> list[Preference]:
    """Lists of model solutions."""
    from laurel.config.data import DatasetConfig
    from laurel.data.preferences import load_preferences

    preferences, _ = load_preferences(
        DatasetConfig(
            dataset_name="PreferenceDataset",
            data_path=str(DATA_DIR / "gsm8k_model_solutions/ranked_preference.jsonl.gz"),
        ),
        name="ranked",
        ties="keep",
        duplicates="keep",
        on_bad_row="skip",
    )
    return preferences


def code_samples() -> list[Preference]:
    """Groups of programs that a model wrote, with the prompt as a question."""
    from laurel.types import Message

    preferences = []
    with gzip.open(DATA_DIR / "humaneval_codegen_samples/groups.jsonl.gz", "rt") as lines:
        for row in map(json.loads, lines):
            prompt = [Message("user", row["prompt"])]
            group = group_of(prompt, row["completions"], group_id=row["task_id"])
            ranks = (0,) * len(row["completions"])
            preferences.append(Preference(group=group, ranks_G=ranks))
    return preferences


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", required=True, help="a model whose template renders")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", type=Path, default=Path("benchmark_results/distinct_tokens.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
