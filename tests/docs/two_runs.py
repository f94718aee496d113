"""`logs/exp_001` and `logs/exp_002`: what two runs of a reward model leave behind."""

from pathlib import Path

from report_runs import reward_model_run

for name, steps in (("exp_001", 100), ("exp_002", 60)):
    reward_model_run(Path("logs") / name, num_steps=steps)
