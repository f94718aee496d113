"""Small checkpoints for the tests of the store."""

from laurel.models.checkpoint.store import CheckpointStore

FILES = {"model.safetensors": b"weights of ", "policy/tokenizer.json": b"words of "}


def writer(step, files=None):
    def write(directory):
        for name, content in (files or FILES).items():
            path = directory / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content + str(step).encode())

    return write


def save_step(store, step, write, **options):
    """Save a step as a run does that waits for it; returns the directory."""

    def begin(directory):
        write(directory)
        return lambda is_awaited: 0.0

    return store.begin(step, begin, **options).finish()


def save_all(root, metrics, **options):
    """Save a step for each entry; returns the root."""
    with CheckpointStore(root, **options) as store:
        for step, metric in metrics.items():
            save_step(store, step, writer(step), metric=metric, info={"total_steps": step})
    return root


def hidden(root):
    return sorted(path.name for path in root.iterdir() if path.name.startswith("."))
