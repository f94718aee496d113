"""Data that are generated: for the demo, the recipes, and data sets of configurations."""
