"""Estimators of advantages beside GRPO's, each in a few lines: GPG, OPO, pass@k, ReMax."""
