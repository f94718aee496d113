"""`conversations.jsonl` of the README: conversations to be scored."""

import json
from pathlib import Path

turns = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
Path("conversations.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
