"""`pairs.jsonl` and `held_out.jsonl`: a reader's own preferences, in the folder of the page."""

import json
from pathlib import Path

from laurel.demo.data import errands

for name, count, held_out in (("pairs", 600, False), ("held_out", 60, True)):
    rows = errands(count, seed=0, held_out=held_out)
    Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
