"""How new weights get from the learner to the generators."""
