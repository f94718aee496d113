"""`python -m laurel`: the command, where its script is not on the path."""

from laurel.cli.main import main

main()
