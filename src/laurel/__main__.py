"""The command `laurel`, also as `python -m laurel`."""

import sys


def main() -> None:
    """Run the command line; Ctrl-C while it is imported ends it as quietly as later."""
    try:
        from laurel.cli.main import main as run
    except KeyboardInterrupt:
        print("interrupted before anything began", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
