"""GRPO: sampling groups of completions, judging them, and learning from their advantages.

Read loop, rollouts, judging, source, advantages, metrics, validation and state to know it.
"""
