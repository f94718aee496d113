"""The transfer of new weights from the learner to the generators."""
