"""GRPO: sample groups of completions, score them, and train on their advantages.

Read loop, rollouts, judging, source, advantages, metrics, validation and state to know it.
"""
