"""Language models that are asked for a score: served ones, and ones that this process loads."""
