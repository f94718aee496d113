"""The training of reward models and supervised fine-tuning, and the parts that all training
shares.
"""
