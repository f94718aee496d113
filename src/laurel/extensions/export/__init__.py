"""`laurel export`: plain Hugging Face directories, tested, with a card; averages of weights."""
