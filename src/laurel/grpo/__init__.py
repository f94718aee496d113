"""GRPO: sample groups of completions, score them, and train on their advantages.

The algorithm lies in loop, rollouts, grading, source, advantages, metrics, validation and state.
"""
