"""The training of reward models and by demonstrations, and the parts that all training shares."""
